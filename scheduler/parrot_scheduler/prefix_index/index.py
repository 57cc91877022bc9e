"""An index of prefix blocks by the engines that are known or expected to hold them.

A block's key stands for all tokens up to its end. So a prompt is a chain of unique keys that agrees
with another chain up to where they diverge. An engine that holds a block also holds those before
it, because engines evict the ends of chains first. Bisection therefore finds how much an engine
holds in a few look-ups, for any length. If an engine has lost a middle block all the same, blocks
behind the gap may or may not count.

Three sources feed the index:

- `stored`, `evicted`: what an engine reports of its cache;
- `assume`: the last chains placed on an engine that reports nothing, which it is assumed to cache;
- `claim`, `release`: chains of tasks that are placed and not ended. Their blocks are there or on
  their way, so the next task with the same prefix may rely on them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from parrot_scheduler.prefix_index.claims import ClaimPath, ClaimTree
from parrot_scheduler.task import Task


class PrefixClaim(NamedTuple):
    """The blocks that a placed task needs on its engine; give it back with `release`."""

    row: int
    #: Generation of the row, because rows are reused.
    generation: int
    keys: tuple[Hashable, ...]
    #: Leading blocks that other tasks there needed already.
    shared_blocks: int
    #: Path of the tree where the claim ends.
    last: ClaimPath


def chain_of(task: Task, block_tokens: int) -> tuple[Hashable, ...]:
    """Return the keys that stand for a task's prompt on an engine with this block size.

    If the engine's blocks are invisible (0), the chain is one key for the template and one for the
    application, whose turns extend each other.
    """
    if block_tokens > 0:
        return task.prefix
    application = ("application", task.application)
    return (("template", task.template), application) if task.template else (application,)


class PrefixIndex:
    """Block keys by the engines (rows) that hold them.

    Remembers at most `max_blocks` held keys, and as many assumptions about engines that report
    nothing; the least recently stored or claimed are dropped first. Placed tasks bound the claims.
    Unknown keys and rows and repeated reports change nothing.
    """

    def __init__(self, max_blocks: int = 2_000_000) -> None:
        if max_blocks < 1:
            raise ValueError(f"max_blocks must be at least 1, not {max_blocks}")
        self._max_blocks = max_blocks
        # Key -> rows, least recently used first. Neighbouring keys share one int object where
        # possible, which speeds up comparison and saves memory.
        self._held: dict[Hashable, int] = {}
        self._claims = ClaimTree()
        # By row without reports: the assumed keys, least recently used first.
        self._assumed: dict[int, OrderedDict[Hashable, None]] = {}
        #: Number of assumptions over all rows.
        self._num_assumed = 0
        self._generations: dict[int, int] = {}

    def __len__(self) -> int:
        """Return the number of keys that some engine holds, reported or assumed."""
        return len(self._held)

    def rows_with(self, prefix: Sequence[Hashable]) -> int:
        """Return the set of rows that hold, or are about to hold, any leading block of a prompt."""
        if not prefix:
            return 0
        return self._held.get(prefix[0], 0) | self._claims.rows_with(prefix)

    def deepest(self, rows: int, prefix: Sequence[Hashable]) -> tuple[int, int]:
        """Return the most leading blocks of a prompt that any row of a set holds or is about to
        hold, and the rows that do.
        """
        depth, found = self._claims.deepest(rows, prefix)
        stored = self._stored(rows, prefix)
        if stored < depth or not stored:
            return depth, found
        holders = self._held[prefix[stored - 1]] & rows
        return stored, (found | holders if stored == depth else holders)

    def claimed_on(self, row: int, prefix: Sequence[Hashable]) -> int:
        """Return the number of leading blocks of a prompt that tasks placed on one engine need."""
        return self._claims.depth_on(row, prefix)

    def most_claimed(self, prefix: Sequence[Hashable]) -> int:
        """Return the largest such number over all engines."""
        return self._claims.deepest(-1, prefix)[0]

    def stored_on(self, row: int, prefix: Sequence[Hashable]) -> int:
        """Return the number of leading blocks of a prompt that one engine is known to have
        computed.
        """
        return self._stored(1 << row, prefix)

    def blocks_on(self, row: int, prefix: Sequence[Hashable]) -> int:
        """Return the number of leading blocks of a prompt that one engine holds or is about to
        hold.
        """
        return max(self._claims.depth_on(row, prefix), self._stored(1 << row, prefix))

    def _stored(self, rows: int, prefix: Sequence[Hashable]) -> int:
        """Return the most leading blocks of a prompt that any row of a set has computed, by
        bisection.
        """
        held = self._held
        if not prefix or not held.get(prefix[0], 0) & rows:
            return 0
        low, high = 1, len(prefix)
        while low < high:
            middle = (low + high + 1) // 2
            if held.get(prefix[middle - 1], 0) & rows:
                low = middle
            else:
                high = middle - 1
        return low

    def stored(self, row: int, keys: Sequence[Hashable]) -> None:
        """Note blocks that an engine caches from now on."""
        if row < 0:
            return
        held, bit = self._held, 1 << row
        # Deepest first: when memory is short, a chain must be forgotten from its end.
        if held.keys().isdisjoint(keys):
            held.update(dict.fromkeys(reversed(keys), bit))
        else:
            before, after = 0, bit
            for key in reversed(keys):
                rows = held.pop(key, 0)
                if rows is not before:
                    before = rows
                    # Reuse the int of the following block if the set is equal: see `_held`.
                    joined = rows | bit
                    after = joined if joined != after else after
                held[key] = after
        if len(held) > self._max_blocks:
            self._forget_oldest(len(held) - self._max_blocks + self._max_blocks // 64)

    def evicted(self, row: int, keys: Iterable[Hashable] | None) -> None:
        """Note blocks that an engine no longer caches; None means all.

        None takes a pass over all remembered keys.
        """
        if row < 0:
            return
        if keys is None:
            keys = [key for key, rows in self._held.items() if rows >> row & 1]
            self._num_assumed -= len(self._assumed.pop(row, ()))
        held, bit = self._held, 1 << row
        before = after = 0
        for key in keys:
            rows = held.get(key, 0)
            if not rows & bit:
                continue
            if rows is not before:
                before, after = rows, rows ^ bit
            if after:
                held[key] = after
            else:
                del held[key]

    def assume(self, row: int, prefix: Sequence[Hashable], capacity: int) -> None:
        """Assume that a silent engine caches the chain it has just computed, with room for
        `capacity` blocks.
        """
        if row < 0 or not prefix or capacity < 1:
            return
        assumed = self._assumed.setdefault(row, OrderedDict())
        for key in reversed(prefix):
            if key in assumed:
                assumed.move_to_end(key)
            else:
                assumed[key] = None
                self._num_assumed += 1
        # Engines evict the ends of chains before their beginnings, so the end is the oldest here.
        gone: list[Hashable] = []
        while len(assumed) > capacity or (self._num_assumed > self._max_blocks and assumed):
            gone.append(assumed.popitem(last=False)[0])
            self._num_assumed -= 1
        self.stored(row, [key for key in prefix if key in assumed])
        self.evicted(row, gone)

    def claim(self, row: int, prefix: Sequence[Hashable]) -> PrefixClaim:
        """Claim a prompt for a task placed on the row, without visiting every block."""
        keys = tuple(prefix)
        last, shared = self._claims.add(row, keys)
        if 2 * len(self._held) > self._max_blocks:
            self._touch(keys)
        return PrefixClaim(row, self._generations.get(row, 0), keys, shared, last)

    def release(self, claim: PrefixClaim) -> int:
        """Give back an ended task's claim; return the number of blocks that no placed task needs
        any more.

        A claim of an engine that has left is ignored. Release each claim once.
        """
        if claim.generation != self._generations.get(claim.row, 0):
            return 0
        return self._claims.remove(claim.row, claim.last, len(claim.keys))

    def drop_row(self, row: int) -> None:
        """Forget an engine that has left, in one pass; its row may be reused."""
        if row < 0:
            return
        self.evicted(row, None)
        self._claims.drop_row(row)
        self._generations[row] = self._generations.get(row, 0) + 1

    def _forget_oldest(self, count: int) -> None:
        """Forget the oldest keys in bulk: a dict skips all deleted keys to find its first."""
        for key in list(islice(self._held, count)):
            del self._held[key]

    def _touch(self, keys: Sequence[Hashable]) -> None:
        """Mark the held keys of a chain as recently used, its beginning last."""
        held = self._held
        for key in reversed(keys):
            rows = held.pop(key, 0)
            if rows:
                held[key] = rows
