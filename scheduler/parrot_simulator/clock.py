"""The virtual clock: a heap of things to happen, first in time first out, ties in order of entry.

Entries are plain tuples, because a simulation makes millions of them.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, TypeAlias

#: Time, order of entry, what happens, to whom, and with what.
Due: TypeAlias = tuple[float, int, Callable[[Any, Any], None], Any, Any]


class Clock:
    """Virtual time in seconds. It only moves forward, to the next thing that is due."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[Due] = []
        self._sequence = 0

    def at(
        self,
        time: float,
        action: Callable[[Any, Any], None],
        subject: Any = None,
        argument: Any = None,
    ) -> None:
        """Call `action(subject, argument)` at a time; one that has passed already means now."""
        self._sequence += 1
        if time < self.now:
            time = self.now
        heappush(self._heap, (time, self._sequence, action, subject, argument))

    def next_time(self) -> float | None:
        """When the next thing is due; None: nothing is."""
        return self._heap[0][0] if self._heap else None

    def advance(self) -> float | None:
        """Move on to the next thing that is due, and let it happen.

        Returns:
            when the next thing is due then, as `next_time`.

        Raises:
            IndexError: nothing is due.
        """
        heap = self._heap
        self.now, _, action, subject, argument = heappop(heap)
        action(subject, argument)
        return heap[0][0] if heap else None
