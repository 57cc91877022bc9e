"""A bound on what is in flight, with a bounded line of those who wait: first come, first served.

Unlike `asyncio.Semaphore` it refuses when the line is full, gives up after a time, and costs no
turn of the event loop when there is room.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress


class QueueFullError(Exception):
    """The line is full."""


class Slots:
    """Slots for `limit` holders and room for `max_waiting` more in line.

    The limit may be changed; a lower one holds for those who come later.
    """

    __slots__ = ("_line", "_max_waiting", "held", "limit")

    def __init__(self, limit: int, max_waiting: int) -> None:
        self.limit = limit
        self._max_waiting = max_waiting
        self._line: deque[asyncio.Future[None]] = deque()
        #: Slots taken now.
        self.held = 0

    @property
    def waiting(self) -> int:
        return len(self._line)

    def acquire_nowait(self) -> bool:
        """Take a slot if one is free and nobody waits for it."""
        if self.held < self.limit and not self._line:
            self.held += 1
            return True
        return False

    async def acquire(self, timeout_s: float | None) -> None:
        """Take a slot, waiting up to `timeout_s`, if given. A cancelled wait leaves the line.

        Raises:
            QueueFullError: `max_waiting` others wait already.
            TimeoutError: no slot became free in time.
        """
        if self.acquire_nowait():
            return
        if len(self._line) >= self._max_waiting:
            raise QueueFullError
        place = asyncio.get_running_loop().create_future()
        self._line.append(place)
        try:
            async with asyncio.timeout(timeout_s):
                await place
        except BaseException:
            if place.done() and not place.cancelled():
                # The slot was handed over in the same turn as the cancellation.
                self.release()
            else:
                with suppress(ValueError):  # `release` has skipped it already
                    self._line.remove(place)
            raise

    def release(self) -> None:
        """Give a slot back; the first in line gets it."""
        self.held -= 1
        while self._line and self.held < self.limit:
            place = self._line.popleft()
            if not place.done():
                self.held += 1
                place.set_result(None)
