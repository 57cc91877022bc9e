"""The host tier: evicted blocks stay in host memory, and are loaded ahead of use.

It is a second pool of slots, each of a block's size, indexed by the same hashes. It is independent
of contexts: it adds to the prefix cache the blocks that the cache has lost.

*Stores.* Blocks are copied before eviction, not during it: the next candidates (cached blocks, and
blocks of idle contexts) are copied beside the steps until enough of them can be given away at once.
Blocks released with `drop` are not copied. A block may be taken and written while it is being
copied; later launches then wait until the copy has read it.

*Loads.* A context that could continue from blocks that only the host has does not get a row. The
blocks are loaded into free ones of the device and then registered in the prefix cache, where the
next plan finds them like any prefix. Meanwhile they belong to the tier, and all other contexts
continue. Copies stay in host memory until they are the oldest.

A run of blocks must be long enough to be worth loading: a copy starts late (a step passes without
the context) and then is faster than computing (`parrot_engine.kv_cache.host_rates`).
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

#: Maximum share of the device's blocks being loaded at once.
LOADING_SHARE = 0.25
#: The reserve is examined again after this many changes of the pool, as a share of its blocks.
_RECOUNT_SHARE = 1 / 8
#: Maximum blocks examined per block of the reserve.
_LOOKS = 4
#: Maximum remembered runs that were fetched in part.
_MAX_PARTLY_LOADED = 1024
#: Seconds that a step waits for a copy when there is nothing else to do, and between polls.
_WAIT_S = 0.002
_LOOK_S = 0.00005


class _BlockLoad(NamedTuple):
    digest: bytes
    slot: int
    block: int


class HostTier:
    """Copies of blocks in host memory, and their transfers. One thread drives it."""

    def __init__(
        self, num_blocks: int, copies: BlockCopies, *, reserve: int, least_blocks: int
    ) -> None:
        """Make the pool of the device's blocks with this tier behind it.

        Args:
            num_blocks: blocks of the device.
            copies: moves the content.
            reserve: blocks that should always be available without another copy.
            least_blocks: shorter runs of blocks are computed rather than loaded.
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
        #: Hashes being loaded, and those whose predecessors were fetched.
        self._loading: set[bytes] = set()
        self._partly_loaded: set[bytes] = set()
        self._loads: deque[tuple[Copy, list[_BlockLoad]]] = deque()
        #: Running copies to the host with blocks and slots, and the latest one of each block.
        self._stores: deque[tuple[Copy, list[int], list[int]]] = deque()
        self._storing: dict[int, Copy] = {}
        self._being_written: dict[int, Copy] = {}
        #: Copies that have not read all their blocks although some were taken since.
        self._overtaken: list[Copy] = []
        #: Number of pool changes after which the reserve is examined again.
        self._look_at = 0
        #: Blocks copied out and in so far.
        self.num_stored = 0
        self.num_loaded = 0

    @property
    def is_loading_any(self) -> bool:
        return bool(self._loads)

    @property
    def room(self) -> int:
        """Return the number of blocks that may be fetched now."""
        return max(0, self._max_loading - len(self._loading))

    def is_loading(self, digest: bytes) -> bool:
        return digest in self._loading

    def loadable(self, digests: Iterable[bytes]) -> list[bytes]:
        """Return the leading blocks that only the host has; empty if not worth loading.

        `digests` belong to consecutive blocks that a context would compute next.
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
        """Load blocks that the host has, as far as there is room.

        Args:
            digests: hashes of consecutive blocks.
            limit: free blocks of the device that may be taken.

        Returns:
            The number of blocks now being loaded.
        """
        count = min(len(digests), limit, self.room)
        if 0 < count < len(digests):
            # The rest follows when there is room for it, however short it is.
            if len(self._partly_loaded) >= _MAX_PARTLY_LOADED:
                self._partly_loaded.clear()
            self._partly_loaded.add(digests[count])
        for first in range(0, count, self._copies.chunk):
            self._load(digests[first : min(count, first + self._copies.chunk)])
        return count

    def _load(self, digests: Sequence[bytes]) -> None:
        # In order of slots, which are adjacent if they were written together.
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
        """Register loaded blocks, and finish completed stores."""
        while self._stores and self._stores[0][0].is_done():
            copy, blocks, slots = self._stores.popleft()
            _forget(self._storing, blocks, copy)
            _forget(self._being_written, slots, copy)
        loaded: list[_BlockLoad] = []
        while self._loads and self._loads[0][0].is_done():
            loaded += self._loads.popleft()[1]
        # From the end, so that leaves are evicted first.
        for digest, slot, block in reversed(loaded):
            self.slots.end_read(slot)
            self.pool.loading.remove(block)
            self._loading.remove(digest)
            # NOTE: a copy forgotten meanwhile may be untrustworthy.
            if self.slots.find(digest) == slot:
                block = self.pool.register(block, digest)
            self.pool.release(block)

    def wait(self) -> None:
        deadline = time.monotonic() + _WAIT_S
        while self._loads and not self._loads[0][0].is_done():
            if time.monotonic() > deadline:
                return
            time.sleep(_LOOK_S)

    def copy_ahead(self, idle: Iterable[Sequence[int]]) -> None:
        """Copy out blocks that are about to be given away and have no copy.

        Args:
            idle: block tables of idle contexts, the first to lose its KV first.
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
        """Return at most `room` blocks to copy, and true if the whole reserve then has copies."""
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
            # Marked as being read, so that the next one does not evict it.
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
        """Handle the reuse of a registered block."""
        copy = self._storing.get(block)
        if copy is not None and not copy.is_read():
            self._overtaken.append(copy)

    def before_launch(self) -> None:
        """Prepare for a launch, which may write into blocks taken since the last one."""
        if self._overtaken:
            self._copies.before_launch(_once(self._overtaken))
            self._overtaken.clear()

    def after_launch(self) -> None:
        self._copies.after_launch(self.pool.count_launch())

    def close(self) -> None:
        self._copies.close()

    def check_integrity(self) -> None:
        """Check the slots, and the accounting of transfers.

        Raises:
            BlockStateError: something is inconsistent.
        """
        self.slots.check_integrity()
        items = [item for _, group in self._loads for item in group]
        if {item.block for item in items} != self.pool.loading or (
            {item.digest for item in items} != self._loading
        ):
            raise BlockStateError("host tier", "what is on its way in is miscounted")


def _held_alone(tables: Iterable[Sequence[int]], pool: BlockPool) -> Iterator[int]:
    """Yield blocks that would be evictable if their contexts lost their KV, leaves first."""
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
