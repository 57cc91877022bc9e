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
    """Blocks `start` to `end` of the chain `keys`, none of which any claim parts from another.

    A row needs a run for each of its claims that end with it, and for each run after it that the
    row needs. So a claim is counted where it ends, or where it meets what its row needs already,
    and nowhere before.
    """

    __slots__ = ("end", "keys", "last", "more", "next", "parent", "rows", "start")

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
        #: Rows that need it, bit r for row r.
        self.rows = 0
        #: By row, for how many reasons besides one; rows with one reason are left out.
        self.more: dict[int, int] = {}


class ClaimTree:
    """Which rows need which chains, counted."""

    def __init__(self) -> None:
        self._root = Run((), 0, 0, None)
        self._blocks: dict[int, int] = {}
        # Where the chain that was looked at last leaves the tree: what is placed has just been
        # looked for. Forgotten with any change.
        self._walked: Sequence[Hashable] | None = None
        self._deepest = self._root
        self._depth = 0

    def blocks(self, row: int) -> int:
        """Distinct blocks that the claims of a row need."""
        return self._blocks.get(row, 0)

    def reach(self, prefix: Sequence[Hashable]) -> Reach:
        """Who needs a prompt how far."""
        found: Reach = []
        deepest, depth, length = self._root, 0, len(prefix)
        rows = 0
        while depth < length:
            run = deepest.next.get(prefix[depth])
            if run is None:
                break
            # Runs that the same rows need are one step.
            if depth and run.rows != rows:
                found.append((rows, depth))
            rows, end = run.rows, run.end
            deepest = run
            # The usual end of a run first: all of it agrees.
            if end > length or run.last != prefix[end - 1]:
                depth = _agrees_up_to(run, prefix)
                break
            depth = end
        if depth:
            found.append((rows, depth))
        self._walked, self._deepest, self._depth = prefix, deepest, depth
        return found

    def add(self, row: int, keys: tuple[Hashable, ...]) -> tuple[Run, int]:
        """One more claim; the run that it ends with, and how many of its blocks the row needed."""
        if self._walked is not keys:
            self.reach(keys)
        last, depth, length = self._deepest, self._depth, len(keys)
        self._walked = None
        if depth < last.end:
            last = _split(last, depth)
        if depth < length:
            before, last = last, Run(keys, depth, length, last)
            before.next[keys[depth]] = last
        bit, run = 1 << row, last
        # Up to what the row needs already.
        while not run.rows & bit and run.parent is not None:
            run.rows |= bit
            run = run.parent
        shared = run.end
        if run.parent is not None:
            run.more[row] = run.more.get(row, 0) + 1
        if length > shared:
            self._blocks[row] = self._blocks.get(row, 0) + length - shared
        return last, shared

    def remove(self, row: int, last: Run) -> int:
        """A claim that ended with this run is gone; how many blocks the row needs no more."""
        self._walked = None
        freed, bit, run = 0, 1 << row, last
        while (before := run.parent) is not None:
            more = run.more.get(row, 0)
            if more:
                if more > 1:
                    run.more[row] = more - 1
                else:
                    del run.more[row]
                _join(run, before)
                break
            freed += run.end - run.start
            run.rows ^= bit
            if run.rows:
                _join(run, before)
            else:
                del before.next[run.keys[run.start]]
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
        self._walked = None
        bit, runs = 1 << row, [self._root]
        while runs:
            run = runs.pop()
            runs += [following for following in run.next.values() if following.rows & bit]
            before = run.parent
            if before is not None:
                run.more.pop(row, None)
                run.rows ^= bit
                if not run.rows:
                    del before.next[run.keys[run.start]]
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
    upper.next[run.keys[at]] = run
    before.next[run.keys[run.start]] = upper
    run.start = at
    run.parent = upper
    return upper


def _join(run: Run, before: Run) -> None:
    """Make a run and the one after it one again where nothing parts them any more."""
    if len(run.next) != 1 or run.more:
        return
    (following,) = run.next.values()
    if following.rows == run.rows:
        following.start = run.start
        following.parent = before
        before.next[run.keys[run.start]] = following
