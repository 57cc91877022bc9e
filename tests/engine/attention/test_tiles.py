"""How far prefill tiles are cut: what the rule chooses for a large device, and what graphs hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="tile sizes are the kernels'")

from parrot_engine.attention.interface import AttentionShape
from parrot_engine.attention.launch import DeviceLimits
from parrot_engine.attention.policy import MAX_SLOTS, TileCuts
from parrot_engine.attention.triton_backend import (
    DEFAULT_TILE_CUTS,
    SPECIALIZED_TILE_CUTS,
    HostPlan,
    TritonAttention,
)
from parrot_engine.attention.work_list import WorkList
from parrot_engine.batch import BatchRow

SHAPE = AttentionShape(32, 8, 128, 64)
#: Those of an H200: 132 multiprocessors hold 264 tiles, 33 of them with a program a KV head.
LIMITS = DeviceLimits(132, 227 * 1024, copy_engine=True)
HOPPER = LIMITS._replace(hopper=True)
ROUND = 33
MAX_ROWS = 256
#: Fixed here, so that measuring others changes no test.
RULE = TileCuts((1, 2, 3, 4, 6, 8, 12), least=1024, start=128, merge=512)
WHOLE = TileCuts((1,), least=10**9, start=0, merge=0)
FAR = TileCuts((40,), least=512, start=0, merge=0)


def _backend(window: int | None = None, shape: AttentionShape = SHAPE, **kw: Any) -> Any:
    return TritonAttention(
        shape,
        windows=[window],
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        **{"limits": LIMITS, **kw},
    )


def _rows(*kinds: tuple[int, int, int]) -> list[BatchRow]:
    """Make rows by kind (their number, new tokens, cached tokens); they share nothing."""
    rows: list[BatchRow] = []
    block = 0
    for count, new, cached in kinds:
        for _ in range(count):
            needed = -(-(new + cached) // SHAPE.block_size)
            table = np.arange(block, block + needed, dtype=np.int32)
            rows.append(BatchRow([0] * new, cached, table))
            block += needed
    return rows


def _list(rows: list[BatchRow], window: int | None = None, **kw: Any) -> WorkList:
    work: WorkList = _backend(window, **{"tile_cuts": RULE, **kw}).lay_out(rows).lists[window]
    return work


@pytest.mark.parametrize("cached", [6144, 16384])
@pytest.mark.parametrize("new", [96, 128, 255, 256, 512])
def test_a_row_alone_fills_the_device(new: int, cached: int) -> None:
    work = _list(_rows((1, new, cached)))
    keys = (work.tiles[:, 2] - work.tiles[:, 1]).mean()
    assert keys >= RULE.least
    # As many programs as run at once, or as many as parts are long enough for.
    assert len(work.tiles) <= ROUND
    assert len(work.tiles) > 0.7 * ROUND or keys < 1.4 * RULE.least
    assert len(work.merges) == new


@pytest.mark.parametrize(
    "kinds",
    [
        [(1, 1024, 6144)],
        [(8, 128, 6144)],  # four tiles each
        [(1, 8192, 0)],
        [(4, 2048, 0)],
        [(1, 300, 1700)],  # too short for two parts
        [(64, 1, 6000)],
        [(3, 9, 500), (5, 1, 500)],
    ],
)
def test_what_fills_the_device_or_is_short_is_left_whole(kinds: list[tuple[int, int, int]]) -> None:
    rows = _rows(*kinds)
    work, whole = _list(rows), _list(rows, tile_cuts=WHOLE)
    assert all(np.array_equal(*pair) for pair in zip(work, whole, strict=True))


def test_the_more_rows_the_less_each_is_cut() -> None:
    parts = [
        int(_list(_rows((count, 128, 12_288))).merges[:, 2].max(initial=1)) for count in range(1, 9)
    ]
    assert parts == sorted(parts, reverse=True)
    assert parts[0] == 8
    assert parts[-1] == 1


def test_programs_that_slow_each_other_down_are_not_made_for_little() -> None:
    """16 tiles have a multiprocessor each; twice as many do not, which long rows outweigh."""
    cuts = TileCuts((1, 2), least=128, start=128, merge=256, rounds=2)
    crowded = cuts._replace(crowded=1.6)
    for cached, parts in ((512, (2, 1)), (16384, (2, 2))):
        rows = _rows((1, 512, cached))
        lists = [_list(rows, tile_cuts=way) for way in (cuts, crowded)]
        assert tuple(len(work.tiles) // 16 for work in lists) == parts
    # With few tiles even in parts nobody shares.
    rows = _rows((1, 96, 1024))
    assert len(_list(rows, tile_cuts=crowded).tiles) == 6


def test_a_long_row_is_cut_beside_short_ones() -> None:
    work = _list(_rows((1, 128, 16_384), (20, 32, 300), (10, 1, 300)))
    assert set(work.merges[:, 0].tolist()) == {*range(128)}
    assert int((work.tiles[:, 7] == 1).sum()) == 20


def test_cuts_depend_on_lengths_alone() -> None:
    """Not on which blocks hold the keys, nor on who shares them."""
    rows = _rows((2, 128, 6144), (1, 70, 9000), (4, 1, 3000))
    other = [row._replace(block_table=row.block_table[::-1] + 7) for row in rows]
    shared = [rows[0], rows[1]._replace(block_table=rows[0].block_table), *rows[2:]]
    tiles = [_list(batch).tiles[:, 1:3].tolist() for batch in (rows, other, shared)]
    assert tiles[0] == tiles[1] == tiles[2]
    assert len(tiles[0]) > len(_list(rows, tile_cuts=WHOLE).tiles)


def test_windows_bound_what_there_is_to_cut() -> None:
    rows = _rows((1, 128, 16_384))
    assert len(_list(rows, 1024).merges) == 0
    assert set(_list(rows, 4096).merges[:, 2].tolist()) == {4}


def test_a_step_has_no_more_partial_results_than_graphs_hold() -> None:
    row = (1, 128, 6144)
    few, many = _rows(row, (100, 1, 32_000)), _rows(row, (129, 1, 32_000))
    assert MAX_SLOTS >= _list(few).num_slots > _list(few, tile_cuts=WHOLE).num_slots
    assert _list(many).num_slots == _list(many, tile_cuts=WHOLE).num_slots <= MAX_SLOTS


def _busiest(work: WorkList) -> int:
    """Keys of the program that has most, 132 being dealt the tiles of 8 heads; 128 for a start."""
    programs = [0] * 132
    for index, keys in enumerate(np.repeat(work.tiles[:, 2] - work.tiles[:, 1] + 128, 8)):
        turn, place = divmod(index, 132)
        programs[place if turn % 2 == 0 else -1 - place] += int(keys)
    return max(programs)


LAST = SPECIALIZED_TILE_CUTS._replace(least=512, start=128, merge=512, last=(2, 3, 4, 5, 6))


@pytest.mark.parametrize(
    ("kinds", "before", "after"),
    [
        ([(1, 8192, 90_112)], 1.030, 1.006),  # fifteen and a half rounds
        ([(1, 1696, 98_304)], 1.242, 1.013),  # three and a fifth
        ([(4, 2048, 30_000)], 1.030, 1.007),
        ([(1, 8192, 0)], 1.003, 1.003),  # short tiles even it out
        ([(1, 1024, 50_000)], 1.031, 1.031),  # of a graph
    ],
)
def test_the_last_tiles_of_a_large_step_are_cut_so_that_all_programs_end_together(
    kinds: list[tuple[int, int, int]], before: float, after: float
) -> None:
    rows = _rows(*kinds)
    cut, whole = (
        _list(rows, tile_cuts=cuts, limits=HOPPER) for cuts in (LAST, LAST._replace(last=()))
    )
    even = float((whole.tiles[:, 2] - whole.tiles[:, 1] + 128).sum() * 8 / 132)
    assert len(whole.merges) == 0
    assert _busiest(whole) / even == pytest.approx(before, abs=2e-3)
    assert _busiest(cut) / even == pytest.approx(after, abs=2e-3)
    assert (len(cut.merges) > 0) == (after < before)
    # All keys are read once.
    ends = {tuple(tile[3:6].tolist()): tile[2] for tile in whole.tiles}
    keys = dict.fromkeys(ends, 0)
    for tile in cut.tiles:
        keys[tuple(tile[3:6].tolist())] += int(tile[2] - tile[1])
    assert keys == ends


def test_last_tiles_have_no_more_partial_results_than_there_is_room_for() -> None:
    for count, has_room in ((60, True), (66, False)):
        work = _list(_rows((1, 1696, 98_304), (count, 1, 63_000)), tile_cuts=LAST, limits=HOPPER)
        assert bool((work.merges[:, 0] < 1696).any()) is has_room
        assert work.num_slots <= MAX_SLOTS or not has_room


@st.composite
def steps(draw: st.DrawFn) -> list[BatchRow]:
    """Mixed steps of up to 1,024 tokens."""
    left = 1024
    kinds = []
    for _ in range(draw(st.integers(1, 4))):
        new = draw(st.sampled_from([1, 2, 9, 64, 65, 96, 200, 300, 512, 1000]))
        count = draw(st.integers(1, 60 if new == 1 else 8))
        cached = draw(st.sampled_from([0, 500, 2048, 3000, 6143, 16_384, 40_000]))
        count = min(count, left // new)
        if count:
            kinds.append((count, new, cached))
            left -= count * new
    return _rows(*kinds or [(1, 1, 0)])


@settings(max_examples=60, deadline=None)
@given(
    steps(),
    st.sampled_from([DEFAULT_TILE_CUTS, FAR, FAR._replace(rounds=3)]),
    st.sampled_from([None, 4096]),
    st.sampled_from([8, 1]),
)
def test_graphs_hold_what_they_held(
    rows: list[BatchRow], cuts: TileCuts, window: int | None, kv_heads: int
) -> None:
    shape = SHAPE._replace(num_kv_heads=kv_heads)
    num_tokens = sum(len(row.token_ids) for row in rows)
    longest = max(row.start + len(row.token_ids) for row in rows)

    def held(tile_cuts: TileCuts) -> tuple[bool, HostPlan]:
        backend = _backend(window, shape, tile_cuts=tile_cuts)
        layout = backend.fixed_layout(num_tokens, MAX_ROWS, longest, MAX_SLOTS, 0)
        host = backend.lay_out(rows)
        return layout.holds(*host), host

    fits, cut = held(cuts)
    assert fits or not held(WHOLE)[0]
    (work,) = cut.lists.values()
    # Nothing that a graph of mixed steps lacks.
    assert not cut.parts.tiles or len(work.merges) == 0 or cut.parts.merges
