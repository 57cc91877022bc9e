"""Streams with `id:` lines as a client reads them: whole events, and the number of the last."""

from __future__ import annotations

import re
from itertools import pairwise

_END = re.compile(rb"\r\n\r\n|\n\n|\r\r|\n\r\n")
_ID = re.compile(rb"(?:\A|[\r\n])id: ?(\d+)[\r\n]+\Z")


def whole_events(raw: bytes) -> bytes:
    """Everything up to the end of the last event that came whole."""
    ends = [found.end() for found in _END.finditer(raw)]
    return raw[: ends[-1]] if ends else b""


def events_of(raw: bytes) -> list[bytes]:
    """The events, as they are; all are whole."""
    assert whole_events(raw) == raw
    ends = [0, *(found.end() for found in _END.finditer(raw))]
    return [raw[start:end] for start, end in pairwise(ends)]


def last_id(raw: bytes) -> int:
    """The number of the last event that came whole; 0 without one."""
    events = events_of(whole_events(raw))
    if not events:
        return 0
    found = _ID.search(events[-1])
    assert found is not None, events[-1]
    return int(found[1])


def without_numbers(raw: bytes) -> bytes:
    """The stream as it is without `X-Parrot-Resume`; checks that numbers have no gap."""
    bare = []
    for number, event in enumerate(events_of(raw), 1):
        line = b"id: %d\n" % number
        assert event.endswith((line + b"\n", line + b"\r\n", line + b"\r")), (number, event)
        start = event.rindex(line)
        bare.append(event[:start] + event[start + len(line) :])
    return b"".join(bare)
