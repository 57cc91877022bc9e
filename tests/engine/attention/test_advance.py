"""The next step's plan from the one before: array by array what is made of the step itself."""

from __future__ import annotations

import random

import numpy as np
import pytest
from harness.engine.attention_policies import BLOCK, CHUNK, POLICY, SHAPE
from harness.engine.equal_lists import check_equal
from hypothesis import event, given, settings
from hypothesis import strategies as st
from parrot_engine.attention.decode_list import advance, goes_on
from parrot_engine.attention.host_plan import HostPlanner
from parrot_engine.attention.policy import Cuts, Policy
from parrot_engine.attention.tables import Tables, flatten_tables
from parrot_engine.attention.work_list import build
from parrot_engine.batch import BatchRow

_CUTS = (
    Cuts(CHUNK),
    Cuts(3 * BLOCK, tail=BLOCK),
    Cuts(CHUNK, tail=8),
    Cuts(CHUNK, tail=CHUNK),
    Cuts(CHUNK, tail=CHUNK - 1),
    Cuts(4 * CHUNK, tail=2 * CHUNK, fine=(8, CHUNK)),
    Cuts(4 * CHUNK, tail=12, fine=(8, CHUNK)),
    Cuts(CHUNK, tail=8, coarse=2 * CHUNK),
    Cuts(CHUNK, tail=CHUNK, fine=(8,), coarse=4 * CHUNK),
)
_POLICIES = [
    POLICY._replace(cuts=cuts, fine_readings=readings, align=align, wide_min_bytes=least)
    for cuts in _CUTS
    for readings in (6, 40)
    for align in (2, 8)
    for least in (0, 60)
]


@st.composite
def decodes(draw: st.DrawFn) -> list[BatchRow]:
    """Rows of one token, now and then of more, whose tables may begin alike."""
    starts = draw(st.lists(st.integers(0, 150), min_size=1, max_size=9))
    shared = draw(st.sampled_from((0, 0, 3, CHUNK // BLOCK, 30)))
    new = draw(st.sampled_from((1, 1, 1, 1, 2, 9)))
    rows = []
    for index, start in enumerate(starts):
        count = new if index == 0 else 1
        common = min(shared, start // BLOCK)
        needed = (start + count - 1) // BLOCK + 1 - common
        own = range(1000 + 100 * index, 1000 + 100 * index + needed)
        rows.append(BatchRow([0] * count, start, [*range(common), *own]))
    return rows


def _next(rows: list[BatchRow]) -> list[BatchRow]:
    """The same rows a token further on, with another block where they need one."""
    return [
        row._replace(
            start=row.start + 1,
            block_table=[
                *row.block_table,
                *(
                    [row.block_table[-1] + 500]
                    if (row.start + len(row.token_ids)) % BLOCK == 0
                    else []
                ),
            ],
        )
        for row in rows
    ]


@settings(max_examples=1000, deadline=None)
@given(
    decodes(),
    st.one_of(st.none(), st.integers(1, 100)),
    st.sampled_from(_POLICIES),
    st.integers(1, 4),
)
def test_it_is_the_list_that_is_made_of_the_step(
    rows: list[BatchRow], window: int | None, policy: Policy, steps: int
) -> None:
    tables = _tables(rows)
    work = build(tables, SHAPE, policy, window)
    for _ in range(steps):
        rows = _next(rows)
        before, tables = tables, _tables(rows)
        if not goes_on(before, tables):
            return
        found = advance(work, before, tables, policy, window)
        event("advanced" if found is not None else "made anew")
        work = build(tables, SHAPE, policy, window)
        if found is not None:
            check_equal(found, work)
            work = found


def test_many_steps_one_after_the_other() -> None:
    policy = POLICY._replace(cuts=Cuts(64, tail=32, fine=(16, 32)), align=16, fine_readings=4)
    rows = [
        BatchRow([0], 400 + at, [*range(80), *range(500 * at, 500 * at + 21 + at)]) for at in (1, 2)
    ]
    tables = _tables(rows)
    work = build(tables, SHAPE, policy, None)
    advanced = 0
    for _ in range(300):
        rows = _next(rows)
        before, tables = tables, _tables(rows)
        expected = build(tables, SHAPE, policy, None)
        assert goes_on(before, tables)
        found = advance(work, before, tables, policy, None)
        if found is not None:
            advanced += 1
            check_equal(found, expected)
        work = found or expected
    # Each row passes 9 multiples of 32 on its way, though 75 of a block.
    assert advanced == 300 - 9 - 9


@pytest.mark.parametrize(
    ("cuts", "align"), [(Cuts(3 * BLOCK), 8), (Cuts(64, tail=32, fine=(BLOCK, 8)), 16)]
)
def test_ends_of_windows(cuts: Cuts, align: int) -> None:
    # Tiles that no chunk, and chunks that no tile, is a multiple of.
    policy = POLICY._replace(cuts=cuts, align=align, fine_readings=4)
    for window in range(1, 40, 3):
        rows = [BatchRow([0], 0, [0])]
        tables = _tables(rows)
        work = build(tables, SHAPE, policy, window)
        for _ in range(80):
            rows = _next(rows)
            before, tables = tables, _tables(rows)
            expected = build(tables, SHAPE, policy, window)
            found = advance(work, before, tables, policy, window)
            if found is not None:
                check_equal(found, expected)
            work = expected


def _tables(rows: list[BatchRow]) -> Tables:
    return flatten_tables(rows, BLOCK)


_ROW = BatchRow([0], 21, [1, 2, 3, 4, 5, 6])
_OTHER = BatchRow([0], 5, [7, 8, 9])


def _goes_on(then: list[BatchRow], now: list[BatchRow]) -> bool:
    return goes_on(_tables(then), _tables(now))


@pytest.mark.parametrize("more", [[], [10], [10, 11, 12]])
def test_a_step_goes_on_from_the_one_before(more: list[int]) -> None:
    now = _next([_ROW, _OTHER])
    assert _goes_on([_ROW, _OTHER], now)
    for row, block_table in enumerate(([1, 2, 3, 4, 5, 6, *more], [7, 8, 9, *more])):
        longer = list(now)
        longer[row] = longer[row]._replace(block_table=block_table)
        assert _goes_on([_ROW, _OTHER], longer)


@pytest.mark.parametrize(
    "now",
    [
        [_ROW, _OTHER],
        _next([_ROW]),
        _next([_OTHER, _ROW]),
        [*_next([_ROW]), _OTHER],
        _next([_ROW, _OTHER._replace(block_table=[7, 8, 10])]),
        _next([_ROW, _OTHER._replace(block_table=[7, 8])]),
        _next([_ROW._replace(block_table=[2, 2, 3, 4, 5, 6, 7]), _OTHER]),
        # The same blocks, but not the same rows'.
        _next(
            [_ROW._replace(block_table=[1, 2, 3, 4, 5, 6, 7]), _OTHER._replace(block_table=[8, 9])]
        ),
    ],
)
def test_other_steps_do_not(now: list[BatchRow]) -> None:
    assert not _goes_on([_ROW, _OTHER], now)


def test_rows_of_several_tokens_are_no_decodes() -> None:
    assert not _goes_on([_ROW._replace(token_ids=[0, 0])], _next([_ROW]))
    assert not _goes_on([_ROW], [_ROW._replace(token_ids=[0, 0], start=22)])
    several = [_ROW._replace(token_ids=[0, 0])]
    assert not _goes_on(several, _next(several))


def test_steps_laid_out_one_after_the_other() -> None:
    planner = HostPlanner(SHAPE, POLICY, [None, 9])
    chance = random.Random(5)
    # All of its whole chunks are another's as well.
    beginning = BatchRow([0], 17, [1, 2, 3, 4, 10])
    rows = [_ROW, beginning]
    for number in range(200):
        if chance.random() < 0.05:
            # Somebody comes, and others go.
            first = 1000 * number
            start = chance.randrange(60)
            other = BatchRow([0], start, [*range(first, first + start // BLOCK + 1)])
            rows = [_ROW, beginning, *rows[2 : chance.randrange(2, 5)], other]
        rows = _next(rows)
        share = number % 20 < 10
        plan = planner.lay_out(rows, share=share)
        tables = _tables(rows)
        assert all(map(np.array_equal, plan.tables, tables))
        for window, work in plan.lists.items():
            check_equal(work, build(tables, SHAPE, POLICY, window, share=share))
