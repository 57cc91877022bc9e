"""The work list itself: every query reads each of its keys once, whoever shares them."""

from __future__ import annotations

import random
from collections import defaultdict

import numpy as np
import pytest
from harness.engine.attention_policies import ALIGN, BLOCK, CHUNK, CUTS, POLICY, SHAPE
from hypothesis import given, settings
from hypothesis import strategies as st
from parrot_engine.attention.policy import Cuts, TileCuts
from parrot_engine.attention.tables import flatten_tables
from parrot_engine.attention.work_list import WorkList, build
from parrot_engine.batch import BatchRow

#: How far prefill tiles are cut: not at all, as it pays, and as far as it goes.
TILE_CUTS = (
    TileCuts((1,), least=BLOCK, start=1, merge=1),
    TileCuts((1, 2, 3, 5, 8), least=ALIGN, start=2, merge=4),
    TileCuts((7,), least=1, start=0, merge=0),
)


@st.composite
def batches(draw: st.DrawFn) -> list[BatchRow]:
    """Rows whose contexts form a forest: each may begin with whole blocks of an earlier one."""
    rows: list[BatchRow] = []
    free = list(range(1000))
    random.Random(draw(st.integers(0, 9))).shuffle(free)
    for _ in range(draw(st.integers(1, 9))):
        table: list[int] = []
        if rows and draw(st.integers(0, 3)):
            parent = draw(st.sampled_from(rows))
            full = parent.start // BLOCK
            table = parent.block_table[: draw(st.integers(0, full))]
        start = len(table) * BLOCK + draw(st.integers(0, 50))
        new = draw(st.one_of(st.just(1), st.integers(1, 20)))
        while len(table) * BLOCK < start + new:
            table.append(free.pop())
        rows.append(BatchRow([0] * new, start, table))
    return rows


def _reads(
    work: WorkList, block_ids: np.ndarray, cuts: Cuts = POLICY.cuts
) -> dict[int, list[tuple[int, int, int]]]:
    """For each token of a split row: (slot, key position, physical slot) it reads."""
    reads: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for items, rows in ((work.narrow, POLICY.narrow_rows), (work.wide, POLICY.wide_rows)):
        for first_block, base, begin, end, first, count, masked_from, _ in items.tolist():
            assert 0 < count <= rows // POLICY.group
            assert base % min((*cuts.fine, cuts.chunk)) == 0
            assert base <= begin < end <= base + 4 * cuts.chunk + cuts.tail
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


def _tile_reads(
    work: WorkList, block_ids: np.ndarray, window: int | None
) -> dict[int, list[tuple[int, int, int]]]:
    """For each token of a tile: (slot, key position, physical slot) it reads."""
    reads: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for first_block, begin, end, first, count, position, slot, step in work.tiles.tolist():
        assert 0 < count <= POLICY.tile_tokens
        assert begin < end <= position + count
        assert begin % ALIGN == 0
        # The kernel reads whole tiles of keys up to where its mask begins.
        assert end == position + count or end % ALIGN == 0
        for member in range(count):
            # Without a window every token sees the keys before the mask.
            seen = (position + member + 1) if window is None else end
            place = slot if slot < 0 else slot + member * step
            for key in range(begin, min(end, seen)):
                block = int(block_ids[first_block + key // BLOCK])
                reads[first + member].append((place, key, block * BLOCK + key % BLOCK))
            # What sees nothing of a part has a slot nevertheless, which is written and merged.
            reads[first + member].append((place, -1, -1))
    return reads


@settings(max_examples=300, deadline=None)
@given(
    batches(),
    st.one_of(st.none(), st.integers(1, 40)),
    st.booleans(),
    st.sampled_from(CUTS),
    st.sampled_from(TILE_CUTS),
    st.sampled_from([1, 6, 40]),
)
def test_every_key_is_read_once(
    rows: list[BatchRow],
    window: int | None,
    share: bool,
    cuts: Cuts,
    tile_cuts: TileCuts,
    tile_round: int,
) -> None:
    tables = flatten_tables(rows, BLOCK)
    policy = POLICY._replace(cuts=cuts, tile_cuts=tile_cuts, tile_round=tile_round)
    work = build(tables, SHAPE, policy, window, share=share)
    reads = _reads(work, tables.block_ids, cuts)
    tiled = _tile_reads(work, tables.block_ids, window)
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
                seen = [entry for entry in tiled[token] if first_key <= entry[1] <= position]
                assert sorted(key for _, key, _ in seen) == [*range(first_key, position + 1)]
                for _, key, place in seen:
                    assert place == row.block_table[key // BLOCK] * BLOCK + key % BLOCK
                slots = {slot for slot, _, _ in tiled[token]}
                if token in merges:
                    first, count = merges[token]
                    assert count > 1
                    assert slots == {*range(first, first + count)}
                    used_slots += range(first, first + count)
                else:
                    assert slots == {-1}
            else:
                seen = [entry for entry in reads[token] if entry[1] >= first_key]
                assert sorted(key for _, key, _ in seen) == [*range(first_key, position + 1)]
                for slot, key, place in reads[token]:
                    assert place == row.block_table[key // BLOCK] * BLOCK + key % BLOCK
                    assert (slot >= 0) == (token in merges)
                # Parts stand in the order of their keys.
                in_order = sorted(reads[token], key=lambda entry: entry[1])
                assert [slot for slot, _, _ in in_order] == sorted(slot for slot, _, _ in in_order)
                if token in merges:
                    first, count = merges[token]
                    assert {slot for slot, _, _ in reads[token]} == {*range(first, first + count)}
                    used_slots += range(first, first + count)
            token += 1
    assert sorted(used_slots) == [*range(work.num_slots)]
    assert len(merges) == len(work.merges)


@settings(deadline=None)
@given(batches(), st.sampled_from(CUTS), st.sampled_from([1, 1000]))
def test_keys_that_rows_do_not_read_themselves_are_counted(
    rows: list[BatchRow], cuts: Cuts, wide_round: int
) -> None:
    decodes = [BatchRow([0], row.start, row.block_table) for row in rows]
    policy = POLICY._replace(cuts=cuts, wide_round=wide_round, wide_min_bytes=1)
    tables = flatten_tables(decodes, BLOCK)
    work = build(tables, SHAPE, policy, None)
    items = np.concatenate([work.narrow, work.wide])
    read = int((items[:, 3] - items[:, 2]).sum())
    assert work.read_once == sum(row.start + 1 for row in decodes) - read
    assert build(tables, SHAPE, policy, None, share=False).read_once == 0


def test_tokens_of_one_row_count_once() -> None:
    prefix = [*range(8)]
    rows = [BatchRow([0] * 3, 32, [*prefix, 20]), BatchRow([0] * 2, 33, [*prefix, 30])]
    for some, read_once in ((rows[:1], 0), (rows, 32)):
        work = build(flatten_tables(some, BLOCK), SHAPE, POLICY, None)
        assert max(work.narrow[:, 5]) > 1
        assert work.read_once == read_once


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


def _item_of(work: WorkList, token: int) -> list[tuple[int, int]]:
    """Keys of the items that a token reads."""
    items = np.concatenate([work.narrow, work.wide]).tolist()
    return sorted(
        (begin, end)
        for _, _, begin, end, first, count, _, _ in items
        if token in work.member_tokens[first : first + count]
    )


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        (CHUNK, [(0, 16)]),
        (CHUNK + 1, [(0, 17)]),
        (CHUNK + ALIGN, [(0, 24)]),
        (CHUNK + ALIGN + 1, [(0, 16), (16, 25)]),
        (3 * CHUNK + 2, [(0, 16), (16, 32), (32, 50)]),
    ],
)
def test_a_short_tail_is_read_with_the_chunk_before(
    keys: int, parts: list[tuple[int, int]]
) -> None:
    policy = POLICY._replace(cuts=Cuts(CHUNK, tail=ALIGN))
    work = build(flatten_tables(_rows(0, keys, 1), BLOCK), SHAPE, policy, None)
    assert _item_of(work, 0) == parts
    assert len(work.merges) == (len(parts) > 1)


def test_a_tail_stays_apart_from_a_chunk_that_others_read() -> None:
    policy = POLICY._replace(cuts=Cuts(CHUNK, tail=ALIGN))
    rows = [*_rows(shared_blocks=8, own=3, count=2), BatchRow([0], CHUNK, [*range(500, 505)])]
    work = build(flatten_tables(rows, BLOCK), SHAPE, policy, None)
    assert [_item_of(work, token) for token in range(2)] == [[(0, 16), (16, 32), (32, 35)]] * 2
    assert _item_of(work, 2) == [(0, 17)]
    assert sorted(work.narrow[:, 5].tolist()) == [1, 1, 1, 2, 2]


def test_small_steps_are_cut_finer() -> None:
    policy = POLICY._replace(cuts=Cuts(CHUNK, tail=ALIGN, fine=(4, 8)), fine_readings=6)
    for rows, parts in (
        (_rows(0, 24, 1), 6),
        (_rows(0, 25, 1), 4),
        (_rows(0, 24, 2), 3),
        # Seven readings with chunks of 8.
        ([*_rows(0, 24, 2), BatchRow([0], 3, [700])], 1),
    ):
        work = build(flatten_tables(rows, BLOCK), SHAPE, policy, None)
        assert len(_item_of(work, 0)) == parts


def test_many_keys_of_few_queries_are_cut_coarser() -> None:
    policy = POLICY._replace(cuts=Cuts(CHUNK, coarse=2 * CHUNK), fine_readings=3)
    for rows, chunk in (
        # Five readings with chunks of 32, six, and six of two rows.
        (_rows(0, 160, 1), CHUNK),
        (_rows(0, 161, 1), 2 * CHUNK),
        (_rows(0, 65, 2), 2 * CHUNK),
        # Four queries.
        (_rows(0, 65, 4), CHUNK),
    ):
        work = build(flatten_tables(rows, BLOCK), SHAPE, policy, None)
        assert work.chunk == chunk
        assert _item_of(work, 0)[0] == (0, chunk)


@pytest.mark.parametrize(
    ("wide_round", "chunks", "lengths"),
    [
        (8, 8, [16] * 8),  # one round
        (4, 8, [32] * 4),  # two rounds, or one of twice the length
        (3, 8, [64] * 2),
        (2, 8, [64] * 2),
        (4, 7, [32] * 3 + [16]),
        (1, 5, [32, 32, 16]),
    ],
)
def test_wide_items_span_chunks_where_that_saves_rounds(
    wide_round: int, chunks: int, lengths: list[int]
) -> None:
    policy = POLICY._replace(wide_round=wide_round, wide_min_bytes=1)
    rows = _rows(shared_blocks=4 * chunks, own=3, count=8)
    work = build(flatten_tables(rows, BLOCK), SHAPE, policy, None)
    assert sorted((work.wide[:, 3] - work.wide[:, 2]).tolist(), reverse=True) == lengths
    assert work.merges[:, 2].tolist() == [len(lengths) + 1] * 8


def test_chunks_of_other_members_are_not_joined() -> None:
    policy = POLICY._replace(wide_round=1, wide_min_bytes=1)
    deep = _rows(shared_blocks=8, own=3, count=8)
    rows = [*deep, *(BatchRow([0], 18, [*range(4), 900 + index]) for index in range(4))]
    work = build(flatten_tables(rows, BLOCK), SHAPE, policy, None)
    # Twelve read the first chunk, in two items, eight of them the second as well.
    assert sorted(work.wide[:, 5].tolist()) == [4, 8, 8]
