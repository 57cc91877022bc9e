"""Queries that read the same chunk: which of them stand in wide items, and how long those are.

Wide items are few and each fills a multiprocessor, so how they fall into rounds decides how long
all of them take: where one item of two chunks takes no longer than two rounds of one, it saves a
part to merge for every query, and leaves multiprocessors to the narrow items that run beside.

Plain numpy, no torch, no device.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from parrot_engine.attention.policy import Cuts, Policy
from parrot_engine.attention.tables import Ints, spans

#: Chunks that an item may span, besides one.
_SPANS = (2, 4)
#: What an item costs besides its keys, in chunks: measured on 64 and 128 decodes that share 6,144
#: tokens (docs/engine-log.md, 17).
_ITEM_COST = 1


class Readings(NamedTuple):
    """Who reads which chunk, one entry a pair of both; those of a group follow each other."""

    query: Ints
    #: The first chunk, if it is several.
    chunk: Ints
    #: Indices of the entries that begin a group, which reads one and the same chunk.
    group_begins: Ints


class Groups(NamedTuple):
    """By group of `Readings`."""

    sizes: Ints
    is_wide: npt.NDArray[np.bool_]
    #: Chunks that the group reads, from that of its entries on.
    spans: Ints


class Shares(NamedTuple):
    """Items, by the members of a group that each holds."""

    group: Ints
    first_member: Ints
    num_members: Ints


def find_groups(readings: Readings, policy: Policy, cuts: Cuts) -> Groups:
    """Which groups are worth wide items, each still reading its one chunk."""
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
    """Wide groups of the same members at consecutive chunks as one, if that is no slower.

    For layers without a window, where whoever reads a chunk reads those before. None: nothing is to
    be joined.
    """
    wide = np.flatnonzero(groups.is_wide)
    items = -(-groups.sizes[wide] // policy.wide_members)
    begins = readings.group_begins[wide]
    # Groups of equal size and equal first member at following chunks have all members in common:
    # who shares a chunk shares those before.
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
    """As many items a group as it fills."""
    room = np.where(groups.is_wide, np.int32(policy.wide_members), np.int32(policy.narrow_members))
    per_group = -(-groups.sizes // room)
    group = np.repeat(np.arange(len(groups.sizes), dtype=np.int32), per_group)
    offset = spans(np.zeros_like(per_group), per_group) * room[group]
    return Shares(
        group,
        readings.group_begins[group] + offset,
        np.minimum(room[group], groups.sizes[group] - offset),
    )
