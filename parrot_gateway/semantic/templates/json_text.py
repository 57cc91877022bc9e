"""JSON documents inside a text, such as tool arguments, and their string literals.

A document is an object or array that parses; everything else is prose.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

#: Maximum characters of a document in a text.
MAX_DOCUMENT = 1 << 20
#: Characters parsed per character of text, failed attempts included; the rest counts as prose.
WORK_FACTOR = 8
_WORK_FLOOR = 4096
#: Fixed cost of an attempt, in characters.
_ATTEMPT = 256
_STRIDE = 1 << 14

# Matches only possible beginnings of an object or array; most brackets of prose and code fail.
_BEGINNING = re.compile(r'\{[ \t\r\n]*+["}]|\[[ \t\r\n]*+[]["{0-9tfn-]')
# A string literal; a truncated one runs to the end of the text.
_LITERAL = re.compile(r'"([^"\\]*+(?:\\.[^"\\]*+)*+)(?:"|\\?\Z)', re.DOTALL)
# Numbers are not converted, because that would be quadratic in their digits.
_PARSER = json.JSONDecoder(parse_int=len, parse_float=len)


class Span(NamedTuple):
    """`text[start:end]`."""

    start: int
    end: int


class Documents(NamedTuple):
    """The result of `find_documents`."""

    spans: list[Span]
    #: Characters parsed, failed attempts included.
    work: int


def find_documents(text: str, until: int | None = None) -> Documents:
    """Return the outermost JSON objects and arrays that begin before `until`, in order; linear."""
    limit = len(text) if until is None else until
    budget = WORK_FACTOR * len(text) + _WORK_FLOOR
    spans: list[Span] = []
    work = 0
    # NOTE: a parser error counts the lines before it, so failed attempts far into a long text would
    # be quadratic. Hence a moving window.
    base, window = 0, text[:MAX_DOCUMENT]
    match = _BEGINNING.search(text, 0, limit)
    while match is not None and work < budget:
        start = match.start()
        if start - base > _STRIDE:
            base, window = start, text[start : start + MAX_DOCUMENT]
        next_start = start + 1
        work += _ATTEMPT
        try:
            _, end = _PARSER.raw_decode(window, start - base)
        except json.JSONDecodeError as error:
            unterminated = error.msg.startswith("Unterminated")
            work += (len(window) if unterminated else error.pos + 1) - (start - base)
        except RecursionError:
            break
        else:
            next_start = base + end
            work += next_start - start
            spans.append(Span(start, next_start))
        match = _BEGINNING.search(text, next_start, limit)
    return Documents(spans, work)


def find_literals(text: str, document: Span, marks: Sequence[int]) -> Iterator[Span]:
    """Yield the insides of string literals, keys included, that contain a mark; linear.

    The document need not be valid.

    Args:
        marks: positions in the document, in order.
    """
    number = 0
    for match in _LITERAL.finditer(text, document.start, document.end):
        start, end = match.span(1)
        while number < len(marks) and marks[number] < start:
            number += 1
        if number == len(marks):
            return
        if marks[number] < end:
            yield Span(start, end)


def decode_literal(text: str, literal: Span) -> str | None:
    """Return the value of a literal; None if it is not valid."""
    try:
        decoded: Any = json.loads(f'"{text[literal.start : literal.end]}"')
    except ValueError:
        return None
    return decoded if isinstance(decoded, str) else None


def well_formed(text: str) -> str:
    """Replace every lone surrogate by U+FFFD."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def escape_json(text: str, times: int = 1) -> str:
    """Escape a well-formed text for the inside of a JSON string, `times` levels deep."""
    for _ in range(times):
        text = msgspec.json.encode(text)[1:-1].decode()
    return text
