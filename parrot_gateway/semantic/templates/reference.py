"""References: the opaque strings `[[parrot:<id><checksum>]]` that stand for variables in text.

Mints ids, writes references, finds and replaces them. Whether a variable exists, and whose it is,
is not decided here. What lacks the exact form or the right checksum is ordinary text.
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
from collections.abc import Iterator, Mapping
from typing import NamedTuple

OPENING = "[[parrot:"
CLOSING = "]]"
#: Characters of a variable id, and of the checksum behind it.
ID_LENGTH = 27
CHECKSUM_LENGTH = 4

_VARIABLE_ID = re.compile(r"v[a-z2-7]{26}")
_CHECKED_ID = re.compile(r"(v[a-z2-7]{26})([a-z2-7]{4})")
_BRACKETS_OPEN = re.compile(r"(?:\[|\\u005[bB]){2}\Z")
_BRACKETS_CLOSE = re.compile(r"(?:\]|\\u005[dD]){2}")
#: Two opening brackets, both written as JSON escapes.
_LONGEST_OPENING = 12
_WORD = "parrot:"
# NOTE: the word first, because an expression that begins with a literal is searched for seven times
# faster; with the lock on the interpreter held, so that no thread helps with large bodies.
_MAY_BE = r"parrot:(?:(?<=\[parrot:)|(?<=u005[bB]parrot:))"
_IN_TEXT = re.compile(_MAY_BE)
_IN_BYTES = re.compile(_MAY_BE.encode())


class Found(NamedTuple):
    """A reference in a text: `text[start:end]`."""

    start: int
    end: int
    variable_id: str


def mint_variable_id() -> str:
    """A new id: `v` and 26 letters or digits, of which 128 bits are random."""
    return "v" + base64.b32encode(secrets.token_bytes(16)).decode().rstrip("=").lower()


def is_variable_id(text: str) -> bool:
    """Whether it has the form of an id."""
    return _VARIABLE_ID.fullmatch(text) is not None


def _checksum(variable_id: str) -> str:
    digest = hashlib.blake2b(variable_id.encode(), digest_size=5, person=b"parrot ref").digest()
    return base64.b32encode(digest).decode()[:CHECKSUM_LENGTH].lower()


def reference_of(variable_id: str) -> str:
    """What a deferred call answers in place of its text.

    Raises:
        ValueError: it has not the form of `mint_variable_id`.
    """
    if not is_variable_id(variable_id):
        raise ValueError(f"{variable_id!r} is not a variable id")
    return f"{OPENING}{variable_id}{_checksum(variable_id)}{CLOSING}"


def has_reference(data: bytes | str) -> bool:
    """Whether it may hold a reference: one pass in C, no false negatives.

    Looks at a body as it came: brackets that a JSON encoder escaped count too.
    """
    if isinstance(data, str):
        return _IN_TEXT.search(data) is not None
    return _IN_BYTES.search(data) is not None


def _checked(text: str, position: int) -> str | None:
    """The id at `position`, when its checksum is right."""
    match = _CHECKED_ID.match(text, position)
    if match is None or _checksum(match[1]) != match[2]:
        return None
    return match[1]


def _iterate(text: str) -> Iterator[Found]:
    position = text.find(OPENING)
    while position >= 0:
        id_end = position + len(OPENING) + ID_LENGTH + CHECKSUM_LENGTH
        variable_id = None
        if text.startswith(CLOSING, id_end):
            variable_id = _checked(text, position + len(OPENING))
        end = position + len(OPENING)
        if variable_id is not None:
            end = id_end + len(CLOSING)
            yield Found(position, end, variable_id)
        position = text.find(OPENING, end)


def find_references(text: str) -> list[Found]:
    """All well-formed references with a good checksum, in order; linear in the text."""
    return list(_iterate(text))


def find_escaped_references(text: str, start: int, end: int) -> list[Found]:
    r"""References within `text[start:end]`, the inside of a JSON string literal.

    There the brackets may be written as themselves or as `\u005b` and `\u005d`.
    """
    found: list[Found] = []
    floor = start
    word = text.find(_WORD, start, end)
    while word >= 0:
        after = word + len(_WORD)
        opening = _BRACKETS_OPEN.search(text[max(floor, word - _LONGEST_OPENING) : word])
        closing = _BRACKETS_CLOSE.match(text, after + ID_LENGTH + CHECKSUM_LENGTH, end)
        if opening is not None and closing is not None:
            first = word - len(opening[0])
            variable_id = _checked(text, after)
            if variable_id is not None and not _is_escaped(text, first, floor):
                found.append(Found(first, closing.end(), variable_id))
                floor = after = closing.end()
        word = text.find(_WORD, after, end)
    return found


def _is_escaped(text: str, position: int, floor: int) -> bool:
    """Whether an odd number of backslashes stands before `position`, counted back to `floor`."""
    before = position
    while before > floor and text[before - 1] == "\\":
        before -= 1
    return (position - before) % 2 == 1


def replace_references(text: str, values: Mapping[str, str]) -> str:
    """The text with the values, by variable id, in place of their references.

    References to variables without a value stay. Values are not scanned.
    """
    pieces: list[str] = []
    position = 0
    for start, end, variable_id in _iterate(text):
        value = values.get(variable_id)
        if value is not None:
            pieces += (text[position:start], value)
            position = end
    pieces.append(text[position:])
    return "".join(pieces)
