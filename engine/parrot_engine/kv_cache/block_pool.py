"""The pool of KV blocks: reference counts, prefix index, eviction.

Decides the use of each physical block, independent of contexts and tensors. A block is

- *free*: without an owner, its content meaningless;
- *used*: referenced by one or more block tables;
- *cached*: without a reference, but still holding a full block of tokens that its hash finds.
  Cached blocks are evicted first when a block is needed, the least recently released first, unless
  they were released with another `Retention`.

A full block is registered under the hash of its tokens and of everything before them. From then on
it is immutable, until it is evicted or its only owner withdraws it. Two blocks never have the same
hash.

With a host tier (`parrot_engine.kv_cache.host_tier`), blocks that it holds count as findable in
reports of index changes.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from parrot_engine.exceptions import BlockStateError
from parrot_engine.kv_cache.block_hash import short_hash
from parrot_engine.kv_cache.host_slots import HostSlots
from parrot_engine.protocol import BlockChanges, Retention

#: Changes remembered for the stories of blocks, over the whole pool.
STORY_LENGTH = 2048
#: Maximum share of blocks kept in preference to others; further ones replace the longest kept.
KEPT_SHARE = 0.5
#: Initial capacity of a table, in block ids.
_MIN_CAPACITY = 8


class BlockPool:
    """A fixed number of blocks, named 0 … num_blocks-1.

    Methods raise `BlockStateError`, with the block's story, on a transition that its state does not
    allow; that is a bug of the caller.
    """

    def __init__(
        self, num_blocks: int, *, host_slots: int = 0, on_reuse: Callable[[int], None] | None = None
    ) -> None:
        """Make a pool with no block in use.

        Args:
            num_blocks: total number.
            host_slots: slots of a host tier; 0 if there is none.
            on_reuse: called with a cached block before its content is discarded.
        """
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        #: Taken from the end, so initially the lowest ids first.
        self._free = list(range(num_blocks - 1, -1, -1))
        #: Blocks without a reference, least recently used first.
        self._cached: OrderedDict[int, None] = OrderedDict()
        #: Cached blocks that are evicted after all of those, each with the context that it is kept
        #: for.
        self._kept: OrderedDict[int, int] = OrderedDict()
        #: By context: the blocks kept for it in order of release, leaves first.
        self._kept_for: dict[int, dict[int, None]] = {}
        self._max_kept = int(num_blocks * KEPT_SHARE)
        #: True if a block ever had a second owner; then a single owner cannot drop it.
        self._was_shared = bytearray(num_blocks)
        #: True if a block was last released with `drop`.
        self._is_dropped = bytearray(num_blocks)
        #: Copies outside the pool.
        self.host = HostSlots(host_slots, self._lost_on_host) if host_slots else None
        self._on_reuse = on_reuse
        #: Blocks whose content is being loaded; each has one reference that belongs to no table.
        self.loading: set[int] = set()
        #: Steps launched so far (see `count_launch`), and their number at each block's release.
        self.num_launches = 0
        self._released_at = [0] * num_blocks
        #: Number of times that a block became available or was taken.
        self.num_changes = 0
        #: Index changes since the last report: registered (True) or gone.
        self._unreported: dict[bytes, bool] = {}
        self._log: deque[tuple[int, str]] = deque(maxlen=STORY_LENGTH)

    @property
    def num_free(self) -> int:
        """Return the number of blocks that `allocate` can give, cached ones included."""
        return len(self._free) + self.num_cached

    @property
    def num_cached(self) -> int:
        """Return the number of blocks without a reference that still hold a prefix."""
        return len(self._cached) + len(self._kept)

    @property
    def num_empty(self) -> int:
        """Return the number of blocks without a reference that hold nothing."""
        return len(self._free)

    def eviction_order(self) -> Iterator[int]:
        """Iterate over cached blocks, the first to be evicted first."""
        return chain(self._cached, self._kept)

    def digest(self, block: int) -> bytes | None:
        return self._hashes[block]

    def is_dropped(self, block: int) -> bool:
        """Return true if a cached block was released with `drop`."""
        return bool(self._is_dropped[block])

    def released_at(self, block: int) -> int:
        """Return the number of steps launched before a block's last release; no later step reads
        it.
        """
        return self._released_at[block]

    def count_launch(self) -> int:
        self.num_launches += 1
        return self.num_launches

    def references(self, block: int) -> int:
        return self._references[block]

    def is_private(self, block: int) -> bool:
        """Return true if the block may be written: one table holds it and it is not registered."""
        return self._references[block] == 1 and self._hashes[block] is None

    def find(self, digest: bytes) -> int | None:
        """Return the block registered under a hash, used or cached. `retain` it to use it."""
        return self._by_hash.get(digest)

    def allocate(self) -> int:
        """Return a block with one reference and no content; evicts the first cached one if needed.

        Raises:
            BlockStateError: no block is left; check `num_free` first.
        """
        if self._free:
            block = self._free.pop()
        elif self._cached or self._kept:
            block = next(iter(self._cached or self._kept))
            self._uncache(block)
            if self._on_reuse is not None:
                self._on_reuse(block)
            self._forget(block)
        else:
            raise BlockStateError("block pool", f"all {self.num_blocks} blocks are in use")
        self._references[block] = 1
        self._was_shared[block] = False
        self._is_dropped[block] = False
        self.num_changes += 1
        self._note(block, "allocated")
        return block

    def retain(self, block: int) -> None:
        if self._references[block] == 0:
            if block not in self._cached and block not in self._kept:
                raise self._illegal(block, "a free block cannot be retained")
            self._uncache(block)
            self._is_dropped[block] = False
            self.num_changes += 1
        self._references[block] += 1
        self._was_shared[block] = True
        self._note(block, "retained")

    def release(self, block: int, retention: Retention = "normal", context_id: int = 0) -> None:
        """Release a reference; a registered block without references becomes cached.

        Args:
            block: the block.
            retention: applies to the last reference. `drop` applies only to blocks that never had a
                second owner, because a shared beginning is not one owner's to drop.
            context_id: context that `keep` keeps it for; see `drop_kept`.
        """
        if self._references[block] == 0:
            raise self._illegal(block, "released more often than retained")
        self._references[block] -= 1
        self._note(block, "released")
        if self._references[block] == 0:
            self._released_at[block] = self.num_launches
            self.num_changes += 1
            if self._hashes[block] is None:
                self._free.append(block)
            else:
                self._cache(block, retention, context_id)

    def release_table(
        self, table: Iterable[int], retention: Retention = "normal", context_id: int = 0
    ) -> None:
        """Release the blocks of a context in an order that evicts leaves first."""
        blocks = list(table)
        # Dropped blocks go to the front one by one, so that the last one is evicted first.
        for block in blocks if retention == "drop" else reversed(blocks):
            self.release(block, retention, context_id)

    def drop_kept(self, context_id: int) -> None:
        """Stop keeping blocks for a context that was released with `keep`.

        Blocks that never had a second owner are evicted next, the others in turn.
        """
        blocks = list(self._kept_for.get(context_id, ()))
        for block in blocks:
            self._uncache(block)
            if self._was_shared[block]:
                self._cache(block, "normal")
        for block in reversed(blocks):
            if not self._was_shared[block]:
                self._cache(block, "drop")

    def register(self, block: int, digest: bytes) -> int:
        """Make a full block findable and immutable.

        Returns:
            The block to use from now on. If the same content was registered already, it is that
            block, which has been retained, and `block` has been released.
        """
        if self._references[block] == 0:
            raise self._illegal(block, "an unused block cannot be registered")
        if self._hashes[block] is not None:
            raise self._illegal(block, "registered twice")
        known = self._by_hash.get(digest)
        if known is not None:
            self.retain(known)
            self.release(block)
            return known
        self._hashes[block] = digest
        self._by_hash[digest] = block
        if self.host is None or digest not in self.host:
            self._report(digest, is_found=True)
        self._note(block, "registered")
        return block

    def withdraw(self, block: int) -> None:
        """Remove a used block from the index, to write into it again or because it is not trusted.

        A copy in the host tier goes with it.
        """
        if self._references[block] == 0:
            raise self._illegal(block, "an unused block cannot be withdrawn")
        digest = self._hashes[block]
        if digest is not None:
            if self.host is not None:
                self.host.forget(digest)
            self._forget(block)
            self._note(block, "withdrawn")

    def take_changes(self, *, everything: bool = False) -> BlockChanges:
        """Return the blocks that have become findable, and those no longer so, since the last call.

        Args:
            everything: true returns all findable blocks, for a new receiver.
        """
        unreported = self._unreported
        if everything:
            unreported = dict.fromkeys(chain(self._by_hash, self.host or ()), True)
        self._unreported = {}
        return BlockChanges(
            [short_hash(digest) for digest, stored in unreported.items() if stored],
            [short_hash(digest) for digest, stored in unreported.items() if not stored],
        )

    def _lost_on_host(self, digest: bytes) -> None:
        """Note that the host tier has dropped its copy of a block."""
        if digest not in self._by_hash:
            self._report(digest, is_found=False)

    def story(self, block: int) -> list[str]:
        """Return the remembered changes of a block, oldest first, and its state."""
        digest = self._hashes[block]
        state = f"references {self._references[block]}, hash {digest.hex()[:16] if digest else '-'}"
        return [*(what for who, what in self._log if who == block), state]

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Compare the pool with all the tables that hold references to it.

        Raises:
            BlockStateError: a leak, a double free, or an index that does not match.
        """
        expected = Counter(block for table in tables for block in table)
        expected.update(self.loading)
        for block, count in enumerate(self._references):
            if count != expected[block]:
                raise self._illegal(block, f"{count} references, but {expected[block]} holders")
        free, cached = set(self._free), {*self._cached, *self._kept}
        if len(cached) != self.num_cached or len(self._kept) > self._max_kept:
            raise BlockStateError("block pool", "a block is kept twice, or too many are")
        if {b: c for c, blocks in self._kept_for.items() for b in blocks} != self._kept:
            raise BlockStateError("block pool", "kept blocks do not match their contexts")
        used = {block for block, count in enumerate(self._references) if count}
        if len(free) != len(self._free) or free & cached or free & used or cached & used:
            raise BlockStateError("block pool", "a block is in two states")
        if len(free) + len(cached) + len(used) != self.num_blocks:
            raise BlockStateError("block pool", "free + cached + used is not the total")
        registered = {b: digest for b, digest in enumerate(self._hashes) if digest is not None}
        if {digest: block for block, digest in registered.items()} != self._by_hash:
            raise BlockStateError("block pool", "the index does not match the blocks")
        for block in free & registered.keys():
            raise self._illegal(block, "free, but registered")
        for block in cached - registered.keys():
            raise self._illegal(block, "cached, but not registered")

    def _cache(self, block: int, retention: Retention, context_id: int = 0) -> None:
        if retention == "keep" and self._max_kept:
            if len(self._kept) >= self._max_kept:
                oldest = next(iter(self._kept))
                self._uncache(oldest)
                self._cached[oldest] = None
            self._kept[block] = context_id
            self._kept_for.setdefault(context_id, {})[block] = None
            return
        self._cached[block] = None
        if retention == "drop" and not self._was_shared[block]:
            self._is_dropped[block] = True
            self._cached.move_to_end(block, last=False)

    def _uncache(self, block: int) -> None:
        self._cached.pop(block, None)
        context_id = self._kept.pop(block, None)
        if context_id is not None:
            blocks = self._kept_for[context_id]
            del blocks[block]
            if not blocks:
                del self._kept_for[context_id]

    def _forget(self, block: int) -> None:
        digest = self._hashes[block]
        if digest is not None:
            del self._by_hash[digest]
            self._hashes[block] = None
            if self.host is None or digest not in self.host:
                self._report(digest, is_found=False)

    def _report(self, digest: bytes, *, is_found: bool) -> None:
        """Note a change of the index; it cancels an opposite unreported one."""
        if self._unreported.pop(digest, None) is None:
            self._unreported[digest] = is_found

    def _note(self, block: int, what: str) -> None:
        self._log.append((block, what))

    def _illegal(self, block: int, problem: str) -> BlockStateError:
        return BlockStateError(f"block {block}", problem, self.story(block))


class BlockTable:
    """The block table of one context: block ids in order of their positions.

    It is a list to work with and an array to hand out. A step needs the tables of all its rows as
    int32 arrays; rebuilding them in every step, from lists of hundreds of blocks, would cost more
    than the rest of its planning.
    """

    __slots__ = ("_array", "_view", "ids")

    def __init__(self, ids: Iterable[int] = ()) -> None:
        #: The ids, read-only; changes go through the methods.
        self.ids = list(ids)
        self._array = np.empty(max(_MIN_CAPACITY, 2 * len(self.ids)), dtype=np.int32)
        self._array[: len(self.ids)] = self.ids
        #: The last view from `array`; None if the length has changed since.
        self._view: npt.NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def array(self) -> npt.NDArray[np.int32]:
        """Return the ids as a view, valid until the table changes."""
        view = self._view
        if view is None:
            view = self._view = self._array[: len(self.ids)]
        return view

    def append(self, block: int) -> None:
        """Append a block."""
        count = len(self.ids)
        if count == len(self._array):
            grown = np.empty(2 * count, dtype=np.int32)
            grown[:count] = self._array
            self._array = grown
        self._array[count] = block
        self.ids.append(block)
        self._view = None

    def replace(self, index: int, block: int) -> None:
        """Replace a block."""
        self.ids[index] = block
        self._array[index] = block

    def truncate(self, count: int) -> None:
        """Keep only the first `count` blocks."""
        del self.ids[count:]
        self._view = None
