"""The next step's plan from the one before: array by array what is made of the step itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from parrot_engine.attention.advance import advance, follows, unit_of
from parrot_engine.attention.policy import Cuts, Policy
from parrot_engine.attention.tables import Tables, flatten_tables
from parrot_engine.attention.work_list import WorkList, build
from parrot_engine.builtin.batch import BatchRow
from test_work_list import BLOCK, CHUNK, POLICY, SHAPE

_CUTS = (
    Cuts(CHUNK),
    Cuts(3 * BLOCK),
    Cuts(CHUNK, tail=8),
    Cuts(CHUNK, tail=CHUNK),
    Cuts(CHUNK, tail=CHUNK - 1),
    Cuts(4 * CHUNK, tail=2 * CHUNK, fine=(8, CHUNK)),
    Cuts(4 * CHUNK, tail=12, fine=(8, CHUNK)),
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
    """Rows of one token, now and then of more, whose tables may begin alike and have room."""
    starts = draw(st.lists(st.integers(0, 150), min_size=1, max_size=9))
    shared = draw(st.sampled_from((0, 0, 3, CHUNK // BLOCK, 30)))
    new = draw(st.sampled_from((1, 1, 1, 1, 2, 9)))
    rows = []
    for index, start in enumerate(starts):
        count = new if index == 0 else 1
        common = min(shared, start // BLOCK)
        needed = (start + count) // BLOCK + 1 - common
        own = range(1000 + 100 * index, 1000 + 100 * index + needed)
        rows.append(BatchRow([0] * count, start, [*range(common), *own]))
    return rows


def _next(rows: list[BatchRow]) -> list[BatchRow]:
    return [row._replace(start=row.start + 1) for row in rows]


def _check_equal(found: WorkList, expected: WorkList) -> None:
    for name, value in expected._asdict().items():
        mine = getattr(found, name)
        assert np.array_equal(mine, value), name
        assert np.asarray(mine).dtype == np.asarray(value).dtype, name


@settings(max_examples=800, deadline=None)
@given(decodes(), st.one_of(st.none(), st.integers(1, 100)), st.sampled_from(_POLICIES))
def test_it_is_the_list_that_is_made_of_the_step(
    rows: list[BatchRow], window: int | None, policy: Policy
) -> None:
    before, tables = flatten_tables(rows, BLOCK), flatten_tables(_next(rows), BLOCK)
    if follows(before, tables, [window], unit_of(policy, BLOCK)):
        event("followed")
        work = advance(build(before, SHAPE, policy, window), policy)
        _check_equal(work, build(tables, SHAPE, policy, window))


def test_many_steps_one_after_the_other() -> None:
    policy = POLICY._replace(cuts=Cuts(64, tail=32, fine=(16, 32)), align=16)
    rows = [
        BatchRow([0], 100 + 3 * at, [*range(5), *range(50 * at, 50 * at + 40)]) for at in (1, 2)
    ]
    tables = flatten_tables(rows, 16)
    shape = SHAPE._replace(block_size=16)
    work = build(tables, shape, policy, None)
    followed = 0
    for _ in range(300):
        rows = _next(rows)
        before, tables = tables, flatten_tables(rows, 16)
        expected = build(tables, shape, policy, None)
        if follows(before, tables, [None], unit_of(policy, 16)):
            followed += 1
            work = advance(work, policy)
            _check_equal(work, expected)
        else:
            work = expected
    # Each row passes 19 multiples of 16 on its way.
    assert followed == 300 - 19 - 19


def _tables(*rows: BatchRow) -> Tables:
    return flatten_tables(rows, BLOCK)


_ROW = BatchRow([0], 21, [1, 2, 3, 4, 5, 6])
_OTHER = BatchRow([0], 5, [7, 8, 9])


def _follows(then: list[BatchRow], now: list[BatchRow], window: int | None = None) -> bool:
    return follows(_tables(*then), _tables(*now), [None, window], BLOCK)


def test_a_step_follows_the_one_before() -> None:
    assert _follows([_ROW, _OTHER], _next([_ROW, _OTHER]))
    assert _follows([_ROW, _OTHER], _next([_ROW, _OTHER]), window=5)


@pytest.mark.parametrize(
    "now",
    [
        [_ROW, _OTHER],
        _next([_ROW]),
        _next([_OTHER, _ROW]),
        [*_next([_ROW]), _OTHER],
        _next([_ROW, _OTHER._replace(block_table=[7, 8, 10])]),
        _next([_ROW, _OTHER._replace(block_table=[7, 8, 9, 10])]),
        # The same blocks, but not the same rows'.
        _next(
            [
                _ROW._replace(block_table=[1, 2, 3, 4, 5, 6, 7]),
                _OTHER._replace(block_table=[8, 9]),
            ]
        ),
    ],
)
def test_other_steps_do_not(now: list[BatchRow]) -> None:
    assert not _follows([_ROW, _OTHER], now)


def test_nor_does_one_whose_rows_are_cut_elsewhere() -> None:
    # Positions 23 and 24 stand in different blocks; so do the first keys of a window of 3.
    rows = [_ROW._replace(start=23, block_table=[*range(7)])]
    assert not _follows(rows, _next(rows))
    assert not _follows([_ROW], _next([_ROW]), window=3)
    assert _follows([_ROW], _next([_ROW]), window=4)


def test_chunks_that_are_no_multiples_of_tiles() -> None:
    policy = POLICY._replace(cuts=Cuts(3 * BLOCK), align=2 * BLOCK)
    row = BatchRow([0], 3 * BLOCK - 1, [1, 2, 3, 4])
    before, tables = _tables(row), _tables(*_next([row]))
    lists = [build(each, SHAPE, policy, None) for each in (before, tables)]
    assert len(lists[0].narrow) < len(lists[1].narrow)
    assert not follows(before, tables, [None], unit_of(policy, BLOCK))


def test_rows_of_several_tokens_are_no_decodes() -> None:
    assert not _follows([_ROW._replace(token_ids=[0, 0])], _next([_ROW]))
    assert not _follows([_ROW], [_ROW._replace(token_ids=[0, 0], start=22)])
    several = [_ROW._replace(token_ids=[0, 0])]
    assert not _follows(several, _next(several))


def test_what_has_no_unit_is_never_followed() -> None:
    assert unit_of(POLICY._replace(cuts=Cuts(CHUNK, tail=CHUNK)), BLOCK) == 1
    assert unit_of(POLICY._replace(cuts=Cuts(CHUNK, tail=CHUNK - 1)), BLOCK) == 1
    assert not follows(_tables(_ROW), _tables(*_next([_ROW])), [None], 1)
