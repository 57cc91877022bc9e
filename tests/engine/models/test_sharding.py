"""Parts of a model cover it, and steps arrive at other ranks as they were sent."""

from __future__ import annotations

import io
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from harness.engine.checkpoints import CONFIGS
from hypothesis import given
from hypothesis import strategies as st
from parrot_engine.batch import BatchRow, BlockCopy, StepBatch
from parrot_engine.distributed.step_message import AdapterChange, StepMessage, decode, encode
from parrot_engine.exceptions import SettingsError, ShardError
from parrot_engine.models.decoder import Decoder, gather_logits
from parrot_engine.models.families.registry import family_of
from parrot_engine.models.loader import draw_weights
from parrot_engine.models.parts import TensorSpec, weight_parts
from parrot_engine.models.sharding import Collective, Shard, part_of, shard_config

ints = st.integers(0, 2**31 - 1)
rows = st.builds(
    BatchRow,
    st.lists(ints, min_size=1, max_size=9),
    ints,
    st.lists(ints, min_size=1, max_size=9),
    st.sampled_from(["none", "last", "all"]),
    st.none() | st.integers(0, 1000),
)
ids = st.text("0123456789abcdef", min_size=1, max_size=9)


@st.composite
def messages(draw: st.DrawFn) -> StepMessage:
    some = draw(st.lists(rows, max_size=5))
    copies = draw(st.lists(st.builds(BlockCopy, ints, ints), max_size=4))
    each = st.lists(st.just("") | ids, min_size=len(some), max_size=len(some))
    adapters = draw(st.just([]) | each)
    return StepMessage(StepBatch(some, copies, adapters=adapters), draw(st.integers(0, 1000)))


changes = st.builds(AdapterChange, st.integers(0, 1000), st.just("") | ids)


def reading(data: bytes) -> Callable[[int], bytes]:
    return io.BytesIO(data).read


@given(st.lists(messages() | changes, max_size=3))
def test_steps_arrive_as_they_were_sent(sent: list[StepMessage | AdapterChange]) -> None:
    read = reading(b"".join(map(encode, sent)))
    for message in sent:
        got = decode(read)
        if isinstance(message, AdapterChange) or isinstance(got, AdapterChange):
            assert got == message
            continue
        adapters = message.batch.adapters
        assert list(got.batch.adapters) == (list(adapters) if any(adapters) else [])
        assert got.num_sampled == message.num_sampled
        assert got.batch.copies == message.batch.copies
        # What was drafted concerns tokens once they are sampled: other ranks need not know.
        assert [row._replace(block_table=list(row.block_table)) for row in got.batch.rows] == [
            row._replace(num_drafts=0) for row in message.batch.rows
        ]
    assert read(1) == b""


def test_block_tables_may_be_arrays() -> None:
    table = np.array([3, 1, 2], dtype=np.int32)
    message = StepMessage(StepBatch([BatchRow([5], 40, table, "last", 0)]), 1)
    got = decode(reading(encode(message)))
    assert isinstance(got, StepMessage)
    (row,) = got.batch.rows
    assert list(row.block_table) == [3, 1, 2]
    assert row.pending == 0


@pytest.mark.parametrize("at", [0, 8, 12])
def test_what_is_no_step_is_refused(at: int) -> None:
    message = StepMessage(StepBatch([BatchRow([5, 6], 40, [1], "last")]), 1)
    data = bytearray(encode(message))
    data[at] ^= 1
    with pytest.raises(ShardError):
        decode(reading(bytes(data) + bytes(64)))


@given(st.integers(1, 8), st.integers(8, 300))
def test_parts_along_an_axis_follow_each_other(size: int, total: int) -> None:
    whole = torch.arange(total)
    shards = [Shard(rank, size) for rank in range(size)]
    lengths = [len(whole[shard.rows(total)]) for shard in shards]
    parts = [
        whole[part_of([total], [length], shard)]
        for shard, length in zip(shards, lengths, strict=True)
    ]
    assert torch.equal(torch.cat(parts), whole)


def test_what_is_fewer_than_ranks_is_held_by_several() -> None:
    """Two KV heads of 16 over 8 ranks: four ranks hold the same."""
    places = [part_of([32, 5], [16, 5], Shard(rank, 8)) for rank in range(8)]
    assert places == [(slice(0, 16), slice(0, 5))] * 4 + [(slice(16, 32), slice(0, 5))] * 4


@pytest.mark.parametrize(
    ("name", "expert_parallel"),
    [
        ("qwen2", False),
        ("qwen3-moe", False),
        ("mixtral", False),
        ("gpt-oss", False),
        ("qwen3-moe", True),
        ("gpt-oss", True),
    ],
)
def test_drawn_weights_of_the_ranks_are_parts_of_those_of_one(
    name: str, expert_parallel: bool
) -> None:
    """Projections of a stack, q, k and v or gate and up of every expert, are cut one by one; of
    whole experts each is held once."""
    architecture = type(CONFIGS[name]).__name__.replace("Config", "ForCausalLM")
    raw = CONFIGS[name].to_dict() | {"architectures": [architecture]}
    if expert_parallel:
        raw |= {"num_local_experts": 6}
    config = family_of(raw).read_config(raw)
    spec = TensorSpec(torch.device("cpu"), torch.float32)
    whole = Decoder(config, spec)
    draw_weights(whole, seed=3)
    origin = Decoder(config, spec._replace(device=torch.device("meta")))
    uncut = {part.name: part.target for part in weight_parts(whole)}
    held: list[str] = []
    for shard in (Shard(0, 2), Shard(1, 2)):
        collective = cast(Collective, SimpleNamespace(shard=shard))
        own_config = shard_config(config, shard, expert_parallel=expert_parallel)
        part = Decoder(own_config, spec._replace(collective=collective))
        draw_weights(part, 3, origin, shard)
        for name, target, _ in weight_parts(part):
            place = part_of(uncut[name].shape, target.shape, shard)
            assert torch.equal(target, uncut[name][place]), name
            held.append(name)
    of_experts = [name for name in held if ".experts." in name]
    assert set(held) == uncut.keys()
    assert len(set(of_experts)) * (1 if expert_parallel else 2) == len(of_experts)


def test_a_mixture_is_divided_by_columns_of_its_experts() -> None:
    raw = CONFIGS["olmoe"].to_dict() | {"architectures": ["OlmoeForCausalLM"]}
    with pytest.raises(SettingsError, match="norms over all heads"):
        shard_config(family_of(raw).read_config(raw), Shard(0, 2))
    raw = CONFIGS["mixtral"].to_dict() | {"architectures": ["MixtralForCausalLM"]}
    config = family_of(raw | {"intermediate_size": 42}).read_config(raw | {"intermediate_size": 42})
    with pytest.raises(SettingsError, match=r"42 columns of an expert.* can take 1, 2"):
        shard_config(config, Shard(0, 4))
    with pytest.raises(SettingsError, match=r"5 experts cannot be divided by 2.* can take 1$"):
        shard_config(config, Shard(0, 2), expert_parallel=True)
    raw = CONFIGS["qwen2"].to_dict() | {"architectures": ["Qwen2ForCausalLM"]}
    with pytest.raises(SettingsError, match=r"enable_expert_parallel.*no mixtures of experts"):
        shard_config(family_of(raw).read_config(raw), Shard(0, 2), expert_parallel=True)


class TwoRanks:
    """The collective of rank 0 of two; the other one has larger numbers."""

    shard = Shard(0, 2)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x, x + 100])


@pytest.mark.parametrize("vocab_size", [7, 8])
def test_logits_of_all_ranks_lie_as_those_of_one(vocab_size: int) -> None:
    part = torch.arange(12.0).view(3, 4)
    expected = torch.cat([part, part + 100], dim=1)[:, :vocab_size]
    out = torch.empty(3, vocab_size)
    for target in (None, out):
        logits = gather_logits(TwoRanks(), part, vocab_size, target)  # type: ignore[arg-type]
        assert torch.equal(logits, expected)
        # Kernels read rows of this length, one behind the other.
        assert logits.is_contiguous()
