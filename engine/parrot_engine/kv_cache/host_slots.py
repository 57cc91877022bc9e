"""The slots of the host tier: the index of copies and their order of eviction.

Bookkeeping alone: knows neither tensors nor the pool of the device's blocks. A slot is *free*,
*held* (its copy can be found by the hash of its block) or *forgotten* (nobody can find its copy,
but something still reads it). Copies are dropped least recently used first, never while they are
read.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator

from parrot_engine.exceptions import BlockStateError


class HostSlots:
    """A fixed number of slots, named 0 … num_slots-1."""

    def __init__(self, num_slots: int, on_drop: Callable[[bytes], None]) -> None:
        """All slots are free; `on_drop` is called with each hash that is no longer held."""
        self.num_slots = num_slots
        self._on_drop = on_drop
        #: Taken from the end: lowest numbers first, to begin with, so that copies lie together.
        self._free = list(range(num_slots - 1, -1, -1))
        #: Least recently used first.
        self._held: OrderedDict[bytes, int] = OrderedDict()
        #: How often a slot is being read.
        self._readers: Counter[int] = Counter()
        self._forgotten: set[int] = set()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._held

    def __iter__(self) -> Iterator[bytes]:
        """The hashes of all copies, the first to be dropped first."""
        return iter(self._held)

    def find(self, digest: bytes) -> int | None:
        return self._held.get(digest)

    def take(self, digest: bytes) -> int | None:
        """A slot for a new copy, which is used most recently; the oldest one goes for it.

        Returns:
            The slot; None when all are being read.

        Raises:
            BlockStateError: there is a copy of this block.
        """
        if digest in self._held:
            raise BlockStateError("host tier", "a second copy of a block")
        if not self._free:
            oldest = next((d for d, slot in self._held.items() if not self._readers[slot]), None)
            if oldest is None:
                return None
            self.forget(oldest)
        slot = self._free.pop()
        self._held[digest] = slot
        return slot

    def begin_read(self, digest: bytes) -> int:
        """The slot of a copy, which stays as it is until `end_read`; it is used most recently."""
        slot = self._held[digest]
        self._held.move_to_end(digest)
        self._readers[slot] += 1
        return slot

    def end_read(self, slot: int) -> None:
        """End one read of a slot.

        Raises:
            BlockStateError: it is not being read.
        """
        if self._readers[slot] < 1:
            raise BlockStateError("host tier", f"slot {slot} was not being read")
        self._readers[slot] -= 1
        if not self._readers[slot]:
            del self._readers[slot]
            if slot in self._forgotten:
                self._forgotten.remove(slot)
                self._free.append(slot)

    def forget(self, digest: bytes) -> None:
        """Take a copy out of the index; does nothing when there is none."""
        slot = self._held.pop(digest, None)
        if slot is None:
            return
        if self._readers[slot]:
            self._forgotten.add(slot)
        else:
            self._free.append(slot)
        self._on_drop(digest)

    def check_integrity(self) -> None:
        """Check that each slot is in one state.

        Raises:
            BlockStateError: one is in none or in two.
        """
        slots = [*self._free, *self._held.values(), *self._forgotten]
        if sorted(slots) != list(range(self.num_slots)):
            raise BlockStateError("host tier", "a slot is in no state, or in two")
        if self._forgotten - self._readers.keys() or self._readers.keys() & set(self._free):
            raise BlockStateError("host tier", "a slot's readers are miscounted")
