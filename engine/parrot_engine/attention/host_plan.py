"""A step's plan on the CPU: its tables, and a work list per window, laid out in one buffer.

Most steps differ from the previous one by a token per row: their lists are advanced. Other decode
steps have a fast path of their own (both in `decode_list`), and `work_list.build` handles the rest.
All three make equal lists.

The parts of a plan lie in one buffer of 32-bit integers (`PlanLayout`), so that one transfer
carries them all. With the capacities of a bucket every part is at a fixed place, where a captured
graph finds it for any step; counts in the buffer give the actual sizes. With a step's exact sizes
as capacities the buffer is as small as possible.

Plain numpy, no torch, no device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from parrot_engine.attention.decode_list import advance, build_decodes, goes_on
from parrot_engine.attention.interface import AttentionShape
from parrot_engine.attention.policy import Policy
from parrot_engine.attention.tables import Ints, Tables, flatten_tables
from parrot_engine.attention.work_list import WorkList, build
from parrot_engine.batch import BatchRow

#: Parts begin at multiples of this many integers, because Triton compiles another variant for
#: pointers that are not 16-byte aligned.
ALIGN = 32

#: Integers per entry of each part of a work list, in the order of `Capacity`.
_WIDTHS = (8, 8, 1, 3, 8, 0)


class HostPlan(NamedTuple):
    """One step laid out on the CPU; its arrays are read-only."""

    tables: Tables
    lists: dict[int | None, WorkList]

    @property
    def read_once(self) -> int:
        """Return `WorkList.read_once` of the layers with the most sharing: those without a
        window.
        """
        return max(work.read_once for work in self.lists.values())

    @property
    def parts(self) -> Parts:
        """Return the parts that a plan of fixed capacity needs for it."""
        lists = self.lists.values()
        return Parts(
            any(len(work.tiles) for work in lists),
            any(len(work.wide) for work in lists),
            any(len(work.merges) for work in lists),
        )


class Parts(NamedTuple):
    """The kinds of work that a plan may contain besides narrow items."""

    tiles: bool
    wide: bool
    merges: bool = True

    def cover(self, other: Parts) -> bool:
        return all(mine >= theirs for mine, theirs in zip(self, other, strict=True))


class HostPlanner:
    """Lays out one step after another."""

    def __init__(
        self, shape: AttentionShape, policy: Policy, windows: Sequence[int | None]
    ) -> None:
        """Plan for layers with these windows."""
        self._shape = shape
        self._policy = policy
        self._windows = windows
        #: The last plan, and whether rows shared in it.
        self._before: HostPlan | None = None
        self._shared = True

    def lay_out(self, rows: Sequence[BatchRow], *, share: bool = True) -> HostPlan:
        """Plan a step of at least one row; rows as in `StepBatch`.

        Without `share` every row reads for itself.
        """
        tables = flatten_tables(rows, self._shape.block_size)
        before = self._before
        if before is not None and (share != self._shared or not goes_on(before.tables, tables)):
            before = None
        self._shared = share
        lists = {window: self._list(tables, before, window, share) for window in self._windows}
        self._before = HostPlan(tables, lists)
        return self._before

    def _list(
        self, tables: Tables, before: HostPlan | None, window: int | None, share: bool
    ) -> WorkList:
        shape, policy = self._shape, self._policy
        work = None
        # Otherwise a decode is a tile like any other row.
        if policy.split_tokens:
            if before is not None:
                work = advance(before.lists[window], before.tables, tables, policy, window)
            if work is None:
                work = build_decodes(tables, shape, policy, window, share=share)
        return work or build(tables, shape, policy, window, share=share)


class Capacity(NamedTuple):
    """Capacity of one work list, in entries."""

    narrow: int
    wide: int
    members: int
    merges: int
    tiles: int
    #: Partial results; they are not in the buffer.
    slots: int

    def holds(self, other: Capacity) -> bool:
        return all(mine >= theirs for mine, theirs in zip(self, other, strict=True))


def sizes_of(work: WorkList) -> Capacity:
    return Capacity(
        len(work.narrow),
        len(work.wide),
        len(work.member_tokens),
        len(work.merges),
        len(work.tiles),
        work.num_slots,
    )


class ListPlaces(NamedTuple):
    """Offsets of one work list's parts, in integers from the buffer's start."""

    narrow: int
    wide: int
    #: Tokens, positions and slots of the members.
    members: tuple[int, int, int]
    merges: int
    tiles: int
    #: Numbers of narrow items, wide items, merges and tiles.
    counts: tuple[int, int, int, int]


class PlanLayout:
    """Places of all parts; block ids come last, in any number."""

    def __init__(
        self,
        windows: Sequence[int | None],
        num_tokens: int,
        capacity: Capacity,
        num_block_ids: int,
        *,
        start: int = 0,
    ) -> None:
        """Lay out one list per window behind the buffer's first `start` integers."""
        self._end = start
        self.num_tokens = num_tokens
        self.capacity = capacity
        self.num_block_ids = num_block_ids
        self.slots = self._take(num_tokens)
        self.lists: dict[int | None, ListPlaces] = {}
        for window in windows:
            narrow, wide, members, merges, tiles, _ = (
                self._take(width * count) for width, count in zip(_WIDTHS, capacity, strict=True)
            )
            self.lists[window] = ListPlaces(
                narrow,
                wide,
                (members, self._take(capacity.members), self._take(capacity.members)),
                merges,
                tiles,
                (self._take(1), self._take(1), self._take(1), self._take(1)),
            )
        self.block_ids = self._take(num_block_ids)
        #: Integers from the buffer's start to the end of the layout.
        self.size = self._end

    def _take(self, count: int) -> int:
        place = self._end
        self._end = aligned(place + count)
        return place

    def holds(self, tables: Tables, lists: Mapping[int | None, WorkList]) -> bool:
        return (
            tables.num_tokens <= self.num_tokens
            and len(tables.block_ids) <= self.num_block_ids
            and all(self.capacity.holds(sizes_of(work)) for work in lists.values())
        )

    def write_nothing(self, buffer: Ints) -> int:
        """Write a step without tokens; return the number of meaningful integers in the buffer."""
        buffer[self.slots : self.slots + self.num_tokens] = -1
        for places in self.lists.values():
            for place in places.counts:
                buffer[place] = 0
        return self.block_ids

    def write(self, buffer: Ints, tables: Tables, lists: Mapping[int | None, WorkList]) -> int:
        """Write a step that fits; return the number of meaningful integers in the buffer.

        Tokens beyond the step's get slot -1, so nothing is written to the cache for them.
        """
        count = tables.num_tokens
        buffer[self.slots : self.slots + count] = tables.slots
        buffer[self.slots + count : self.slots + self.num_tokens] = -1
        for window, work in lists.items():
            places = self.lists[window]
            _put(buffer, places.narrow, work.narrow)
            _put(buffer, places.wide, work.wide)
            _put(buffer, places.members[0], work.member_tokens)
            _put(buffer, places.members[1], work.member_positions)
            _put(buffer, places.members[2], work.member_slots)
            _put(buffer, places.merges, work.merges)
            _put(buffer, places.tiles, work.tiles)
            lengths = (len(work.narrow), len(work.wide), len(work.merges), len(work.tiles))
            for place, length in zip(places.counts, lengths, strict=True):
                buffer[place] = length
        _put(buffer, self.block_ids, tables.block_ids)
        return self.block_ids + len(tables.block_ids)


def aligned(count: int) -> int:
    """Round `count` up to the possible start of a part."""
    return -(-count // ALIGN) * ALIGN


def _put(buffer: Ints, place: int, part: Ints) -> None:
    if part.size:
        buffer[place : place + part.size] = np.ravel(part)
