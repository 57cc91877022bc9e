"""Numbers the events of a stream by `id:` lines.

Pure: bytes in, events out. Comments are dropped: they tell that a connection lives, which is for
whoever writes to that connection to say.
"""

from __future__ import annotations

import re

#: The end of an event's last line, and the blank line behind it.
_END = re.compile(rb"\n\r?\n|\r\r")
_LINES = re.compile(rb"[\r\n]+")

#: An event longer than this is passed on in pieces, of which the last has the number.
MAX_HELD_BYTES = 1024 * 1024


class EventNumberer:
    """Takes the bytes of one stream as they come."""

    __slots__ = ("_count", "_held", "_mid_event")

    def __init__(self) -> None:
        self._held = b""
        self._count = 0
        self._mid_event = False

    def feed(self, data: bytes) -> list[bytes]:
        """The events that end in `data`, each with its number as its last line: 1, 2, 3, …

        NOTE: as the last line it wins over an id that the event has already, and a client that
        reads lines knows the number only once it has the event.
        """
        data = self._held + data
        events: list[bytes] = []
        start = 0
        for end in _END.finditer(data):
            block = data[start : end.start() + 1]
            start = end.end()
            if self._mid_event or not _is_comment(block):
                self._mid_event = False
                events.append(b"%bid: %d\n%b" % (block, self._next(), end[0][1:]))
        self._held = data[start:]
        if len(self._held) > MAX_HELD_BYTES:
            self._mid_event = True
            events.append(self.rest())
        return events

    def rest(self) -> bytes:
        """The beginning of an event that did not end."""
        rest, self._held = self._held, b""
        if rest:
            self._next()
        return rest

    def _next(self) -> int:
        self._count += 1
        return self._count


def _is_comment(block: bytes) -> bool:
    if block[:1] not in (b":", b"\n", b"\r"):
        return False
    return all(not line or line.startswith(b":") for line in _LINES.split(block))
