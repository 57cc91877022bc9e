"""The torch attention back end against a token-by-token reference in float64."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from parrot_engine.attention import torch_backend
from parrot_engine.attention.interface import AttentionShape
from parrot_engine.attention.torch_backend import TorchAttention
from parrot_engine.batch import BatchRow
from torch import Tensor

NUM_BLOCKS = 96


class Setup(NamedTuple):
    """A batch of rows in the middle of their contexts, and the sizes of the heads."""

    shape: AttentionShape
    window: int | None
    #: (cached tokens, new tokens) of each row.
    rows: list[tuple[int, int]]
    seed: int


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    shape = AttentionShape(
        num_heads=kv_heads * draw(st.sampled_from([1, 2, 4])),
        num_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([8, 16])),
        block_size=draw(st.sampled_from([1, 4, 16])),
    )
    lengths = st.tuples(st.integers(0, 40), st.one_of(st.just(1), st.integers(1, 24)))
    most = 1 if shape.block_size == 1 else 5
    rows = draw(st.lists(lengths, min_size=1, max_size=most))
    window = draw(st.one_of(st.none(), st.integers(1, 30)))
    return Setup(shape, window, rows, draw(st.integers(0, 1000)))


class Outcome(NamedTuple):
    """Output of the back end on a setup, and the expected one."""

    out: Tensor
    expected: Tensor
    cache_before: Tensor
    cache_after: Tensor
    batch: list[BatchRow]


def _run(setup: Setup) -> Outcome:
    shape, window, lengths, seed = setup
    generator = torch.Generator().manual_seed(seed)
    free = list(range(NUM_BLOCKS))
    random.Random(seed).shuffle(free)
    layer_kv = torch.full(
        (2, NUM_BLOCKS, shape.num_kv_heads, shape.block_size, shape.head_dim), float("nan")
    )
    backend = TorchAttention(
        shape, windows=[window], device=torch.device("cpu"), dtype=torch.float32
    )
    scale = 0.3

    def heads(number: int, count: int) -> Tensor:
        return torch.randn(number, count, shape.head_dim, generator=generator)

    cached_rows, new_rows, keys, values = [], [], [], []
    for cached, new in lengths:
        table = [free.pop() for _ in range(-(-(cached + new) // shape.block_size))]
        keys.append(heads(cached + new, shape.num_kv_heads))
        values.append(heads(cached + new, shape.num_kv_heads))
        if cached:
            cached_table = table[: -(-cached // shape.block_size)]
            cached_rows.append(BatchRow([0] * cached, 0, cached_table))
        new_rows.append(BatchRow([0] * new, cached, table))
    cached_lengths = [cached for cached, _ in lengths]
    if cached_rows:
        backend.forward(
            heads(sum(cached_lengths), shape.num_heads),
            torch.cat([k[:n] for k, n in zip(keys, cached_lengths, strict=True)]),
            torch.cat([v[:n] for v, n in zip(values, cached_lengths, strict=True)]),
            layer_kv,
            backend.plan(cached_rows),
            window=window,
            scale=scale,
        )
    before = layer_kv.clone()
    query = heads(sum(new for _, new in lengths), shape.num_heads)
    out = backend.forward(
        query,
        torch.cat([k[n:] for k, n in zip(keys, cached_lengths, strict=True)]),
        torch.cat([v[n:] for v, n in zip(values, cached_lengths, strict=True)]),
        layer_kv,
        backend.plan(new_rows),
        window=window,
        scale=scale,
    )
    expected = []
    group = shape.num_heads // shape.num_kv_heads
    for (cached, new), key, value in zip(lengths, keys, values, strict=True):
        for position in range(cached, cached + new):
            first = 0 if window is None else max(0, position - window + 1)
            q = query[len(expected)].double()
            k = key[first : position + 1].double().repeat_interleave(group, dim=1)
            v = value[first : position + 1].double().repeat_interleave(group, dim=1)
            weights = (torch.einsum("hd,khd->hk", q, k) * scale).softmax(dim=-1)
            expected.append(torch.einsum("hk,khd->hd", weights, v).flatten())
    return Outcome(out, torch.stack(expected).float(), before, layer_kv, new_rows)


MIXED = Setup(
    AttentionShape(4, 2, 16, 16), 20, [(0, 53), (37, 1), (200, 1), (15, 1), (16, 18), (31, 1)], 1
)


@settings(max_examples=150, deadline=None)
@given(setups())
@example(MIXED)
@example(MIXED._replace(window=None))
@example(Setup(AttentionShape(4, 2, 16, 4), None, [(3, 1), (150, 1), (9, 1), (80, 1)], 2))
def test_equals_the_reference(setup: Setup) -> None:
    outcome = _run(setup)
    torch.testing.assert_close(outcome.out, outcome.expected, atol=1e-5, rtol=1e-5)


@settings(max_examples=50, deadline=None)
@given(setups())
def test_tiles_of_queries_change_nothing(setup: Setup) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_backend, "_QUERY_TILE", 5)
        outcome = _run(setup)
    torch.testing.assert_close(outcome.out, outcome.expected, atol=1e-5, rtol=1e-5)


@settings(max_examples=50, deadline=None)
@given(setups())
def test_writes_nothing_but_its_own_slots(setup: Setup) -> None:
    outcome = _run(setup)
    block_size = setup.shape.block_size
    own = torch.zeros(NUM_BLOCKS, block_size, dtype=torch.bool)
    for row in outcome.batch:
        end = row.start + len(row.token_ids)
        for position in range(row.start, end):
            own[row.block_table[position // block_size], position % block_size] = True
        # The tail of a block that this step begins belongs to the row as well.
        if end % block_size and end - end % block_size >= row.start:
            own[row.block_table[-1], end % block_size :] = True
    changed = ~torch.isclose(
        outcome.cache_before, outcome.cache_after, rtol=0, atol=0, equal_nan=True
    )
    # Over K and V, heads, elements: what is left is [block, slot].
    assert not (changed.any(dim=-1).any(dim=2).any(dim=0) & ~own).any()
    unset = outcome.cache_after.isnan().any(dim=-1).any(dim=2).any(dim=0)
    assert not (unset & own).any()


def test_decodes_of_very_different_lengths_are_not_padded_to_the_longest() -> None:
    shape = AttentionShape(2, 1, 8, 4)
    backend = TorchAttention(shape, windows=[None], device=torch.device("cpu"), dtype=torch.float32)
    lengths = [4, 7, 30, 33, 500, 9]
    rows = [BatchRow([0], n - 1, list(range(-(-n // 4)))) for n in lengths]
    groups = backend.plan(rows).decodes[None]
    assert sorted(
        t for g in groups for t in (g.tokens.tolist() if g.tokens is not None else [])
    ) == [*range(6)]
    gathered = sum(len(group.tiles) for group in groups)
    needed = sum(-(-n // 4) for n in lengths)
    assert gathered < 1.5 * needed
    assert gathered < len(rows) * -(-500 // 4) / 3


def test_control_unmasked_padding_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchAttention, "_mask", lambda self, excluded: torch.zeros(excluded.shape))
    outcome = _run(MIXED)
    assert (outcome.out - outcome.expected).abs().max() > 1e-2


def test_control_uncleared_tails_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_writes = TorchAttention._plan_writes
    monkeypatch.setattr(
        TorchAttention,
        "_plan_writes",
        lambda self, rows: plan_writes(self, rows)._replace(cleared=None),
    )
    assert _run(MIXED).out.isnan().any()
