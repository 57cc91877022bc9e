"""The work list itself: every query reads each of its keys once, whoever shares them."""

from __future__ import annotations

import random
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parrot_engine.attention.interface import AttentionShape
from parrot_engine.attention.tables import flatten_tables
from parrot_engine.attention.work_list import Policy, WorkList, build
from parrot_engine.builtin.batch import BatchRow

BLOCK, CHUNK, ALIGN = 4, 16, 8
SHAPE = AttentionShape(4, 2, 8, BLOCK)
POLICY = Policy(
    chunk=CHUNK,
    align=ALIGN,
    narrow_rows=8,
    wide_rows=16,
    group=2,
    tile_tokens=8,
    token_bytes=1,
    split_tokens=3,
    long_split_tokens=6,
    long_context=40,
    wide_min_rows=8,
    wide_min_bytes=60,
)


@st.composite
def batches(draw: st.DrawFn) -> list[BatchRow]:
    """Rows whose contexts form a forest: each may begin with whole blocks of an earlier one."""
    rows: list[BatchRow] = []
    free = list(range(1000))
    random.Random(draw(st.integers(0, 9))).shuffle(free)
    for _ in range(draw(st.integers(1, 9))):
        table: list[int] = []
        if rows and draw(st.booleans()):
            parent = draw(st.sampled_from(rows))
            full = parent.start // BLOCK
            table = parent.block_table[: draw(st.integers(0, full))]
        start = len(table) * BLOCK + draw(st.integers(0, 50))
        new = draw(st.one_of(st.just(1), st.integers(1, 20)))
        while len(table) * BLOCK < start + new:
            table.append(free.pop())
        rows.append(BatchRow([0] * new, start, table))
    return rows


def _reads(work: WorkList, block_ids: np.ndarray) -> dict[int, list[tuple[int, int, int]]]:
    """For each token of a split row: (slot, key position, physical slot) it reads."""
    reads: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for items, rows in ((work.narrow, POLICY.narrow_rows), (work.wide, POLICY.wide_rows)):
        for first_block, base, begin, end, first, count, masked_from, _ in items.tolist():
            assert 0 < count <= rows // POLICY.group
            assert base % CHUNK == 0
            assert base <= begin < end <= base + CHUNK
            assert (begin - base) % ALIGN == 0
            assert base <= masked_from <= end
            assert (masked_from - base) % ALIGN == 0
            for member in range(first, first + count):
                assert work.member_positions[member] >= masked_from - 1
                position = int(work.member_positions[member])
                for key in range(begin, min(end, position + 1)):
                    block = int(block_ids[first_block + (key - base) // BLOCK])
                    reads[int(work.member_tokens[member])].append(
                        (int(work.member_slots[member]), key, block * BLOCK + key % BLOCK)
                    )
    return reads


@settings(max_examples=300, deadline=None)
@given(batches(), st.one_of(st.none(), st.integers(1, 40)), st.booleans())
def test_every_key_is_read_once(rows: list[BatchRow], window: int | None, share: bool) -> None:
    tables = flatten_tables(rows, BLOCK)
    work = build(tables, SHAPE, POLICY, window, share=share)
    reads = _reads(work, tables.block_ids)
    tiled = {
        token
        for _, _, _, first, count, _, _, _ in work.tiles.tolist()
        for token in range(first, first + count)
    }
    merges = {token: (first, count) for token, first, count in work.merges.tolist()}
    used_slots: list[int] = []
    token = 0
    for row in rows:
        for position in range(row.start, row.start + len(row.token_ids)):
            physical = row.block_table[position // BLOCK] * BLOCK + position % BLOCK
            assert tables.slots[token] == physical
            first_key = 0 if window is None else max(0, position - window + 1)
            if token in tiled:
                assert token not in reads
            else:
                seen = [entry for entry in reads[token] if entry[1] >= first_key]
                assert sorted(key for _, key, _ in seen) == [*range(first_key, position + 1)]
                for slot, key, place in reads[token]:
                    assert place == row.block_table[key // BLOCK] * BLOCK + key % BLOCK
                    if token in merges:
                        assert slot == merges[token][0] + key // CHUNK - first_key // CHUNK
                    else:
                        assert slot == -1
                if token in merges:
                    first, count = merges[token]
                    assert {slot for slot, _, _ in reads[token]} == {*range(first, first + count)}
                    used_slots += range(first, first + count)
            token += 1
    assert sorted(used_slots) == [*range(work.num_slots)]
    for _, begin, end, _, count, position, _, _ in work.tiles.tolist():
        assert end == position + count
        assert begin <= (0 if window is None else max(0, position - window + 1))


def _rows(shared_blocks: int, own: int, count: int) -> list[BatchRow]:
    prefix = list(range(shared_blocks))
    rows = []
    for index in range(count):
        own_blocks = [1000 + 100 * index + block for block in range(-(-own // BLOCK))]
        rows.append(BatchRow([0], shared_blocks * BLOCK + own - 1, prefix + own_blocks))
    return rows


def test_sharers_stand_in_one_item() -> None:
    rows = _rows(shared_blocks=16, own=3, count=8)
    work = build(flatten_tables(rows, BLOCK), SHAPE, POLICY, None)
    # Four chunks for all eight (16 rows: two heads each), then one item each.
    assert work.wide[:, 5].tolist() == [8] * 4
    assert work.narrow[:, 5].tolist() == [1] * 8


def test_few_sharers_are_packed_into_narrow_items() -> None:
    rows = _rows(shared_blocks=4, own=3, count=3)
    work = build(flatten_tables(rows, BLOCK), SHAPE, POLICY, None)
    assert len(work.wide) == 0
    assert sorted(work.narrow[:, 5].tolist()) == [1, 1, 1, 3]


@pytest.mark.parametrize("saved_chunks", [1, 3, 4, 5])
def test_wide_items_must_pay(saved_chunks: int) -> None:
    rows = _rows(shared_blocks=4 * saved_chunks, own=1, count=8)
    work = build(flatten_tables(rows, BLOCK), SHAPE, POLICY, None)
    # Two narrow items of four become one wide item of eight: a chunk less to read for each.
    assert bool(len(work.wide)) == (saved_chunks * CHUNK >= POLICY.wide_min_bytes)


def test_equal_ids_at_different_chunks_are_not_shared() -> None:
    rows = [BatchRow([0], 39, [*range(10)]), BatchRow([0], 39, [4, 5, 6, 7, *range(20, 26)])]
    work = build(flatten_tables(rows, BLOCK), SHAPE, POLICY, None)
    assert set(work.narrow[:, 5].tolist()) == {1}
