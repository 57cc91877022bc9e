"""Prompts of tasks that are placed and not ended, as one tree of runs of blocks.

A prompt is a chain of keys; two chains agree up to where they part. So prompts form a tree, and a
stretch of blocks without a branch is one node of it, however long. Placing a task touches the few
nodes on its path, not its blocks, and says where it parts from others by bisection.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeAlias

#: Who holds a prompt how far: sets of rows with a number of leading blocks that all in the set
#: hold. Depths grow, and each set is part of the one before.
Reach: TypeAlias = list[tuple[int, int]]


class Run:
    """Blocks `start` to `end` of the chain `keys`, none of which any claim parts from another."""

    __slots__ = ("counts", "end", "keys", "last", "next", "parent", "rows", "start")

    def __init__(
        self, keys: tuple[Hashable, ...], start: int, end: int, parent: Run | None
    ) -> None:
        self.keys = keys
        self.start = start
        self.end = end
        #: Its last key: a chain that has it agrees with all of the run.
        self.last = keys[end - 1] if end else None
        self.parent = parent
        #: Runs that go on from its end, by their first key.
        self.next: dict[Hashable, Run] = {}
        #: Rows where a claim needs it (bit r for row r), and how many do, by row.
        self.rows = 0
        self.counts: dict[int, int] = {}


class ClaimTree:
    """Which rows need which chains, counted."""

    def __init__(self) -> None:
        self._root = Run((), 0, 0, None)
        self._blocks: dict[int, int] = {}

    def blocks(self, row: int) -> int:
        """Distinct blocks that the claims of a row need."""
        return self._blocks.get(row, 0)

    def reach(self, prefix: Sequence[Hashable]) -> Reach:
        """Who needs a prompt how far."""
        found: Reach = []
        following, depth, length = self._root.next, 0, len(prefix)
        rows = 0
        while depth < length:
            run = following.get(prefix[depth])
            if run is None:
                break
            # Runs that the same rows need are one step.
            if depth and run.rows != rows:
                found.append((rows, depth))
            rows, end = run.rows, run.end
            # The usual end of a run first: all of it agrees.
            if end <= length and run.last == prefix[end - 1]:
                following, depth = run.next, end
            else:
                depth = _agrees_up_to(run, prefix)
                break
        if depth:
            found.append((rows, depth))
        return found

    def add(self, row: int, keys: tuple[Hashable, ...]) -> tuple[Run, int]:
        """One more claim; the run that it ends with, and how many of its blocks the row needed."""
        run, depth, length, shared, bit = self._root, 0, len(keys), 0, 1 << row
        while depth < length:
            following = run.next.get(keys[depth])
            if following is None:
                following = run.next[keys[depth]] = Run(keys, depth, length, run)
            else:
                end = following.end
                if end > length or following.last != keys[end - 1]:
                    end = _agrees_up_to(following, keys)
                    if end < following.end:
                        following = _split(following, end)
            run, depth = following, following.end
            count = run.counts.get(row, 0)
            run.counts[row] = count + 1
            if count:
                shared = depth
            else:
                run.rows |= bit
        if length > shared:
            self._blocks[row] = self._blocks.get(row, 0) + length - shared
        return run, shared

    def remove(self, row: int, last: Run) -> int:
        """A claim that ended with this run is gone; how many blocks the row needs no more."""
        freed, bit, run = 0, 1 << row, last
        while (before := run.parent) is not None:
            count = run.counts[row]
            if count > 1:
                run.counts[row] = count - 1
            else:
                freed += run.end - run.start
                _forget(run, before, row, bit)
            run = before
        if freed:
            left = self._blocks[row] - freed
            if left:
                self._blocks[row] = left
            else:
                del self._blocks[row]
        return freed

    def drop_row(self, row: int) -> None:
        """All claims of a row are gone; they are not removed any more. A pass over its runs."""
        bit, runs = 1 << row, [self._root]
        while runs:
            run = runs.pop()
            runs += [following for following in run.next.values() if following.rows & bit]
            if run.parent is not None:
                _forget(run, run.parent, row, bit)
        self._blocks.pop(row, None)


def _agrees_up_to(run: Run, prefix: Sequence[Hashable]) -> int:
    """Up to where a prompt goes along a run whose first key is its own."""
    keys, high = run.keys, min(run.end, len(prefix))
    if keys[high - 1] == prefix[high - 1]:
        return high
    low = run.start + 1
    high -= 1
    while low < high:
        middle = (low + high) // 2
        if keys[middle] == prefix[middle]:
            low = middle + 1
        else:
            high = middle
    return low


def _split(run: Run, at: int) -> Run:
    """The part of a run before a block, as a run of its own; what follows keeps its identity."""
    before = run.parent
    assert before is not None
    upper = Run(run.keys, run.start, at, before)
    upper.rows = run.rows
    upper.counts = run.counts.copy()
    upper.next[run.keys[at]] = run
    before.next[run.keys[run.start]] = upper
    run.start = at
    run.parent = upper
    return upper


def _forget(run: Run, before: Run, row: int, bit: int) -> None:
    """A row does not need a run any more."""
    del run.counts[row]
    run.rows ^= bit
    if not run.counts:
        del before.next[run.keys[run.start]]
