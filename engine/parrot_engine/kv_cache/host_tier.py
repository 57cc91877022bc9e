"""The host tier: blocks evicted from the device are in host memory, and are loaded ahead of use.

A second pool of slots, each the size of a block, known by the same hashes. It knows nothing of
contexts: it adds to the prefix cache what the prefix cache has lost.

*Stores.* Blocks are copied before they are evicted, not when: those that would go next (cached
ones, and what idle contexts hold) have their copy made beside the steps until enough of them can be
given away at once. Blocks that were dropped by who released them are not copied. A block may be
taken and written while it is being copied; what is launched then waits for the copy to have read
it.

*Loads.* A context that could go on from blocks that only the host has does not get a row; the
blocks are loaded into free ones of the device, are registered in the prefix cache when they are
there, and the next plan finds them as it finds any prefix. Meanwhile they are the tier's, and all
others go on. Copies stay in the host's memory until they are the oldest.

Whether a run of blocks is worth it is a matter of its length: a copy begins late (a step goes by
without the context) and then is faster than computing (`parrot_engine.kv_cache.host_rates`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from parrot_engine.exceptions import BlockStateError
from parrot_engine.kv_cache.block_pool import BlockPool
from parrot_engine.kv_cache.host_copies import BlockCopies, Copy
from parrot_engine.kv_cache.host_slots import HostSlots

#: Share of the device's blocks that may be on their way in at once.
LOADING_SHARE = 0.25
#: The reserve is looked at again after so many changes of the pool, as a share of it.
_RECOUNT_SHARE = 1 / 8
#: Blocks examined for each block of the reserve, at most.
_LOOKS = 4
#: Runs that are remembered to have been fetched in part.
_MAX_PARTLY_LOADED = 1024
#: Seconds that a step waits for a copy when there is nothing else to do, and between two looks.
_WAIT_S = 0.002
_LOOK_S = 0.00005


class _BlockLoad(NamedTuple):
    digest: bytes
    slot: int
    block: int


class HostTier:
    """Copies of blocks in host memory, and their ways there and back. One thread drives it."""

    def __init__(
        self, num_blocks: int, copies: BlockCopies, *, reserve: int, least_blocks: int
    ) -> None:
        """Make the pool of the device's blocks, and stand behind it.

        Args:
            num_blocks: of the device.
            copies: moves the content.
            reserve: blocks that should always be there to be given away without another copy.
            least_blocks: shorter runs of blocks are computed rather than brought back.
        """
        self._copies = copies
        #: The pool of the device's blocks.
        self.pool = pool = BlockPool(
            num_blocks, host_slots=copies.num_slots, on_reuse=self._on_reuse
        )
        assert pool.host is not None
        self.slots: HostSlots = pool.host
        self._reserve = max(1, min(reserve, copies.num_slots // 2, pool.num_blocks))
        self._least_blocks = least_blocks
        self._max_loading = max(copies.chunk, int(LOADING_SHARE * pool.num_blocks))
        #: Hashes on their way in, and those of which the ones before were fetched.
        self._loading: set[bytes] = set()
        self._partly_loaded: set[bytes] = set()
        self._loads: deque[tuple[Copy, list[_BlockLoad]]] = deque()
        #: Copies on their way out, with blocks and slots, and the last one of each.
        self._stores: deque[tuple[Copy, list[int], list[int]]] = deque()
        self._storing: dict[int, Copy] = {}
        self._being_written: dict[int, Copy] = {}
        #: Copies that have not read all of their blocks, some of which were taken since.
        self._overtaken: list[Copy] = []
        #: Changes of the pool after which the reserve is looked at again.
        self._look_at = 0
        #: Blocks copied out and in so far.
        self.num_stored = 0
        self.num_loaded = 0

    @property
    def is_loading_any(self) -> bool:
        return bool(self._loads)

    @property
    def room(self) -> int:
        """Blocks that may be fetched now."""
        return max(0, self._max_loading - len(self._loading))

    # In

    def is_loading(self, digest: bytes) -> bool:
        return digest in self._loading

    def loadable(self, digests: Iterable[bytes]) -> list[bytes]:
        """The first of these blocks, as far as only the host has them; none if not worth it.

        `digests` are those of consecutive blocks that a context would compute next.
        """
        found = list[bytes]()
        for digest in digests:
            if digest not in self.slots or digest in self._loading:
                break
            if self.pool.find(digest) is not None:
                break
            found.append(digest)
        is_rest = not self._partly_loaded.isdisjoint(found[:1])
        return found if is_rest or len(found) >= self._least_blocks else []

    def load(self, digests: Sequence[bytes], limit: int) -> int:
        """Bring blocks back that the host has, as far as there is room.

        Args:
            digests: of consecutive blocks.
            limit: free ones of the device that may be taken.

        Returns:
            How many are on their way now.
        """
        count = min(len(digests), limit, self.room)
        if 0 < count < len(digests):
            # The rest comes when there is room for it, however short it is.
            if len(self._partly_loaded) >= _MAX_PARTLY_LOADED:
                self._partly_loaded.clear()
            self._partly_loaded.add(digests[count])
        for first in range(0, count, self._copies.chunk):
            self._load(digests[first : min(count, first + self._copies.chunk)])
        return count

    def _load(self, digests: Sequence[bytes]) -> None:
        # In the order of their slots, which lie together if they were written together.
        reading = sorted((self.slots.begin_read(digest), digest) for digest in digests)
        items = [_BlockLoad(digest, slot, self.pool.allocate()) for slot, digest in reading]
        behind = list(self._overtaken)
        behind += (self._being_written[i.slot] for i in items if i.slot in self._being_written)
        copy = self._copies.load(
            [item.slot for item in items],
            [item.block for item in items],
            after=max(self.pool.released_at(item.block) for item in items),
            behind=_once(behind),
        )
        self.pool.loading.update(item.block for item in items)
        self._loading.update(digests)
        self._partly_loaded.difference_update(digests)
        self._loads.append((copy, items))
        self.num_loaded += len(items)

    def collect(self) -> None:
        """Register the blocks that were loaded, and finish the copies that were stored."""
        while self._stores and self._stores[0][0].is_done():
            copy, blocks, slots = self._stores.popleft()
            _forget(self._storing, blocks, copy)
            _forget(self._being_written, slots, copy)
        loaded: list[_BlockLoad] = []
        while self._loads and self._loads[0][0].is_done():
            loaded += self._loads.popleft()[1]
        # From the end, so that leaves would be evicted first.
        for digest, slot, block in reversed(loaded):
            self.slots.end_read(slot)
            self.pool.loading.remove(block)
            self._loading.remove(digest)
            # NOTE: a copy that was forgotten meanwhile may be one that is not to be trusted.
            if self.slots.find(digest) == slot:
                block = self.pool.register(block, digest)
            self.pool.release(block)

    def wait(self) -> None:
        deadline = time.monotonic() + _WAIT_S
        while self._loads and not self._loads[0][0].is_done():
            if time.monotonic() > deadline:
                return
            time.sleep(_LOOK_S)

    # Out

    def copy_ahead(self, idle: Iterable[Sequence[int]]) -> None:
        """Copy out what would be given away next and has no copy.

        Args:
            idle: block tables of contexts that do nothing, the first to lose its KV first.
        """
        pool = self.pool
        if pool.num_empty >= self._reserve or pool.num_changes < self._look_at:
            return
        room = self._reserve - len(self._storing)
        chosen, is_complete = self._choose(idle, room)
        self._look_at = pool.num_changes
        if is_complete:
            self._look_at += max(1, int(self._reserve * _RECOUNT_SHARE))
        elif len(chosen) < room:
            # There is nothing else to copy.
            self._look_at += 1
        for first in range(0, len(chosen), self._copies.chunk):
            self._store(chosen[first : first + self._copies.chunk])

    def _choose(self, idle: Iterable[Sequence[int]], room: int) -> tuple[list[int], bool]:
        """Return at most `room` blocks to copy, and if all of the reserve has copies then."""
        pool = self.pool
        missing, looks = self._reserve - pool.num_empty, _LOOKS * self._reserve
        chosen: list[int] = []
        for block in chain(pool.eviction_order(), _held_alone(idle, pool)):
            if missing <= 0 or looks <= 0:
                break
            looks -= 1
            missing -= 1
            digest = pool.digest(block)
            if digest is None or digest in self.slots or pool.is_dropped(block):
                continue
            if len(chosen) >= room:
                return chosen, False
            chosen.append(block)
        return chosen, missing <= 0

    def _store(self, blocks: Sequence[int]) -> None:
        pairs: list[tuple[int, int]] = []
        for block in blocks:
            digest = self.pool.digest(block)
            assert digest is not None
            if self.slots.take(digest) is None:
                break
            # Not to be dropped for the next of them.
            pairs.append((self.slots.begin_read(digest), block))
        if not pairs:
            return
        for slot, _ in pairs:
            self.slots.end_read(slot)
        pairs.sort()
        slots, blocks = [slot for slot, _ in pairs], [block for _, block in pairs]
        copy = self._copies.store(blocks, slots)
        self._storing.update(dict.fromkeys(blocks, copy))
        self._being_written.update(dict.fromkeys(slots, copy))
        self._stores.append((copy, blocks, slots))
        self.num_stored += len(blocks)

    def _on_reuse(self, block: int) -> None:
        """A registered block is about to be reused."""
        copy = self._storing.get(block)
        if copy is not None and not copy.is_read():
            self._overtaken.append(copy)

    # Steps

    def before_launch(self) -> None:
        """A step is about to be launched, which may write into blocks taken since the last one."""
        if self._overtaken:
            self._copies.before_launch(_once(self._overtaken))
            self._overtaken.clear()

    def after_launch(self) -> None:
        self._copies.after_launch(self.pool.count_launch())

    def close(self) -> None:
        self._copies.close()

    def check_integrity(self) -> None:
        """Check the slots, and that what is on its way is accounted for.

        Raises:
            BlockStateError: something does not fit.
        """
        self.slots.check_integrity()
        items = [item for _, group in self._loads for item in group]
        if {item.block for item in items} != self.pool.loading or (
            {item.digest for item in items} != self._loading
        ):
            raise BlockStateError("host tier", "what is on its way in is miscounted")


def _held_alone(tables: Iterable[Sequence[int]], pool: BlockPool) -> Iterator[int]:
    """Blocks that would be evictable if their contexts lost their KV, leaves first."""
    for table in tables:
        for block in reversed(table):
            if pool.references(block) == 1:
                yield block


def _once(copies: Iterable[Copy]) -> list[Copy]:
    return list({id(copy): copy for copy in copies}.values())


def _forget(last: dict[int, Copy], numbers: Iterable[int], copy: Copy) -> None:
    for number in numbers:
        if last.get(number) is copy:
            del last[number]
