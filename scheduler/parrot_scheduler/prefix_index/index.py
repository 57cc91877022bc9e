"""An index of prefix blocks by the engines that hold them, as far as the scheduler knows.

A block's key stands for all tokens up to its end. So a prompt is a chain of keys, none twice, that
agrees with another chain up to where they part. An engine that holds a block holds those before it,
as engines evict the ends of chains first; so bisection finds how much it holds, in a few look-ups
however long the prompt is. Where an engine has lost a block from the middle all the same, what is
behind the gap may count or not.

Three sources feed the index:

- `stored`, `evicted`: what an engine reports of its cache;
- `assume`: what an engine that reports nothing is assumed to cache: the last chains placed there;
- `claim`, `release`: chains of tasks that are placed and not ended. Their blocks are there or on
  their way, so the next task of the same prefix may count on them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from parrot_scheduler.prefix_index.claims import ClaimPath, ClaimTree
from parrot_scheduler.task import Task


class PrefixClaim(NamedTuple):
    """The blocks of its engine that a placed task needs, to be given back with `release`."""

    row: int
    #: Which engine had the row: rows are reused.
    generation: int
    keys: tuple[Hashable, ...]
    #: Leading blocks that other tasks placed there needed already.
    shared_blocks: int
    #: Path of the tree where it ends.
    last: ClaimPath


def chain_of(task: Task, block_tokens: int) -> tuple[Hashable, ...]:
    """The keys that stand for a task's prompt on an engine with such blocks.

    Where the engine's blocks cannot be seen (0), the chain is one key for the template and one for
    the application: its turns extend each other.
    """
    if block_tokens > 0:
        return task.prefix
    application = ("application", task.application)
    return (("template", task.template), application) if task.template else (application,)


class PrefixIndex:
    """Block keys by the engines (rows) that hold them.

    At most `max_blocks` keys are remembered of what engines hold, least recently stored or claimed
    out first, and as many assumptions of engines that report nothing. Claims are bounded by the
    tasks that are placed. Reports of unknown keys and rows, and repeated ones, change nothing.
    """

    def __init__(self, max_blocks: int = 2_000_000) -> None:
        if max_blocks < 1:
            raise ValueError(f"max_blocks must be at least 1, not {max_blocks}")
        self._max_blocks = max_blocks
        # Key -> rows, least recently used first. Neighbours of a chain share one int object as
        # far as possible: they compare by identity first, and memory stays small.
        self._held: dict[Hashable, int] = {}
        self._claims = ClaimTree()
        # By row that does not report: what it is assumed to hold, least recently used first.
        self._assumed: dict[int, OrderedDict[Hashable, None]] = {}
        #: Assumptions in all, over keys and rows.
        self._num_assumed = 0
        self._generations: dict[int, int] = {}

    def __len__(self) -> int:
        """Keys that are held by some engine, reported or assumed."""
        return len(self._held)

    # Questions

    def rows_with(self, prefix: Sequence[Hashable]) -> int:
        """The set of rows that hold, or are about to hold, any leading block of a prompt."""
        if not prefix:
            return 0
        return self._held.get(prefix[0], 0) | self._claims.rows_with(prefix)

    def deepest(self, rows: int, prefix: Sequence[Hashable]) -> tuple[int, int]:
        """Leading blocks of a prompt that rows of a set hold, or are about to hold, at most; and
        the set of the rows that do.
        """
        depth, found = self._claims.deepest(rows, prefix)
        stored = self._stored(rows, prefix)
        if stored < depth or not stored:
            return depth, found
        holders = self._held[prefix[stored - 1]] & rows
        return stored, (found | holders if stored == depth else holders)

    def claimed_on(self, row: int, prefix: Sequence[Hashable]) -> int:
        """Leading blocks of a prompt that tasks placed on one engine need."""
        return self._claims.depth_on(row, prefix)

    def most_claimed(self, prefix: Sequence[Hashable]) -> int:
        """The same on that engine where they are most."""
        return self._claims.deepest(-1, prefix)[0]

    def stored_on(self, row: int, prefix: Sequence[Hashable]) -> int:
        """Leading blocks of a prompt that one engine has computed, as far as is known."""
        return self._stored(1 << row, prefix)

    def blocks_on(self, row: int, prefix: Sequence[Hashable]) -> int:
        """Leading blocks of a prompt that one engine holds or is about to hold."""
        return max(self._claims.depth_on(row, prefix), self._stored(1 << row, prefix))

    def _stored(self, rows: int, prefix: Sequence[Hashable]) -> int:
        """Leading blocks of a prompt that any row of a set has computed, by bisection."""
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

    # What engines report

    def stored(self, row: int, keys: Sequence[Hashable]) -> None:
        """An engine can find these blocks from now on."""
        if row < 0:
            return
        held, bit = self._held, 1 << row
        # Deepest first: where memory runs short, a chain has to be forgotten from its end.
        if held.keys().isdisjoint(keys):
            held.update(dict.fromkeys(reversed(keys), bit))
        else:
            before, after = 0, bit
            for key in reversed(keys):
                rows = held.pop(key, 0)
                if rows is not before:
                    before = rows
                    # The int of the block behind this one, where it is the same set: see `_held`.
                    joined = rows | bit
                    after = joined if joined != after else after
                held[key] = after
        if len(held) > self._max_blocks:
            self._forget_oldest(len(held) - self._max_blocks + self._max_blocks // 64)

    def evicted(self, row: int, keys: Iterable[Hashable] | None) -> None:
        """It cannot find these any more; None stands for all that it held.

        All of them costs a pass over everything that is remembered.
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

    # Assumptions about engines that report nothing

    def assume(self, row: int, prefix: Sequence[Hashable], capacity: int) -> None:
        """A silent engine has just computed a chain; it caches some `capacity` blocks in all."""
        if row < 0 or not prefix or capacity < 1:
            return
        assumed = self._assumed.setdefault(row, OrderedDict())
        for key in reversed(prefix):
            if key in assumed:
                assumed.move_to_end(key)
            else:
                assumed[key] = None
                self._num_assumed += 1
        # An engine evicts the ends of chains before their beginnings: the end is the oldest here.
        gone: list[Hashable] = []
        while len(assumed) > capacity or (self._num_assumed > self._max_blocks and assumed):
            gone.append(assumed.popitem(last=False)[0])
            self._num_assumed -= 1
        self.stored(row, [key for key in prefix if key in assumed])
        self.evicted(row, gone)

    # What placed tasks need

    def claim(self, row: int, prefix: Sequence[Hashable]) -> PrefixClaim:
        """A task with this prompt has been placed there. Does not look at each of its blocks."""
        keys = tuple(prefix)
        last, shared = self._claims.add(row, keys)
        if 2 * len(self._held) > self._max_blocks:
            self._touch(keys)
        return PrefixClaim(row, self._generations.get(row, 0), keys, shared, last)

    def release(self, claim: PrefixClaim) -> int:
        """The task has ended; how many blocks no placed task needs any more.

        Releasing for an engine that has left does nothing. A claim is released once.
        """
        if claim.generation != self._generations.get(claim.row, 0):
            return 0
        return self._claims.remove(claim.row, claim.last, len(claim.keys))

    # Engines come and go

    def drop_row(self, row: int) -> None:
        """The engine has left; its row may go to another one. A pass over everything."""
        if row < 0:
            return
        self.evicted(row, None)
        self._claims.drop_row(row)
        self._generations[row] = self._generations.get(row, 0) + 1

    def _forget_oldest(self, count: int) -> None:
        """Make room, for many at once: a dict finds its first key by passing all deleted ones."""
        for key in list(islice(self._held, count)):
            del self._held[key]

    def _touch(self, keys: Sequence[Hashable]) -> None:
        """Move what is held of a chain to the young end, its beginning last."""
        held = self._held
        for key in reversed(keys):
            rows = held.pop(key, 0)
            if rows:
                held[key] = rows
