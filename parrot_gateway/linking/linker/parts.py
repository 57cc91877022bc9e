"""Finds short self-contained parts of a text: a JSON string, a list item, text after a label or
between tags.

A sign and its two neighbours decide where a part begins and ends. Each byte has eight flags, one
per rule, in each of three roles: before a sign, as the sign, and behind it. A rule applies where
all three bytes have its flag.
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int64]

#: Minimum and maximum normalised bytes of a part.
LEAST_PART, MOST_PART = 20, 160
#: Maximum parts examined: half of them from the beginning, half from the end.
_MAX_PARTS = 256

_ALL = bytes(range(256))
#: Letters, digits and non-ASCII bytes.
WORDS = bytes(byte for byte in _ALL if byte >= 0x80 or chr(byte).isalnum())
_DIGITS, _QUOTES, _LINES = b"0123456789", b"\"'", b"\n\r"
_EDGES = _LINES + b"\t<>[]{}|`\\"
_OPENERS = b"=[{(:"
#: A text without any of these has no parts except itself.
_STRUCTURE = re.compile(rb"""[<>\[\]{}|`\\\n\r\t":]|\d[.)] |'[,\]})/>;]|[=({,] ?'""")
_SPACE, _COMMA, _DOUBLE = b' ,"'

# Lines, tags, cells, brackets and escapes end a part, and mostly begin one. Quotes do so next to
# signs of JSON or code. Labels begin one.
_EDGE, _TAG, _BULLET, _OPENS, _CLOSES, _NUMBER, _LABEL, _GAP = (1 << bit for bit in range(8))
#: For each rule: bytes before the sign, the sign, and bytes behind it.
_RULES = {
    _EDGE: (_ALL, _EDGES, _ALL),
    _TAG: (_ALL, bytes(set(_EDGES) - set(_LINES)), _ALL),
    _BULLET: (_ALL, _LINES, b"-*+\xe2"),
    _OPENS: (b"=[{(,:\n", _QUOTES, _ALL),
    _CLOSES: (_ALL, _QUOTES, b",:]})/>;\n"),
    _NUMBER: (_DIGITS, b":.)", b" "),
    _LABEL: (bytes(set(_ALL) - set(_DIGITS)), b":", WORDS + b" "),
    # The sign is the space before a quote.
    _GAP: (_OPENERS + b",", b" ", _QUOTES),
}
_BEFORE, _SIGN, _BEHIND = (
    bytes(sum(flag for flag, where in _RULES.items() if byte in where[place]) for byte in _ALL)
    for place in range(3)
)
_ENDING = _EDGE | _OPENS | _CLOSES
_STARTING = _ENDING | _NUMBER | _LABEL
#: Starting flags in an answer, where only lines that are items begin a part.
_STARTING_ANSWER = _TAG | _BULLET | _OPENS | _CLOSES | _NUMBER | _LABEL
_IS_WORD = np.array([byte in WORDS for byte in _ALL])
#: Up to this many signs, a loop is faster than array operations.
_FEW = 96


def find_parts(raw: bytes, kept: Positions, *, is_answer: bool) -> list[tuple[int, int]]:
    """Return the start and end of each part in the normalised text, ascending.

    Args:
        raw: the text.
        kept: positions of the bytes kept in the normalised text.
        is_answer: true for an answer: a line of prose is no part, as it may be a stock phrase.
    """
    if len(kept) < LEAST_PART:
        return []
    if _STRUCTURE.search(raw) is None:
        # The whole text is the only part; this is the case for most prose.
        return [(0, len(kept))] if len(kept) <= MOST_PART else []
    # Signs are indexed by position minus one, so that each has two neighbours.
    padded = b"\0\0" + raw + b"\0\0"
    size = len(raw) + 2
    flags = np.frombuffer(padded.translate(_BEFORE), np.uint8, size) & np.frombuffer(
        padded.translate(_SIGN), np.uint8, size, 1
    )
    flags &= np.frombuffer(padded.translate(_BEHIND), np.uint8, size, 2)
    signs = (flags != 0).nonzero()[0]
    starting = _STARTING_ANSWER if is_answer else _STARTING
    if len(signs) <= _FEW:
        rules = dict(zip(signs.tolist(), flags.take(signs).tolist(), strict=True))
        parts = _few_parts(padded, kept, rules, starting)
    else:
        parts = _many_parts(padded, kept, flags, starting)
    if len(parts) > _MAX_PARTS:
        del parts[_MAX_PARTS // 2 : -_MAX_PARTS // 2]
    return parts


def _few_parts(
    padded: bytes, kept: Positions, rules: dict[int, int], starting: int
) -> list[tuple[int, int]]:
    """Do the work of `find_parts` sign by sign.

    Args:
        rules: flags by sign, ascending.
        starting: flags that start a part.
    """
    for sign in [sign for sign, flags in rules.items() if flags >= _GAP]:
        if _is_value(padded[sign], padded[sign - 1]):
            rules[sign + 1] = rules.get(sign + 1, 0) | _OPENS
    for sign in [sign for sign, flags in rules.items() if flags & _OPENS]:
        if padded[sign + 1] == _DOUBLE:
            closing = padded.find(_DOUBLE, sign + 2) - 1
            if closing > 0:
                rules[closing] = rules.get(closing, 0) | _CLOSES
    signs = sorted(rules)
    places = kept.searchsorted(np.array(signs, np.int64) - 1).tolist()
    parts: list[tuple[int, int]] = []
    end = edge = len(kept)
    last = -1
    for sign, place in zip(reversed(signs), reversed(places), strict=True):
        flags = rules[sign]
        if place < edge:
            end = edge
        if flags & starting and place != last:
            last = place
            if LEAST_PART <= end - place <= MOST_PART:
                parts.append((place, end))
        if flags & _ENDING:
            edge = place
    end = edge or end
    if last != 0 and LEAST_PART <= end <= MOST_PART:
        parts.append((0, end))
    return parts[::-1]


def _is_value(before: int, second: int) -> bool:
    """Return true if a quote behind a space begins a value; in prose a word precedes the comma.

    Args:
        before: the byte before the space.
        second: the byte before that.
    """
    return before != _COMMA or second not in WORDS


def _many_parts(
    padded: bytes, kept: Positions, flags: NDArray[np.uint8], starting: int
) -> list[tuple[int, int]]:
    """Do the work of `find_parts` for all signs together.

    Args:
        flags: one per sign.
        starting: flags that start a part.
    """
    text = np.frombuffer(padded, np.uint8)
    gaps = (flags >= _GAP).nonzero()[0]
    is_value = text.take(gaps) != _COMMA
    is_value |= ~_IS_WORD.take(text.take(gaps - 1))
    flags[gaps[is_value] + 1] |= _OPENS
    double = (text[1:-1] == _DOUBLE).nonzero()[0]
    flags[double[1:]] |= (flags.take(double[:-1]) & _OPENS) * np.uint8(_CLOSES // _OPENS)
    # The text's bounds start and end a part.
    flags[0], flags[-1] = starting, _EDGE
    signs = (flags != 0).nonzero()[0]
    flags = flags.take(signs)
    places = kept.searchsorted(signs - 1)
    starts = places[flags & starting != 0]
    edges = places[flags & _ENDING != 0]
    ends = edges.take(edges.searchsorted(starts, side="right"), mode="clip")
    sizes = ends - starts
    is_part = (sizes >= LEAST_PART) & (sizes <= MOST_PART)
    # Keep one of several parts with the same start.
    is_part[:-1] &= starts[1:] != starts[:-1]
    return list(zip(starts[is_part].tolist(), ends[is_part].tolist(), strict=True))
