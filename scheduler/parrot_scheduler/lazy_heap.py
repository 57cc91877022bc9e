"""Heaps whose items can change their key or leave: O(log n) each, amortised."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")

#: A heap is rebuilt when more of it than this, and more than half of it, is out of date.
_FEW = 64


class LazyHeap(Generic[Item]):
    """Items by key, the smallest first; equal keys in the order in which they were given.

    Items are distinguished by hash and equality. What has left or changed stays in the heap, but
    for its item, until it comes up, or until most of the heap is such.
    """

    __slots__ = ("_count", "_heap", "_live")

    def __init__(self) -> None:
        # Entries are [key, count, item]; the item of one that is out of date is None.
        self._heap: list[list[Any]] = []
        self._live: dict[Item, list[Any]] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, item: object) -> bool:
        return item in self._live

    def __iter__(self) -> Iterator[Item]:
        """Items in the order in which they came."""
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
        """Take an item out; return true if it was there."""
        known = self._live.pop(item, None)
        if known is None:
            return False
        known[2] = None
        return True

    def first(self) -> Item | None:
        """The item with the smallest key, which stays; None when there is none."""
        heap = self._heap
        while heap:
            item: Item | None = heap[0][2]
            if item is not None:
                return item
            heapq.heappop(heap)
        return None

    def first_key(self) -> Any:
        """The smallest key; None when there is none."""
        return None if self.first() is None else self._heap[0][0]


class HeapItem:
    """An item of an `ItemHeap`; it is in one at most."""

    __slots__ = ("place",)

    def __init__(self) -> None:
        #: Its key, a count and itself, as they are in the heap; None while it is in none.
        self.place: tuple[Any, ...] | None = None


Placed = TypeVar("Placed", bound=HeapItem)


class ItemHeap(HeapItem, Generic[Placed]):
    """A `LazyHeap` of items that know their own place: nothing is looked up. Keys are tuples.

    May itself be an item of another one.
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
        """It is here, and leaves."""
        item.place = None
        self._size -= 1

    def first(self) -> Placed | None:
        """The item with the smallest key, which stays; None when there is none."""
        heap = self._heap
        while heap:
            place = heap[0]
            item: Placed = place[-1]
            if item.place is place:
                return item
            heapq.heappop(heap)
        return None
