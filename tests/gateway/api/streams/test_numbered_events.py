"""Numbers of events: where they go, and what they leave alone."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parrot_gateway.api.streams.numbered_events import MAX_HELD_BYTES, EventNumberer


def numbered(*parts: bytes) -> list[bytes]:
    numberer = EventNumberer()
    events = [event for part in parts for event in numberer.feed(part)]
    rest = numberer.rest()
    return [*events, rest] if rest else events


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (b"data: x\n\n", b"data: x\nid: 1\n\n"),
        (b"data: x\r\n\r\n", b"data: x\r\nid: 1\n\r\n"),
        (b"data: x\r\r", b"data: x\rid: 1\n\r"),
        (b"data: x\n\r\n", b"data: x\nid: 1\n\r\n"),
        (b"event: a\ndata: x\ndata: y\n\n", b"event: a\ndata: x\ndata: y\nid: 1\n\n"),
        # The last one counts.
        (b"id: 77\ndata: x\n\n", b"id: 77\ndata: x\nid: 1\n\n"),
        (b": note\ndata: x\n\n", b": note\ndata: x\nid: 1\n\n"),
    ],
)
def test_the_number_is_the_last_line(event: bytes, expected: bytes) -> None:
    assert numbered(event) == [expected]


def test_comments_are_dropped() -> None:
    parts = (b": keep-alive\n\n", b"data: a\n\n: b\r\n\r\n:\n\n", b"\n\ndata: c\n\n")
    assert numbered(*parts) == [b"data: a\nid: 1\n\n", b"data: c\nid: 2\n\n"]


def test_an_event_that_did_not_end_has_no_number() -> None:
    assert numbered(b"data: a\n\ndata: b\n") == [b"data: a\nid: 1\n\n", b"data: b\n"]


def test_an_event_too_long_to_hold_is_numbered_by_its_last_piece() -> None:
    piece = b"data: " + b"x" * MAX_HELD_BYTES
    numberer = EventNumberer()
    assert numberer.feed(piece) == [piece]
    assert numberer.feed(b"yz\n") == []
    assert numberer.feed(b"\ndata: b\n\n") == [b"yz\nid: 2\n\n", b"data: b\nid: 3\n\n"]


EVENT = st.sampled_from(
    [b"data: a", b"event: x\ndata: b", b"data: c\r\ndata: d", b"id: 9\ndata: e", b": f\ndata: g"]
)
END = st.sampled_from([b"\n\n", b"\r\n\r\n", b"\r\r", b"\n\r\n"])


@given(st.lists(st.tuples(EVENT, END), max_size=8), st.lists(st.integers(0, 200), max_size=20))
def test_chunks_change_nothing(events: list[tuple[bytes, bytes]], cuts: list[int]) -> None:
    whole = b"".join(event + end for event, end in events)
    borders = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    parts = [whole[start:end] for start, end in pairwise(borders)]
    found = numbered(*parts)
    assert found == numbered(whole)
    assert len(found) == len(events)
    for number, event in enumerate(found, 1):
        assert event.count(b"id: %d\n" % number) == 1
    # Without the numbers it is what came in.
    numbers = [b"id: %d\n" % number for number in range(1, len(events) + 1)]
    bare = [
        event[::-1].replace(number[::-1], b"", 1)[::-1]
        for event, number in zip(found, numbers, strict=True)
    ]
    assert b"".join(bare) == whole
