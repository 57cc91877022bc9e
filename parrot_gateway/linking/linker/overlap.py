"""Byte ranges that a text and an output share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from parrot_gateway.linking.linker.fingerprints import RUN, WINDOW

#: Shared ranges at most this far apart, and about equally far in text and answer, form one passage.
_GAP = 160


class Span(NamedTuple):
    """A shared range in normalised bytes, with its position in the text and in the output."""

    start: int
    end: int
    source_start: int


def shared_spans(content: bytes, source: bytes, places: Iterable[int]) -> list[Span]:
    """Return the ranges that a text and an output share, around runs that they probably share.

    Args:
        content: the normalised text.
        source: the normalised output.
        places: starts of those runs in the text, ascending.
    """
    spans: list[Span] = []
    end = 0
    for place in places:
        if place < end:
            continue
        found = source.find(content[place : place + RUN])
        if found < 0:
            continue
        before = _common_suffix(content[end:place], source[:found])
        after = _common_prefix(content[place:], source[found:])
        start, end = place - before, place + after
        spans.append(Span(start, end, found - before))
    return spans


def passages_of(spans: Iterable[Span]) -> list[list[Span]]:
    """Group ranges that follow each other in text and output, with small gaps."""
    passages: list[list[Span]] = []
    for span in spans:
        if passages:
            before = passages[-1][-1]
            gap = span.start - before.end
            gap_in_source = span.source_start - before.source_start - before.end + before.start
            if (
                gap <= _GAP
                and 0 <= gap_in_source <= _GAP
                and abs(gap - gap_in_source) <= WINDOW + max(gap, gap_in_source) // 4
            ):
                passages[-1].append(span)
                continue
        passages.append([span])
    return passages


def size_in_text(spans: Iterable[Span]) -> int:
    """Return the normalised bytes of a text that ranges cover."""
    return sum(span.end - span.start for span in spans)


def size_in_source(spans: Sequence[Span]) -> int:
    """Return the normalised bytes of an output that ranges cover, overlaps counted once."""
    size = end = 0
    for start, length in sorted((span.source_start, span.end - span.start) for span in spans):
        size += max(0, start + length - max(start, end))
        end = max(end, start + length)
    return size


def _common_prefix(first: bytes, second: bytes) -> int:
    return _equal(min(len(first), len(second)), lambda n: first[:n] == second[:n])


def _common_suffix(first: bytes, second: bytes) -> int:
    size = min(len(first), len(second))
    return _equal(size, lambda n: first[len(first) - n :] == second[len(second) - n :])


def _equal(size: int, is_equal: Callable[[int], bool]) -> int:
    """Return the largest n up to `size` with `is_equal(n)`, which is monotonic."""
    if is_equal(size):
        return size
    low, high = 0, min(size, 64)
    while high < size and is_equal(high):
        low, high = high, min(size, high * 4)
    while high - low > 1:
        middle = (low + high) // 2
        if is_equal(middle):
            low = middle
        else:
            high = middle
    return low
