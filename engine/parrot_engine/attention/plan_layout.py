"""Where the parts of a step's plan lie in one buffer of 32-bit integers.

One transfer then carries all of a plan. With the capacities of a bucket every part is at a fixed
place, whatever the step holds, so that a captured graph finds it there; what is really there is
said by counts, which travel along. With the exact sizes of one step as capacities it is as small
as can be.

Plain numpy, no torch, no device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from parrot_engine.attention.tables import Ints, Tables
from parrot_engine.attention.work_list import WorkList

#: Parts begin at multiples of this many integers: Triton compiles another variant for a pointer
#: that is not aligned to 16 bytes.
ALIGN = 32

#: Integers of an entry of each part of a work list, in the order of `Capacity`.
_WIDTHS = (8, 8, 1, 3, 8, 0)


class Capacity(NamedTuple):
    """Entries for which there is room in one work list."""

    narrow: int
    wide: int
    members: int
    merges: int
    tiles: int
    #: Of partial results; they are not in the buffer.
    slots: int

    def holds(self, other: Capacity) -> bool:
        """Whether nothing of `other` is larger."""
        return all(mine >= theirs for mine, theirs in zip(self, other, strict=True))


def sizes_of(work: WorkList) -> Capacity:
    """Exactly what one list needs."""
    return Capacity(
        len(work.narrow),
        len(work.wide),
        len(work.member_tokens),
        len(work.merges),
        len(work.tiles),
        work.num_slots,
    )


class ListPlaces(NamedTuple):
    """Where one work list begins, part by part, in integers from the buffer's first."""

    narrow: int
    wide: int
    #: Of the members' tokens, positions and slots.
    members: tuple[int, int, int]
    merges: int
    tiles: int
    #: Of the numbers of narrow items, wide items, merges and tiles.
    counts: tuple[int, int, int, int]


class PlanLayout:
    """The places of all parts; block ids come last, and as many as there are."""

    def __init__(
        self,
        windows: Sequence[int | None],
        num_tokens: int,
        capacity: Capacity,
        num_block_ids: int,
        *,
        start: int = 0,
    ) -> None:
        """Lay out one list a window behind the buffer's first `start` integers."""
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
        #: Integers from the buffer's first one to the last of the layout.
        self.size = self._end

    def _take(self, count: int) -> int:
        place = self._end
        self._end = aligned(place + count)
        return place

    def holds(self, tables: Tables, lists: Mapping[int | None, WorkList]) -> bool:
        """Whether a step fits."""
        return (
            tables.num_tokens <= self.num_tokens
            and len(tables.block_ids) <= self.num_block_ids
            and all(self.capacity.holds(sizes_of(work)) for work in lists.values())
        )

    def write_nothing(self, buffer: Ints) -> int:
        """Write a step without tokens; returns how many of the buffer's integers have a meaning."""
        buffer[self.slots : self.slots + self.num_tokens] = -1
        for places in self.lists.values():
            for place in places.counts:
                buffer[place] = 0
        return self.block_ids

    def write(self, buffer: Ints, tables: Tables, lists: Mapping[int | None, WorkList]) -> int:
        """Write a step that fits; returns how many of the buffer's integers have a meaning.

        Tokens behind those of the step get slot -1: nothing is written to the cache for them.
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
    """`count` rounded up to where a part may begin."""
    return -(-count // ALIGN) * ALIGN


def _put(buffer: Ints, place: int, part: Ints) -> None:
    if part.size:
        buffer[place : place + part.size] = np.ravel(part)
