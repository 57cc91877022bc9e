"""The slots of the host tier: the index of copies and their order of eviction.

This is bookkeeping only, independent of tensors and the pool of the device's blocks. A slot is
*free*, *held* (its copy can be found by the hash of its block) or *forgotten* (its copy cannot be
found, but is still being read). Copies are dropped least recently used first, never while they are
read.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator

from parrot_engine.exceptions import BlockStateError


class HostSlots:
    """A fixed number of slots, named 0 … num_slots-1."""

    def __init__(self, num_slots: int, on_drop: Callable[[bytes], None]) -> None:
        """Start with all slots free; `on_drop` is called with each hash that is no longer held."""
        self.num_slots = num_slots
        self._on_drop = on_drop
        #: Taken from the end, so initially the lowest numbers first, which keeps copies together.
        self._free = list(range(num_slots - 1, -1, -1))
        #: Least recently used first.
        self._held: OrderedDict[bytes, int] = OrderedDict()
        #: Number of current readers per slot.
        self._readers: Counter[int] = Counter()
        self._forgotten: set[int] = set()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._held

    def __iter__(self) -> Iterator[bytes]:
        """Iterate over the hashes of all copies, the first to be dropped first."""
        return iter(self._held)

    def find(self, digest: bytes) -> int | None:
        return self._held.get(digest)

    def take(self, digest: bytes) -> int | None:
        """Take a slot for a new copy, marked as most recently used; evicts the oldest copy if
        needed.

        Returns:
            The slot; None if all are being read.

        Raises:
            BlockStateError: this block already has a copy.
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
        """Return a copy's slot, which stays unchanged until `end_read`, and mark it as most
        recently used.
        """
        slot = self._held[digest]
        self._held.move_to_end(digest)
        self._readers[slot] += 1
        return slot

    def end_read(self, slot: int) -> None:
        """End one read of a slot.

        Raises:
            BlockStateError: the slot is not being read.
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
        """Remove a copy from the index; does nothing if there is none."""
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
            BlockStateError: a slot is in no state or in two.
        """
        slots = [*self._free, *self._held.values(), *self._forgotten]
        if sorted(slots) != list(range(self.num_slots)):
            raise BlockStateError("host tier", "a slot is in no state, or in two")
        if self._forgotten - self._readers.keys() or self._readers.keys() & set(self._free):
            raise BlockStateError("host tier", "a slot's readers are miscounted")
