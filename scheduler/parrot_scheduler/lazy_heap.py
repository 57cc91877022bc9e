"""A heap whose items can change their key or leave: O(log n) each, amortised."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")

#: A heap is rebuilt when more of it than this, and more than half of it, is out of date.
_FEW = 64


class LazyHeap(Generic[Item]):
    """Items by key, the smallest first; equal keys in the order in which they were given.

    Items are distinguished by hash and equality. What has left or changed stays in the heap until
    it comes up, or until most of the heap is such.
    """

    __slots__ = ("_count", "_heap", "_live")

    def __init__(self) -> None:
        self._heap: list[tuple[Any, int, Item]] = []
        self._live: dict[Item, tuple[Any, int, Item]] = {}
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
        known = self._live.get(item)
        if known is not None and known[0] == key:
            return
        self._count += 1
        node = (key, self._count, item)
        self._live[item] = node
        heapq.heappush(self._heap, node)
        if len(self._heap) > 2 * len(self._live) + _FEW:
            self._heap = list(self._live.values())
            heapq.heapify(self._heap)

    def remove(self, item: Item) -> bool:
        """Whether it was there."""
        return self._live.pop(item, None) is not None

    def first(self) -> Item | None:
        """The item with the smallest key, which stays; None when there is none."""
        heap = self._heap
        while heap:
            _, count, item = heap[0]
            # NOTE: compared by number: a compiled build copies tuples, they have no identity.
            live = self._live.get(item)
            if live is not None and live[1] == count:
                return item
            heapq.heappop(heap)
        return None

    def first_key(self) -> Any:
        """The smallest key; None when there is none."""
        return None if self.first() is None else self._heap[0][0]
