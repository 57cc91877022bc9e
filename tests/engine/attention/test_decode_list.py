"""The short way to the work list of decodes: array by array what `build` makes of the same."""

from __future__ import annotations

from harness.engine.attention_policies import BLOCK, CHUNK, CUTS, POLICY, SHAPE
from harness.engine.equal_lists import check_equal
from hypothesis import given, settings
from hypothesis import strategies as st
from parrot_engine.attention.decode_list import build_decodes
from parrot_engine.attention.interface import AttentionShape
from parrot_engine.attention.policy import Cuts, Policy
from parrot_engine.attention.tables import flatten_tables
from parrot_engine.attention.work_list import build
from parrot_engine.batch import BatchRow

#: Cuts that a step of few rows takes one after the other.
_CUTS = (*CUTS, Cuts(4 * CHUNK, tail=CHUNK, fine=(BLOCK, 2 * BLOCK, CHUNK)))
_POLICIES = [
    POLICY._replace(cuts=cuts, fine_readings=readings, group=group, wide_min_bytes=least)
    for cuts in _CUTS
    for readings in (6, 30)
    for group, least in ((2, 60), (8, 0))
]


@st.composite
def decodes(draw: st.DrawFn) -> list[BatchRow]:
    """Rows of one token, whose tables may begin alike; now and then one has more tokens."""
    starts = draw(st.lists(st.integers(0, 150), min_size=1, max_size=9))
    shared = draw(st.sampled_from((0, 0, 0, 3, CHUNK // BLOCK, 30)))
    new = draw(st.sampled_from((1, 1, 1, 2, 9)))
    rows = []
    for index, start in enumerate(starts):
        count = new if index == 0 else 1
        needed = (start + count - 1) // BLOCK + 1
        # Those that are written are nobody else's.
        common = min(shared, start // BLOCK)
        own = range(1000 + 100 * index, 1000 + 100 * index + needed - common)
        rows.append(BatchRow([0] * count, start, [*range(common), *own]))
    return rows


@settings(max_examples=600, deadline=None)
@given(
    decodes(), st.one_of(st.none(), st.integers(1, 100)), st.booleans(), st.sampled_from(_POLICIES)
)
def test_it_is_the_list_that_build_makes(
    rows: list[BatchRow], window: int | None, share: bool, policy: Policy
) -> None:
    tables = flatten_tables(rows, BLOCK)
    found = build_decodes(tables, SHAPE, policy, window, share=share)
    if found is None:
        return
    expected = build(tables, SHAPE, policy, window, share=share)
    check_equal(found, expected)


def _rows(*starts: int, shared: int = 0) -> list[BatchRow]:
    return [
        BatchRow(
            [0], start, [*range(shared), *range(100 * i, 100 * i + start // BLOCK + 1 - shared)]
        )
        for i, start in enumerate(starts, start=1)
    ]


def _is_short(rows: list[BatchRow], *, share: bool = True, group: int = 2) -> bool:
    policy = POLICY._replace(group=group)
    tables = flatten_tables(rows, BLOCK)
    return build_decodes(tables, SHAPE, policy, None, share=share) is not None


def test_steps_that_it_is_for() -> None:
    assert _is_short(_rows(3))
    assert _is_short(_rows(3, 90, 17))
    # What is shared is no whole chunk, or nobody is to look for it.
    assert _is_short(_rows(60, 70, shared=CHUNK // BLOCK - 1))
    assert _is_short(_rows(60, 70, shared=CHUNK // BLOCK), share=False)


def test_steps_that_are_left_to_build() -> None:
    assert not _is_short(_rows(60, 70, shared=CHUNK // BLOCK))
    assert not _is_short([*_rows(60), BatchRow([0, 0], 5, [3, 4])])
    assert not _is_short(_rows(3), group=POLICY.wide_min_rows)


def test_a_larger_shape_with_small_steps_cut_finer() -> None:
    shape = AttentionShape(32, 8, 128, 64)
    policy = POLICY._replace(
        cuts=Cuts(512, tail=256, fine=(64, 128, 192, 256)), fine_readings=16, align=64
    )
    for start in range(1, 3000, 37):
        rows = [BatchRow([0], start, list(range(start // 64 + 1)))]
        tables = flatten_tables(rows, 64)
        found = build_decodes(tables, shape, policy, None)
        assert found is not None
        expected = build(tables, shape, policy, None)
        check_equal(found, expected)
