"""Attention kernels in Triton's interpreter against float64: every edge of every length.

bfloat16 is left to the device (tests/gpu): the interpreter multiplies its bits as integers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.engine.attention_cases import (
    Context,
    PagedCase,
    mixed_contexts,
    relative_error,
    shared_contexts,
)
from harness.engine.interpreted import CHUNK, TUNINGS, interpreted_backend, take_natural_logarithms
from parrot_engine.attention import host_plan, launch, work_list
from parrot_engine.attention.interface import AttentionShape
from parrot_engine.attention.policy import Cuts
from parrot_engine.attention.triton_backend import TritonAttention
from torch import Tensor

SMALL = AttentionShape(4, 2, 64, 16)
#: Four rows a query: families fill several tiles.
GROUPED = AttentionShape(8, 2, 64, 16)

#: log2(0) of rows that no query fills; they are not stored.
pytestmark = [
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
    pytest.mark.usefixtures("poison"),
]


def _error(case: PagedCase, window: int | None = None, **kw: Any) -> float:
    backend = interpreted_backend(case.shape, window, case.query.dtype, **kw)
    return relative_error(case.run(backend, window), case.expected(window))


@pytest.fixture(scope="module")
def mixed() -> Tensor:
    """Return the output for `mixed_contexts`, which several tests compare with."""
    return PagedCase(SMALL, mixed_contexts(16, CHUNK)).run(interpreted_backend(SMALL))


@pytest.fixture(scope="module")
def shared() -> Tensor:
    """Return the output for `shared_contexts` in narrow items."""
    case = PagedCase(GROUPED, shared_contexts(16, CHUNK))
    return case.run(interpreted_backend(GROUPED, wide_min_bytes=10**12))


def test_mixed_lengths(mixed: Tensor) -> None:
    case = PagedCase(SMALL, mixed_contexts(16, CHUNK))
    assert relative_error(mixed, case.expected()) < 2e-6


# Tiles of 16 keys are two blocks, one, or a part of one; windows are less and more than a tile.
@pytest.mark.parametrize(("block_size", "window"), [(8, None), (16, 45), (32, 7), (64, None)])
def test_mixed_lengths_of_blocks_and_windows(block_size: int, window: int | None) -> None:
    shape = SMALL._replace(block_size=block_size)
    case = PagedCase(shape, mixed_contexts(block_size, max(CHUNK, block_size)))
    assert _error(case, window) < 2e-6


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("length", [CHUNK - 1, CHUNK, CHUNK + 15, CHUNK + 16, 3 * CHUNK + 5])
def test_keys_cut_otherwise(length: int, window: int | None) -> None:
    """A tail that is read with the chunk before; a small step whose keys are cut finer."""
    case = PagedCase(SMALL, [Context(length), Context(length // 2)])
    assert _error(case, window, cuts=Cuts(CHUNK, tail=16)) < 2e-6
    case = PagedCase(SMALL, [Context(length)])
    assert _error(case, window, cuts=Cuts(4 * CHUNK, fine=(CHUNK, 2 * CHUNK))) < 2e-6


@pytest.mark.parametrize("rows", [1, 17])
def test_many_parts_to_merge(rows: int) -> None:
    """More than one step of the merge reads, of few queries and of more."""
    shape = AttentionShape(1, 1, 16, 16)
    assert launch.merge_tuning(rows).block < 70
    contexts = [Context(70 * CHUNK), *(Context(CHUNK + 3) for _ in range(rows - 1))]
    assert _error(PagedCase(shape, contexts)) < 2e-6


@pytest.mark.parametrize("contexts", [mixed_contexts, shared_contexts])
def test_tiles_through_the_copy_engine(contexts: Any) -> None:
    tunings = launch.Tunings(*(tuning._replace(descriptors=True) for tuning in TUNINGS))
    shape = GROUPED._replace(block_size=32)
    case = PagedCase(shape, contexts(32, CHUNK))
    backend = interpreted_backend(shape, wide_min_bytes=0, tunings=tunings)
    assert relative_error(case.run(backend), case.expected()) < 2e-6


@pytest.mark.parametrize("head_dim", [16, 96, 128, 256])
def test_head_dims(head_dim: int) -> None:
    shape = SMALL._replace(head_dim=head_dim)
    contexts = [Context(0), Context(40), Context(70), Context(50, 20), Context(33, 3)]
    assert _error(PagedCase(shape, contexts)) < 2e-6


@pytest.mark.parametrize(("group", "kv_heads"), [(1, 2), (3, 2), (7, 1), (8, 2), (20, 1)])
def test_query_heads_of_a_group(group: int, kv_heads: int) -> None:
    shape = AttentionShape(kv_heads * group, kv_heads, 64, 16)
    tunings = TUNINGS
    if group > 16:
        tunings = launch.Tunings(*(tuning._replace(block_m=32) for tuning in TUNINGS))
    contexts = [Context(15), Context(64), Context(40, 6), Context(9, 9), Context(70, 1, 1, 64)]
    case = PagedCase(shape, contexts)
    backend = TritonAttention(
        shape,
        windows=[None],
        device=torch.device("cpu"),
        dtype=torch.float32,
        cuts=Cuts(CHUNK),
        tunings=tunings,
    )
    assert relative_error(case.run(backend), case.expected()) < 2e-6


@pytest.mark.parametrize(("window", "quantized"), [(None, False), (45, False), (None, True)])
def test_scores_are_bounded(window: int | None, quantized: bool) -> None:
    contexts = [Context(20), Context(70), Context(33, 20), Context(40, 3)]
    case = PagedCase(GROUPED, contexts, quantized=quantized)
    backend = interpreted_backend(GROUPED, window, softcap=0.7, quantized=quantized)
    expected = case.expected(window, softcap=0.7)
    assert relative_error(case.run(backend, window), expected) < 2e-6
    # A control: the bound shows.
    assert relative_error(case.expected(window), expected) > 1e-2


@pytest.mark.parametrize(("window", "quantized"), [(None, False), (45, False), (None, True)])
def test_sinks_beside_the_keys(window: int | None, quantized: bool) -> None:
    """Mix rows that are cut with rows that are not, decodes with prefills."""
    contexts = [Context(0), Context(20), Context(70), Context(33, 20), Context(40, 3)]
    case = PagedCase(GROUPED, contexts, quantized=quantized)
    sinks = torch.randn(GROUPED.num_heads)
    backend = interpreted_backend(GROUPED, window, quantized=quantized)
    expected = case.expected(window, sinks=sinks)
    assert relative_error(case.run(backend, window, sinks=sinks), expected) < 2e-6
    # A control: sinks show.
    assert relative_error(case.run(backend, window), expected) > 1e-2


def test_float16() -> None:
    case = PagedCase(SMALL, mixed_contexts(16, CHUNK), dtype=torch.float16)
    assert _error(case) < 1e-3


@pytest.mark.parametrize("window", [None, 45])
def test_shared_prefixes_in_wide_items(window: int | None) -> None:
    case = PagedCase(GROUPED, shared_contexts(16, CHUNK))
    backend = interpreted_backend(GROUPED, window, wide_min_bytes=0)
    assert len(backend.plan(case.rows).work[window].wide) or window is not None
    assert relative_error(case.run(backend, window), case.expected(window)) < 2e-6


def test_shared_prefixes_in_narrow_items(shared: Tensor) -> None:
    case = PagedCase(GROUPED, shared_contexts(16, CHUNK))
    backend = interpreted_backend(GROUPED, wide_min_bytes=10**12)
    assert not len(backend.plan(case.rows).work[None].wide)
    once = backend.read_once_tokens
    assert once > 0
    backend.plan(case.rows)
    assert backend.read_once_tokens == 2 * once
    assert relative_error(shared, case.expected()) < 2e-6


def test_sharing_changes_no_sum(shared: Tensor) -> None:
    """Where keys are cut does not depend on who shares them."""
    case = PagedCase(GROUPED, shared_contexts(16, CHUNK))
    unshared = interpreted_backend(GROUPED, share_prefixes=False)
    alone = case.run(unshared)
    assert unshared.read_once_tokens == 0
    # Equal but for the host's BLAS, which rounds a row by its place (exact in tests/gpu).
    assert relative_error(shared, alone) < 3e-7


def test_a_row_does_not_see_its_neighbours(mixed: Tensor) -> None:
    contexts = mixed_contexts(16, CHUNK)
    case = PagedCase(SMALL, contexts)
    token = 0
    for index, context in enumerate(contexts):
        rows, span = case.rows, slice(token, token + context.new)
        query, key, value = case.query, case.key, case.value
        case.rows = rows[index : index + 1]
        case.query, case.key, case.value = query[span], key[span], value[span]
        assert torch.equal(case.run(interpreted_backend(SMALL)), mixed[span])
        case.rows, case.query, case.key, case.value = rows, query, key, value
        token += context.new


def test_writes_its_own_slots_only() -> None:
    case = PagedCase(SMALL, mixed_contexts(16, CHUNK))
    backend = interpreted_backend(SMALL)
    cache = case.layer_kv.clone()
    backend.forward(
        case.query, case.key, case.value, cache, backend.plan(case.rows), window=None, scale=1.0
    )
    written = (cache != case.layer_kv) & ~(cache.isnan() & case.layer_kv.isnan())
    slots = written.any(-1).any(2).any(0).nonzero()
    expected = {
        (row.block_table[position // 16], position % 16)
        for row in case.rows
        for position in range(row.start, row.start + len(row.token_ids))
    }
    assert {(int(block), int(offset)) for block, offset in slots} == expected


def test_a_nan_of_one_row_stays_its_own(mixed: Tensor) -> None:
    case = PagedCase(SMALL, mixed_contexts(16, CHUNK))
    case.value[5] = float("nan")
    out = case.run(interpreted_backend(SMALL))
    assert out[5].isnan().all()
    others = [token for token in range(len(out)) if token != 5]
    assert torch.equal(out[others], mixed[others])


# -- controls: the comparisons above must notice these

#: Of one chunk, and of three.
DECODES = [Context(4), Context(69)]


def test_control_natural_log_sum_exp(monkeypatch: pytest.MonkeyPatch) -> None:
    take_natural_logarithms(monkeypatch)
    assert _error(PagedCase(SMALL, DECODES)) > 1e-2


def test_control_mask_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(*args: Any, **kw: Any) -> work_list.WorkList:
        work = work_list.build(*args, **kw)
        return work._replace(member_positions=work.member_positions - 1)

    monkeypatch.setattr(host_plan, "build_decodes", shifted)
    assert _error(PagedCase(SMALL, DECODES)) > 1e-2


def test_control_end_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    def longer(*args: Any, **kw: Any) -> work_list.WorkList:
        work = work_list.build(*args, **kw)
        work.narrow[:, 3] += 1
        return work

    monkeypatch.setattr(host_plan, "build_decodes", longer)
    assert _error(PagedCase(SMALL, DECODES)) == float("inf")


def test_control_window_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    case = PagedCase(SMALL, DECODES)
    backend = interpreted_backend(SMALL, 7)
    assert relative_error(case.run(backend, 7), case.expected(8)) > 1e-2
