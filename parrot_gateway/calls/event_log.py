"""The events of one stream, kept for readers that come, leave and come back."""

from __future__ import annotations

import asyncio

from parrot_gateway.exceptions import EventsGoneError

#: Bytes that a reader gets at once.
_READ_BYTES = 256 * 1024


class EventLog:
    """The events of one stream, in order; any number of readers follow it.

    Args:
        max_bytes: beyond it, events that some reader has had make room, oldest first. The writer
            waits while half of it is unread. None: all events are kept, and the writer never waits.
    """

    __slots__ = ("_changed", "_events", "_max_bytes", "_read", "_unread_bytes", "first",
                 "is_closed", "size_bytes")  # fmt: skip

    def __init__(self, max_bytes: int | None = None) -> None:
        self._max_bytes = max_bytes
        self._events: list[bytes] = []
        #: Number of the oldest event that is kept; the first one of all is 0.
        self.first = 0
        #: All events before this number were read by some reader.
        self._read = 0
        self._unread_bytes = 0
        self.size_bytes = 0
        #: There will be no more.
        self.is_closed = False
        self._changed = asyncio.Event()

    @property
    def end(self) -> int:
        """The number that the next event will have."""
        return self.first + len(self._events)

    def append(self, event: bytes) -> None:
        self._events.append(event)
        self.size_bytes += len(event)
        self._unread_bytes += len(event)
        self._notify()

    def close(self) -> None:
        self.is_closed = True
        self._notify()

    def limit(self, max_bytes: int) -> None:
        """Keep no more than this from now on."""
        self._max_bytes = max_bytes
        self._drop_read()
        self._notify()

    def read(self, position: int) -> tuple[bytes, int]:
        """The events from number `position` on, at most some hundred KiB of them, and the number
        behind them.

        Raises:
            EventsGoneError: that event is no longer kept.
        """
        if position < self.first:
            raise EventsGoneError(self.first)
        end, size = position, 0
        while end < self.end and size < _READ_BYTES:
            size += len(self._events[end - self.first])
            end += 1
        return b"".join(self._events[position - self.first : end - self.first]), end

    def note_read(self, position: int) -> None:
        """A reader has got all events before number `position`."""
        if self._max_bytes is None or position <= self._read:
            return
        new = self._events[self._read - self.first : position - self.first]
        self._unread_bytes -= sum(len(event) for event in new)
        self._read = position
        self._drop_read()
        self._notify()

    def _drop_read(self) -> None:
        if self._max_bytes is None:
            return
        dropped = 0
        while self.size_bytes > self._max_bytes and self.first + dropped < self._read:
            self.size_bytes -= len(self._events[dropped])
            dropped += 1
        if dropped:
            del self._events[:dropped]
            self.first += dropped

    async def wait(self, position: int) -> None:
        """Until there are more than `position` events, or will be no more."""
        while self.end <= position and not self.is_closed:
            await self._changed.wait()

    async def wait_for_room(self) -> None:
        """Until readers have had so much that more may be written."""
        while self._max_bytes is not None and 2 * self._unread_bytes > self._max_bytes:
            if self.is_closed:
                return
            await self._changed.wait()

    async def wait_closed(self) -> None:
        """Until there will be no more events."""
        while not self.is_closed:
            await self._changed.wait()

    def _notify(self) -> None:
        # NOTE: who waits is woken although the next wait begins anew.
        self._changed.set()
        self._changed = asyncio.Event()
