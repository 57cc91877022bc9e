"""Which engine holds which prefix blocks, as far as the scheduler knows.

Engines are rows of an `EngineTable`; a set of rows is one Python int, bit r for row r. A block's
key stands for all tokens up to its end. So a prompt is a chain of keys, none twice, that agrees
with another chain up to where they part, and who holds how much of it follows from and-ing the
sets along the chain: some operations a block, however many engines.

Three sources feed the index:

- `stored`, `evicted`: what an engine reports of its cache;
- `assume`: what an engine that reports nothing is believed to cache: the last chains placed there;
- `claim`, `release`: chains of tasks that are placed and not ended. Their blocks are there or on
  their way, so the next task of the same prefix may count with them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from itertools import chain, groupby, islice, repeat
from operator import or_
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from parrot_scheduler.engines.prefix_claims import ClaimTree, Reach, Run
from parrot_scheduler.task import Task

Rows = npt.NDArray[np.intp]
Depths = npt.NDArray[np.float64]

#: Sets of up to so many rows are taken apart bit by bit, larger ones by numpy.
_FEW_ROWS = 8


class Match(NamedTuple):
    """The longest run of a prompt's blocks that an engine holds, for those that hold any."""

    #: Row of each engine, in no particular order.
    rows: Rows
    #: Leading blocks of the prompt that it holds, at least one.
    blocks: Rows


class Claim(NamedTuple):
    """What a placed task needs of its engine's blocks, to be given back with `release`."""

    row: int
    #: Which engine had the row: rows are reused.
    tenure: int
    keys: tuple[Hashable, ...]
    #: Leading blocks that other tasks placed there needed already.
    shared_blocks: int
    #: Where it ends in the tree of claims.
    last: Run


def chain_of(task: Task, block_tokens: int) -> tuple[Hashable, ...]:
    """The keys that stand for a task's prompt on an engine with such blocks.

    Where the engine's blocks cannot be seen (0), the chain is one key for the template and one for
    the application: its turns extend each other.
    """
    if block_tokens > 0:
        return task.prefix
    application = ("application", task.application)
    return (("template", task.template), application) if task.template else (application,)


_NOTHING = Match(np.empty(0, dtype=np.intp), np.empty(0, dtype=np.intp))


class PrefixIndex:
    """Block keys by the engines (rows) that hold them.

    At most `max_blocks` keys are remembered of what engines hold, least recently stored or claimed
    out first, and as many assumptions. Claims are bounded by the tasks that are placed. News of
    unknown keys and rows, and news told twice, change nothing.
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
        self._num_assumed = 0
        self._tenures: dict[int, int] = {}

    def __len__(self) -> int:
        """Keys that some engine is believed to hold."""
        return len(self._held)

    @property
    def num_assumed(self) -> int:
        """Assumptions in all, over keys and rows."""
        return self._num_assumed

    # Questions

    def match(self, prefix: Sequence[Hashable]) -> Match:
        """Who holds, or is about to hold, how much of a prompt.

        Costs a look-up a block and one numpy operation for each distinct depth.
        """
        return _as_arrays(self.reach(prefix))

    def depths(self, prefix: Sequence[Hashable], num_rows: int) -> Depths | None:
        """The same as one value for each of the first `num_rows` rows; None: nobody holds any."""
        return as_column(self.reach(prefix), num_rows)

    def claimed_reach(self, prefix: Sequence[Hashable]) -> Reach:
        """Who holds how many leading blocks that placed tasks need, and would share with others.

        As nested sets of rows. Does not look at each block.
        """
        return self._claims.reach(prefix)

    def reach(self, prefix: Sequence[Hashable], claimed: Reach | None = None) -> Reach:
        """`match` as nested sets of rows; `claimed` is the prompt's `claimed_reach`, if known."""
        if claimed is None:
            claimed = self._claims.reach(prefix)
        if not self._held or not prefix or (not claimed and prefix[0] not in self._held):
            return claimed
        rows = map(self._held.get, prefix, repeat(0))
        return _reach_of(map(or_, rows, _each_block(claimed)) if claimed else rows)

    def claimed_on(self, row: int, prefix: Sequence[Hashable]) -> int:
        """Leading blocks of a prompt that tasks placed on one engine need."""
        return depth_of(self._claims.reach(prefix), row)

    def blocks_on(self, row: int, prefix: Sequence[Hashable]) -> int:
        """Leading blocks of a prompt that one engine holds or is about to hold."""
        bit, held = 1 << row, self._held
        depth, length = self.claimed_on(row, prefix), len(prefix)
        while depth < length and held.get(prefix[depth], 0) & bit:
            depth += 1
        return depth

    # What engines report

    def stored(self, row: int, keys: Sequence[Hashable]) -> None:
        """An engine can find these blocks from now on."""
        if row < 0:
            return
        held, bit = self._held, 1 << row
        before, after = 0, bit
        # Deepest first: where memory runs short, a chain has to be forgotten from its end.
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

    # What is believed of engines that report nothing

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

    def claim(self, row: int, prefix: Sequence[Hashable]) -> Claim:
        """A task with this prompt has been placed there. Does not look at each of its blocks."""
        keys = tuple(prefix)
        last, shared = self._claims.add(row, keys)
        if 2 * len(self._held) > self._max_blocks:
            self._touch(keys)
        return Claim(row, self._tenures.get(row, 0), keys, shared, last)

    def release(self, claim: Claim) -> int:
        """The task has ended; how many blocks no placed task needs any more.

        Releasing for an engine that has left does nothing. A claim is released once.
        """
        if claim.tenure != self._tenures.get(claim.row, 0):
            return 0
        return self._claims.remove(claim.row, claim.last)

    def claimed_blocks(self, row: int) -> int:
        """Distinct blocks that the tasks placed on an engine need."""
        return self._claims.blocks(row)

    # Engines come and go

    def drop_row(self, row: int) -> None:
        """The engine has left; its row may go to another one. A pass over everything."""
        if row < 0:
            return
        self.evicted(row, None)
        self._claims.drop_row(row)
        self._tenures[row] = self._tenures.get(row, 0) + 1

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


def depth_of(reach: Reach, row: int) -> int:
    """Leading blocks that one row holds."""
    bit, low, high = 1 << row, 0, len(reach)
    while low < high:
        middle = (low + high) // 2
        if reach[middle][0] & bit:
            low = middle + 1
        else:
            high = middle
    return reach[low - 1][1] if low else 0


def _each_block(reach: Reach) -> Iterable[int]:
    """Rows that hold a prompt, block by block."""
    starts = [0, *(depth for _, depth in reach)]
    runs = [repeat(rows, end - start) for start, (rows, end) in zip(starts, reach, strict=False)]
    return chain(chain.from_iterable(runs), repeat(0))


def _reach_of(rows: Iterable[int]) -> Reach:
    """Who holds how much of a chain, from the rows that hold each of its keys."""
    reach: Reach = []
    there, depth = -1, 0
    # Runs of equal sets come and go without a step of Python for each key.
    for here, run in groupby(rows):
        still = there & here
        if depth and still != there:
            reach.append((there, depth))
        there = still
        if not there:
            return reach
        depth += len(list(run))
    reach.append((there, depth))
    return reach


def _levels_of(reach: Reach) -> Reach:
    """Rows that hold a chain up to one depth and no further, in no particular order."""
    levels: Reach = []
    deeper = 0
    for rows, depth in reversed(reach):
        if rows != deeper:
            levels.append((rows ^ deeper, depth))
            deeper = rows
    return levels


def _as_arrays(reach: Reach) -> Match:
    if not reach:
        return _NOTHING
    levels = _levels_of(reach)
    rows = [np.flatnonzero(unpack(bits, bits.bit_length())) for bits, _ in levels]
    blocks = [depth for _, depth in levels]
    return Match(np.concatenate(rows), np.repeat(blocks, [len(some) for some in rows]))


def as_column(reach: Reach, num_rows: int) -> Depths | None:
    """Depths as one value for each of the first `num_rows` rows; None: nobody holds any."""
    if not reach:
        return None
    column: Depths | None = None
    few: list[tuple[int, int]] = []
    for bits, depth in _levels_of(reach):
        if bits.bit_count() <= _FEW_ROWS:
            few += [(row, depth) for row in rows_of(bits)]
        elif column is None:
            column = np.multiply(unpack(bits, num_rows), depth, dtype=np.float64)
        else:
            column += np.multiply(unpack(bits, num_rows), depth, dtype=np.float64)
    if column is None:
        column = np.zeros(num_rows)
    for row, depth in few:
        column[row] = depth
    return column


def rows_of(bits: int) -> list[int]:
    """A small set of rows as a list, the first row first."""
    rows: list[int] = []
    while bits:
        lowest = bits & -bits
        rows.append(lowest.bit_length() - 1)
        bits ^= lowest
    return rows


def pack(rows: npt.NDArray[np.bool_]) -> int:
    """A set of rows from one truth value for each row."""
    return int.from_bytes(np.packbits(rows, bitorder="little").tobytes(), "little")


def unpack(bits: int, num_rows: int) -> npt.NDArray[np.uint8]:
    """A set of rows as one 0 or 1 for each row."""
    raw = np.frombuffer(bits.to_bytes((num_rows + 7) // 8, "little"), dtype=np.uint8)
    return np.unpackbits(raw, count=num_rows, bitorder="little")
