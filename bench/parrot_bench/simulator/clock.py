"""The virtual clock: a heap of things to happen, first in time first out, ties in order of entry.

Entries are plain tuples, because a simulation makes millions of them. What is due at once, as half
of them are, waits in a queue behind what the heap has for the same time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, TypeAlias

Happening: TypeAlias = Callable[[Any, Any], None]
#: Time, order of entry, what happens, to whom, and with what.
Due: TypeAlias = tuple[float, int, Happening, Any, Any]


class Clock:
    """Virtual time in seconds. It only moves forward, to the next thing that is due."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[Due] = []
        self._at_once: deque[tuple[Happening, Any, Any]] = deque()
        self._sequence = 0

    def at(self, time: float, action: Happening, subject: Any = None, argument: Any = None) -> None:
        """Call `action(subject, argument)` at a time; one that has passed already means now."""
        if time <= self.now:
            self._at_once.append((action, subject, argument))
            return
        self._sequence += 1
        heappush(self._heap, (time, self._sequence, action, subject, argument))

    def next_time(self) -> float | None:
        """When the next thing is due; None: nothing is."""
        if self._at_once:
            return self.now
        return self._heap[0][0] if self._heap else None

    def advance(self) -> float | None:
        """Move on to the next thing that is due, and let it happen.

        Returns:
            when the next thing is due then, as `next_time`.

        Raises:
            IndexError: nothing is due.
        """
        heap = self._heap
        if self._at_once and not (heap and heap[0][0] == self.now):
            action, subject, argument = self._at_once.popleft()
        else:
            self.now, _, action, subject, argument = heappop(heap)
        action(subject, argument)
        return self.next_time()
