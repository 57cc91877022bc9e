"""The virtual clock: a heap of things to happen by their time, ties in order of entry."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any, TypeAlias

Happening: TypeAlias = Callable[[Any, Any], None]


class Clock:
    """Virtual time in seconds. It only moves forward, to the next thing that is due."""

    def __init__(self) -> None:
        self.now = 0.0
        #: Time, order of entry, what happens, to whom, and with what.
        self._heap: list[tuple[float, int, Happening, Any, Any]] = []
        self._numbers = count()

    def at(self, time: float, action: Happening, subject: Any = None, argument: Any = None) -> None:
        """Call `action(subject, argument)` at a time; one that has passed already means now."""
        due = max(time, self.now)
        heappush(self._heap, (due, next(self._numbers), action, subject, argument))

    def next_time(self) -> float | None:
        """The time of the next thing that is due; None: nothing is."""
        return self._heap[0][0] if self._heap else None

    def advance(self) -> float | None:
        """Move on to the next thing that is due, and let it happen.

        Returns:
            when the next thing is due then, as `next_time`.

        Raises:
            IndexError: nothing is due.
        """
        self.now, _, action, subject, argument = heappop(self._heap)
        action(subject, argument)
        return self.next_time()
