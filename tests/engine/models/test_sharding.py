"""Parts of a model cover it, and steps arrive at other ranks as they were sent."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from parrot_engine.batch import BatchRow, BlockCopy, StepBatch
from parrot_engine.distributed.step_message import StepMessage, decode, encode
from parrot_engine.exceptions import ShardError
from parrot_engine.models.decoder import gather_logits
from parrot_engine.models.sharding import Shard, part_of, parts_of_stack

ints = st.integers(0, 2**31 - 1)
rows = st.builds(
    BatchRow,
    st.lists(ints, min_size=1, max_size=9),
    ints,
    st.lists(ints, min_size=1, max_size=9),
    st.sampled_from(["none", "last", "all"]),
    st.none() | st.integers(0, 1000),
)
messages = st.builds(
    StepMessage,
    st.builds(
        StepBatch,
        st.lists(rows, max_size=5),
        st.lists(st.builds(BlockCopy, ints, ints), max_size=4),
    ),
    st.integers(0, 1000),
)


def reading(data: bytes) -> Callable[[int], bytes]:
    return io.BytesIO(data).read


@given(st.lists(messages, max_size=3))
def test_steps_arrive_as_they_were_sent(sent: list[StepMessage]) -> None:
    read = reading(b"".join(map(encode, sent)))
    for message in sent:
        got = decode(read)
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
    (row,) = decode(reading(encode(message))).batch.rows
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


def test_projections_of_a_stack_are_cut_one_by_one() -> None:
    found = list(parts_of_stack({"q": 8, "k": 4, "v": 4}, {"q": 4, "k": 2, "v": 2}))
    assert found == [
        (slice(0, 8), slice(0, 4)),
        (slice(8, 12), slice(4, 6)),
        (slice(12, 16), slice(6, 8)),
    ]


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
