"""Heaps whose items can change their key or leave, in amortised O(log n)."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")

#: A heap is rebuilt once more than this many entries, and more than half of all, are stale.
_FEW = 64


class LazyHeap(Generic[Item]):
    """Items ordered by key, smallest first; equal keys in insertion order.

    Items are compared by hash and equality. A removed or changed item leaves a stale entry without
    its item. The entry disappears when it reaches the top, or when most of the heap is stale.
    """

    __slots__ = ("_count", "_heap", "_live")

    def __init__(self) -> None:
        # Entries are [key, count, item]; a stale entry has item None.
        self._heap: list[list[Any]] = []
        self._live: dict[Item, list[Any]] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, item: object) -> bool:
        return item in self._live

    def __iter__(self) -> Iterator[Item]:
        """Iterate over the items in the order of arrival."""
        return iter(self._live)

    def push(self, item: Item, key: Any) -> None:
        """Add an item, or change its key."""
        live = self._live
        known = live.get(item)
        if known is not None:
            if known[0] == key:
                return
            known[2] = None
        self._count += 1
        node = [key, self._count, item]
        live[item] = node
        heap = self._heap
        heapq.heappush(heap, node)
        if len(heap) > 2 * len(live) + _FEW:
            self._heap = list(live.values())
            heapq.heapify(self._heap)

    def remove(self, item: Item) -> bool:
        """Remove an item; return true if it was there."""
        known = self._live.pop(item, None)
        if known is None:
            return False
        known[2] = None
        return True

    def first(self) -> Item | None:
        """Return the item with the smallest key without removing it; None if the heap is empty."""
        heap = self._heap
        while heap:
            item: Item | None = heap[0][2]
            if item is not None:
                return item
            heapq.heappop(heap)
        return None

    def first_key(self) -> Any:
        """Return the smallest key; None if the heap is empty."""
        return None if self.first() is None else self._heap[0][0]


class HeapItem:
    """An item of an `ItemHeap`; it belongs to at most one heap."""

    __slots__ = ("place",)

    def __init__(self) -> None:
        #: Its heap entry (key, count, itself); None while it is in no heap.
        self.place: tuple[Any, ...] | None = None


Placed = TypeVar("Placed", bound=HeapItem)


class ItemHeap(HeapItem, Generic[Placed]):
    """A `LazyHeap` of items that know their own entry, so nothing is looked up. Keys are tuples.

    A heap may itself be an item of another heap.
    """

    __slots__ = ("_count", "_heap", "_size")

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[tuple[Any, ...]] = []
        self._size = 0
        self._count = 0

    def __len__(self) -> int:
        return self._size

    def push(self, item: Placed, key: tuple[float, ...]) -> None:
        """Add an item, or change its key."""
        known = item.place
        if known is None:
            self._size += 1
        elif known[:-2] == key:
            return
        self._count += 1
        item.place = place = (*key, self._count, item)
        heap = self._heap
        heapq.heappush(heap, place)
        if len(heap) > 2 * self._size + _FEW:
            self._heap = [each for each in heap if each[-1].place is each]
            heapq.heapify(self._heap)

    def remove(self, item: Placed) -> None:
        """Remove an item that is in this heap."""
        item.place = None
        self._size -= 1

    def first(self) -> Placed | None:
        """Return the item with the smallest key without removing it; None if the heap is empty."""
        heap = self._heap
        while heap:
            place = heap[0]
            item: Placed = place[-1]
            if item.place is place:
                return item
            heapq.heappop(heap)
        return None
