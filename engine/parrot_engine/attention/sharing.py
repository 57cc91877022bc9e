"""Shared prefixes: which rows of a step begin with the same blocks, and how they are read.

Rows share while the physical ids of their blocks are equal; reference counts are not used. Rows are
sorted so that those with a common beginning are neighbours (by their ids as bytes). Two rows then
share exactly what all rows between them share.

Queries that read the same chunk form a group, read by narrow or wide items. Wide items are few and
each fills a multiprocessor, so their total time depends on how they divide into rounds. If one item
of two chunks takes no longer than two rounds of one chunk, it saves every query a part to merge,
and leaves multiprocessors to concurrent narrow items.

Plain numpy, no torch, no device.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from parrot_engine.attention.policy import Cuts, Policy
from parrot_engine.attention.tables import Ints, Tables, spans

#: Numbers of chunks that an item may span, besides one.
_SPANS = (2, 4)
#: Cost of an item besides its keys, in chunks: measured on 64 and 128 decodes that share 6,144
#: tokens (engine-log, 17).
_ITEM_COST = 1


class Sharing(NamedTuple):
    """An order of the rows and the common part of neighbours in it; int32 `[num_rows]`."""

    #: By row: its place in the order.
    place: Ints
    #: By place: number of leading whole chunks shared with the previous place; 0 at the first
    #: place.
    common: Ints

    def reach(self) -> Ints:
        """Return `[num_rows]`: the number of leading chunks that a row shares with any other
        row.
        """
        following = np.append(self.common[1:], np.int32(0))
        reach: Ints = np.maximum(self.common, following)[self.place]
        return reach

    def leaders(self) -> Ints:
        """Return `[chunks, places]`: the first of the places that share the chunk with each place.

        No two rows share chunks from its length on.
        """
        deepest = int(self.common.max(initial=0))
        chunks = np.arange(deepest, dtype=np.int32)[:, None]
        places = np.arange(len(self.common), dtype=np.int32)
        leaders: Ints = np.maximum.accumulate(
            np.where(self.common <= chunks, places, np.int32(0)), axis=1
        )
        return leaders


def nothing_shared(num_rows: int) -> Sharing:
    return Sharing(np.arange(num_rows, dtype=np.int32), np.zeros(num_rows, dtype=np.int32))


def find_sharing(tables: Tables, candidates: Ints, block_size: int, chunk_blocks: int) -> Sharing:
    """Find the sharing of the rows with indices `candidates`, in chunks of `chunk_blocks` blocks.

    Only chunks whose keys existed before the step count, because blocks that a row writes are its
    own.
    """
    num_rows = len(tables.counts)
    whole = tables.first_positions[candidates] // (block_size * chunk_blocks)
    candidates, whole = candidates[whole > 0], whole[whole > 0]
    if len(candidates) < 2:
        return nothing_shared(num_rows)
    # Most rows that share nothing differ in a single block.
    last_of_first = tables.block_ids[tables.starts[candidates] + (chunk_blocks - 1)]
    _, group, sizes = np.unique(last_of_first, return_inverse=True, return_counts=True)
    alike = sizes[group] > 1
    candidates, whole = candidates[alike], whole[alike]
    if len(candidates) < 2:
        return nothing_shared(num_rows)

    # No row shares more than the second longest has.
    chunks = np.minimum(whole, np.partition(whole, -2)[-2])
    ids = np.empty((len(candidates), int(chunks.max()) * chunk_blocks), dtype=np.int32)
    places = zip(tables.starts[candidates].tolist(), (chunks * chunk_blocks).tolist(), strict=True)
    # NOTE: row by row. Indexing all rows at once takes several arrays of this size, and longer.
    for row, (start, length) in enumerate(places):
        ids[row, :length] = tables.block_ids[start : start + length]
        # Beyond its end a row equals no other.
        ids[row, length:] = -1 - row
    keys = [row.tobytes() for row in ids]
    order = np.array(sorted(range(len(keys)), key=keys.__getitem__))
    ids = ids[order]
    differs = (ids[1:] != ids[:-1]).reshape(len(ids) - 1, -1, chunk_blocks).any(axis=2)

    common = np.zeros(num_rows, dtype=np.int32)
    common[1 : len(candidates)] = np.where(
        differs.any(axis=1), differs.argmax(axis=1), differs.shape[1]
    )
    others = np.ones(num_rows, dtype=bool)
    others[candidates] = False
    place = np.empty(num_rows, dtype=np.int32)
    place[candidates[order]] = np.arange(len(candidates), dtype=np.int32)
    place[others] = np.arange(len(candidates), num_rows, dtype=np.int32)
    return Sharing(place, common)


class Readings(NamedTuple):
    """Pairs of a query and a chunk that it reads, grouped by chunk; int32."""

    #: `[num_readings]`: index of the query.
    query: Ints
    #: `[num_readings]`: number of the chunk, or of the first of several read together.
    chunk: Ints
    #: `[num_groups]`: index of the first reading of each group; a group reads one chunk.
    group_begins: Ints


class Groups(NamedTuple):
    """The groups of `Readings`, `[num_groups]` each."""

    #: Number of queries in the group.
    sizes: Ints
    #: True if wide items read it.
    is_wide: npt.NDArray[np.bool_]
    #: Number of chunks that the group reads, starting with that of its readings.
    spans: Ints


class Shares(NamedTuple):
    """Groups divided into items; int32 `[num_items]`."""

    #: The item's group.
    group: Ints
    #: Index of its first reading, and number of readings.
    first_member: Ints
    num_members: Ints


def find_groups(readings: Readings, policy: Policy, cuts: Cuts) -> Groups:
    """Find the groups that merit wide items, each still reading one chunk."""
    num_groups = len(readings.group_begins)
    sizes = np.diff(readings.group_begins, append=np.int32(len(readings.query)))
    is_wide = sizes * policy.group >= policy.wide_min_rows
    if is_wide.any():
        narrow = -(-sizes[is_wide] // policy.narrow_members)
        wide = -(-sizes[is_wide] // policy.wide_members)
        if (narrow - wide).sum() * cuts.chunk * policy.token_bytes < policy.wide_min_bytes:
            is_wide[:] = False
    return Groups(sizes, is_wide, np.ones(num_groups, dtype=np.int32))


def join_chunks(
    readings: Readings, groups: Groups, policy: Policy
) -> tuple[Readings, Groups] | None:
    """Join wide groups with equal members at consecutive chunks, if that is no slower.

    For layers without a window, where a query that reads a chunk also reads all earlier ones. None:
    there is nothing to join.
    """
    wide = np.flatnonzero(groups.is_wide)
    items = -(-groups.sizes[wide] // policy.wide_members)
    begins = readings.group_begins[wide]
    # Groups of equal size and equal first member at consecutive chunks have the same members,
    # because rows that share a chunk share all earlier ones.
    at = {
        (int(chunk), int(query), int(size)): (int(group), int(count))
        for chunk, query, size, group, count in zip(
            readings.chunk[begins],
            readings.query[begins],
            groups.sizes[wide],
            wide,
            items,
            strict=True,
        )
    }
    best, least = 1, -(-int(items.sum()) // policy.wide_round) * (1 + _ITEM_COST)
    joined: dict[int, list[int]] = {}
    for span in _SPANS:
        runs: dict[int, list[int]] = {}
        count = int(items.sum())
        for (chunk, query, size), (group, each) in at.items():
            run = [at.get((chunk + step, query, size)) for step in range(span)]
            if chunk % span == 0 and None not in run:
                runs[group] = [found[0] for found in run[1:] if found is not None]
                count -= (span - 1) * each
        cost = -(-count // policy.wide_round) * (span + _ITEM_COST)
        if runs and cost <= least:
            best, least, joined = span, cost, runs
    if not joined:
        return None
    gone = np.zeros(len(groups.sizes), dtype=bool)
    widths = groups.spans.copy()
    for group, following in joined.items():
        gone[following] = True
        widths[group] = best
    left = ~gone
    entries = np.repeat(left, groups.sizes)
    sizes = groups.sizes[left]
    return (
        Readings(
            readings.query[entries],
            readings.chunk[entries],
            np.cumsum(sizes, dtype=np.int32) - sizes,
        ),
        Groups(sizes, groups.is_wide[left], widths[left]),
    )


def divide_groups(readings: Readings, groups: Groups, policy: Policy) -> Shares:
    """Divide each group into as many items as it fills."""
    room = np.where(groups.is_wide, np.int32(policy.wide_members), np.int32(policy.narrow_members))
    per_group = -(-groups.sizes // room)
    group = np.repeat(np.arange(len(groups.sizes), dtype=np.int32), per_group)
    offset = spans(np.zeros_like(per_group), per_group) * room[group]
    return Shares(
        group,
        readings.group_begins[group] + offset,
        np.minimum(room[group], groups.sizes[group] - offset),
    )
