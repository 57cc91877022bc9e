"""The work list of one step: which queries read which chunk of keys, and where results go.

An *item* is a unit of work of the kernel: a range of keys, and the queries that read it, its
*members*. A query whose keys are cut over several items gets a *slot* for the partial result of
each; the slots of a query are merged by log-sum-exp.

Keys are cut at fixed absolute positions, every `chunk` tokens from position 0; sequences share a
chunk if they share all blocks up to its end (see `sharing`). A short remainder behind a row's last
whole chunk is read with that chunk, unless others read the chunk too; small steps are cut finer. So
the cuts of a query's sum depend on the step, as do the surrounding matrix products. Rows of many
tokens are laid out in tiles instead (see `tiles`).

Plain numpy, no torch, no device: tests check the list itself.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from parrot_engine.attention.interface import AttentionShape
from parrot_engine.attention.policy import Cuts, Policy
from parrot_engine.attention.sharing import (
    Groups,
    Readings,
    Sharing,
    divide_groups,
    find_groups,
    find_sharing,
    join_chunks,
    nothing_shared,
)
from parrot_engine.attention.tables import Ints, Tables, as_table, first_keys, largest_first, spans
from parrot_engine.attention.tiles import make_tiles


class Items(NamedTuple):
    """Ranges of keys with the queries that read them; columns of a table, int32 `[num_items]`."""

    #: Index in `Tables.block_ids` of the block with the key at position `base`.
    first_block: Ints
    #: Position of the chunk's first key.
    base: Ints
    #: Keys at positions `begin` … `end` - 1 are read; `begin` is aligned to the kernel's tile.
    begin: Ints
    end: Ints
    #: The members are entries `first_member` … `first_member + num_members - 1` of the members'
    #: arrays.
    first_member: Ints
    num_members: Ints
    #: Position before which all members see whole tiles of keys, so that no mask is needed.
    masked_from: Ints


class WorkList(NamedTuple):
    """The work of one window's layers in a step; int32 arrays."""

    #: `[num_items, 8]`: items of few queries, columns as in `Items` plus one of padding; most keys
    #: first.
    narrow: Ints
    #: The same columns for items of many queries.
    wide: Ints
    #: `[num_members]`: index in the step of the member's token.
    member_tokens: Ints
    #: `[num_members]`: position of that token in its context.
    member_positions: Ints
    #: `[num_members]`: slot of the partial result; -1: the result is complete, and written
    #: directly.
    member_slots: Ints
    #: `[num_cut_queries, 3]`: index of the token, its first slot, its number of slots.
    merges: Ints
    #: Total slots, those of tiles included.
    num_slots: int
    #: `[num_tiles, 8]`: columns as in `Tiles`, most keys first.
    tiles: Ints
    #: `Cuts.chunk` and `Cuts.tail` in keys, as used for rows without tiles.
    chunk: int
    tail: int
    #: Keys that rows do not read themselves because an item reads them for several: each item's
    #: keys times its rows minus one.
    read_once: int = 0


class _Queries(NamedTuple):
    """The tokens of split rows; int32 `[num_queries]` unless stated.

    Chunks are counted from position 0.
    """

    #: Index of the row in the step, index of the token in the step, position in its context.
    row: Ints
    token: Ints
    position: Ints
    #: Chunks `first_chunk` … `end_chunk` - 1 have the keys that the token sees.
    first_chunk: Ints
    end_chunk: Ints
    #: `[num_rows]`: number of whole chunks if the last one extends to the row's end; 0 otherwise.
    stretched: Ints


def build(
    tables: Tables, shape: AttentionShape, policy: Policy, window: int | None, *, share: bool = True
) -> WorkList:
    """Build the list for layers with this `window`; without `share` every row reads for itself."""
    counts = tables.counts
    split = counts <= policy.split_tokens
    split |= (counts <= policy.long_split_tokens) & (tables.first_positions >= policy.long_context)
    split_rows = np.flatnonzero(split).astype(np.int32)
    cuts = _cuts_of(tables, split_rows, policy, window)
    if share:
        chunk_blocks = cuts.chunk // shape.block_size
        sharing = find_sharing(tables, split_rows, shape.block_size, chunk_blocks)
    else:
        sharing = nothing_shared(len(counts))
    queries = _make_queries(tables, split_rows, cuts, sharing, window)
    readings = _gather_readings(queries, counts, sharing)
    groups = find_groups(readings, policy, cuts)
    parts = queries.end_chunk - queries.first_chunk
    place = readings.chunk - queries.first_chunk[readings.query]
    if window is None and groups.is_wide.any():
        joined = join_chunks(readings, groups, policy)
        if joined is not None:
            readings, groups = joined
            parts, place = _count_parts(readings, len(parts))
    first_slot, num_slots = _first_slots(parts)
    items, is_wide = _make_items(
        readings, groups, queries, tables.starts, policy, cuts, shape, window
    )
    query = readings.query
    read_once = _count_read_once(items, queries.row[query])
    of_query = first_slot[query]
    cut = first_slot >= 0
    merges = np.stack([queries.token, first_slot, parts], axis=1)[cut]
    tiles = make_tiles(tables, ~split, policy, window, num_slots)
    if len(tiles.merges):
        merges = np.concatenate([merges, tiles.merges])
    return WorkList(
        narrow=largest_first(items[~is_wide], 2, 3),
        wide=largest_first(items[is_wide], 2, 3),
        member_tokens=queries.token[query],
        member_positions=queries.position[query],
        member_slots=np.where(of_query < 0, of_query, of_query + place),
        merges=merges,
        num_slots=num_slots + tiles.num_slots,
        tiles=tiles.table,
        chunk=cuts.chunk,
        tail=cuts.tail,
        read_once=read_once,
    )


def _count_read_once(items: Ints, member_rows: Ints) -> int:
    """Count `WorkList.read_once`; members of one row are adjacent within an item."""
    items = items[items[:, 5] > 1]
    if not len(items):
        return 0
    changes = np.cumsum(np.diff(member_rows, prepend=member_rows[0]) != 0)
    first, count = items[:, 4], items[:, 5]
    others = changes[first + count - 1] - changes[first]
    return int((others * (items[:, 3] - items[:, 2])).sum())


def _cuts_of(tables: Tables, rows: Ints, policy: Policy, window: int | None) -> Cuts:

    def count_readings(chunk: int) -> int:
        position = tables.positions[spans(tables.first_tokens[rows], tables.counts[rows])]
        first = first_keys(position, window)
        return int((position // chunk + 1 - first // chunk).sum())

    return policy.cuts_of(int(tables.counts[rows].sum()), count_readings)


def _make_queries(
    tables: Tables, rows: Ints, cuts: Cuts, sharing: Sharing, window: int | None
) -> _Queries:
    counts = tables.counts[rows]
    row = np.repeat(rows, counts)
    token = spans(tables.first_tokens[rows], counts)
    position = tables.positions[token]
    stretched = np.zeros(len(tables.counts), dtype=np.int32)
    if cuts.tail:
        stretched[rows] = _stretched(tables.first_positions[rows] + counts, cuts)
        # A chunk that others read too ends where it ends for them.
        stretched[sharing.reach() >= stretched] = 0
    first_chunk = first_keys(position, window) // np.int32(cuts.chunk)
    end_chunk = position // np.int32(cuts.chunk) + 1
    if cuts.tail:
        last = stretched[row]
        end_chunk = np.where(last, np.minimum(end_chunk, last), end_chunk)
        # A window may begin beyond the original end of the last chunk.
        first_chunk = np.minimum(first_chunk, end_chunk - 1)
    return _Queries(row, token, position, first_chunk, end_chunk, stretched)


def _count_parts(readings: Readings, num_queries: int) -> tuple[Ints, Ints]:
    """Count the parts of each query, and number each reading among those of its query.

    A query's readings come in the order of its chunks.
    """
    parts = np.bincount(readings.query, minlength=num_queries).astype(np.int32)
    place = np.empty(len(readings.query), dtype=np.int32)
    by_query = np.argsort(readings.query, kind="stable")
    place[by_query] = spans(np.zeros_like(parts), parts)
    return parts, place


def _first_slots(parts: Ints) -> tuple[Ints, int]:
    """Return the slot of each query's first part, or -1 if it has one part; and the total number of
    slots.
    """
    slots = np.where(parts == 1, np.int32(0), parts)
    ends = np.cumsum(slots, dtype=np.int32)
    first_slot = np.where(slots > 0, ends - slots, np.int32(-1))
    return first_slot, int(ends[-1]) if len(ends) else 0


def _stretched(keys: Ints, cuts: Cuts) -> Ints:
    """Return the whole chunks of rows with a short remainder; 0 for all other rows."""
    whole = keys // np.int32(cuts.chunk)
    rest = keys - whole * np.int32(cuts.chunk)
    return np.where((rest > 0) & (rest <= cuts.tail), whole, np.int32(0))


def _gather_readings(queries: _Queries, counts: Ints, sharing: Sharing) -> Readings:
    """Return all chunks of all queries: shared ones first, then the others."""
    several = counts > 1
    # Tokens of one row share all of its chunks.
    together_end = np.where(
        several[queries.row],
        queries.end_chunk,
        np.minimum(sharing.reach()[queries.row], queries.end_chunk),
    )
    grouped = np.flatnonzero(together_end > queries.first_chunk)
    alone_begin = np.maximum(together_end, queries.first_chunk)
    alone_count = queries.end_chunk - alone_begin
    alone_query = np.repeat(np.arange(len(queries.row), dtype=np.int32), alone_count)
    alone_chunk = spans(alone_begin, alone_count)
    alone_groups = np.arange(len(alone_query), dtype=np.int32)
    if not len(grouped):
        return Readings(alone_query, alone_chunk, alone_groups)

    place = sharing.place[queries.row[grouped]]
    grouped = grouped[np.argsort(place, kind="stable")].astype(np.int32)
    chunks = np.arange(together_end[grouped].max(), dtype=np.int32)[:, None]
    reads = (queries.first_chunk[grouped] <= chunks) & (chunks < together_end[grouped])
    chunk, which = np.nonzero(reads)
    query = grouped[which]
    leader = sharing.place[queries.row[query]]
    leaders = sharing.leaders()
    shared = chunk < len(leaders)
    leader[shared] = leaders[chunk[shared], leader[shared]]
    begins = np.ones(len(query), dtype=bool)
    begins[1:] = (chunk[1:] != chunk[:-1]) | (leader[1:] != leader[:-1])
    return Readings(
        np.concatenate([query, alone_query]),
        np.concatenate([chunk.astype(np.int32), alone_chunk]),
        np.concatenate([np.flatnonzero(begins).astype(np.int32), alone_groups + len(query)]),
    )


def _make_items(
    readings: Readings,
    groups: Groups,
    queries: _Queries,
    table_starts: Ints,
    policy: Policy,
    cuts: Cuts,
    shape: AttentionShape,
    window: int | None,
) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Make items `[n, 8]` in the order of the readings, and flag the wide ones."""
    group, first, members = divide_groups(readings, groups, policy)
    lowest = highest = queries.position[readings.query]
    if len(first) < len(readings.query):
        lowest, highest = np.minimum.reduceat(lowest, first), np.maximum.reduceat(highest, first)
    chunk, width = readings.chunk[first], groups.spans[group]
    base = chunk * np.int32(cuts.chunk)
    row = queries.row[readings.query[first]]
    extent = width * np.int32(cuts.chunk)
    extent += np.where(chunk + width == queries.stretched[row], cuts.tail, 0).astype(np.int32)
    begin = np.maximum(base, first_keys(lowest, window) // policy.align * policy.align)
    seen = np.clip(lowest + 1 - base, 0, extent)
    items = as_table(
        Items(
            first_block=table_starts[row] + base // np.int32(shape.block_size),
            base=base,
            begin=begin,
            end=np.minimum(base + extent, highest + 1),
            first_member=first,
            num_members=members,
            masked_from=base + seen // policy.align * policy.align,
        )
    )
    return items, groups.is_wide[group]
