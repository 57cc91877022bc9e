"""Copies to a host tier that end as late, or as early, as their contract allows.

The blocks of a `ScriptedRunner` are lists. Copies out read them only when they must: when a step is
launched before which they have to be read, or when somebody needs what they wrote; copies in write
when they are asked whether they are done. A tier that gives a block away too early, or believes in
a copy that is not there yet, changes the tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from parrot_engine.kv_cache.host_copies import Copy

from harness.engine.doubles import EMPTY, ScriptedRunner

#: What a block holds while it is being written.
TORN = b"torn"


class ScriptedCopy:
    """Implements `Copy`."""

    def __init__(self, copies: ScriptedCopies, work: Callable[[], None]) -> None:
        self._copies = copies
        self._work: Callable[[], None] | None = work

    @property
    def is_over(self) -> bool:
        """Tell whether the bytes were moved."""
        return self._work is None

    def is_read(self) -> bool:
        """See `Copy`."""
        return self.is_over

    def is_done(self) -> bool:
        """See `Copy`; it may end just now."""
        if not self.is_over and self._copies.goes_on():
            self._copies.end_up_to(self)
        return self.is_over

    def end(self) -> None:
        """Move the bytes now."""
        work, self._work = self._work, None
        if work is not None:
            work()


class ScriptedCopies:
    """Implements `BlockCopies` over the blocks of a scripted runner."""

    def __init__(
        self, runner: ScriptedRunner, *, num_slots: int, chunk: int = 2, seed: int | None = None
    ) -> None:
        """With a `seed` each look finds a copy at its end or not; without one, at once."""
        self.num_slots = num_slots
        self.chunk = chunk
        self._runner = runner
        self._slots = [[EMPTY] * runner.block_size for _ in range(num_slots)]
        self._random = None if seed is None else random.Random(seed)
        #: Not over: each way is a stream.
        self._out: list[ScriptedCopy] = []
        self._in: list[ScriptedCopy] = []
        self.num_launched = 0
        #: By block, the last launch that reads or writes it.
        self._used_by: dict[int, int] = {}
        self.num_stored = self.num_loaded = 0
        self.is_closed = False

    def goes_on(self) -> bool:
        """Tell whether a look finds that copies went on."""
        return self._random is None or self._random.random() < 0.3

    def end_up_to(self, copy: ScriptedCopy) -> None:
        """End a copy, and those before it in its stream."""
        stream = self._out if copy in self._out else self._in
        while not copy.is_over:
            stream.pop(0).end()

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> Copy:
        """See `BlockCopies`."""
        assert 0 < len(blocks) <= self.chunk
        assert len(blocks) == len(slots) == len(set(slots)) == len(set(blocks))
        self.num_stored += len(blocks)

        def work() -> None:
            for block, slot in zip(blocks, slots, strict=True):
                self._slots[slot] = list(self._runner.slots[block])

        copy = ScriptedCopy(self, work)
        self._out.append(copy)
        return copy

    def load(
        self, slots: Sequence[int], blocks: Sequence[int], *, after: int, behind: Sequence[Copy]
    ) -> Copy:
        """See `BlockCopies`."""
        assert 0 < len(blocks) <= self.chunk
        assert all(self._used_by.get(block, 0) <= after for block in blocks), "a step reads it yet"
        self.num_loaded += len(blocks)
        for other in behind:
            assert isinstance(other, ScriptedCopy)
            if not other.is_over:
                self.end_up_to(other)
        # From now on the blocks may be written at any time.
        for block in blocks:
            self._runner.slots[block] = [TORN] * self._runner.block_size

        def work() -> None:
            for slot, block in zip(slots, blocks, strict=True):
                self._runner.slots[block] = list(self._slots[slot])

        copy = ScriptedCopy(self, work)
        self._in.append(copy)
        return copy

    def before_launch(self, behind: Sequence[Copy]) -> None:
        """See `BlockCopies`."""
        for other in behind:
            assert isinstance(other, ScriptedCopy)
            if not other.is_over:
                self.end_up_to(other)

    def after_launch(self, number: int) -> None:
        """See `BlockCopies`."""
        assert number == self.num_launched + 1
        self.num_launched = number
        for batch in self._runner.batches[-1:]:
            tables = [row.block_table for row in batch.rows] + [list(c) for c in batch.copies]
            self._used_by.update((int(block), number) for table in tables for block in table)

    def close(self) -> None:
        """See `BlockCopies`."""
        assert not self.is_closed, "closed twice"
        self.is_closed = True
