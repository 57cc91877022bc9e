"""References: the opaque strings `[[parrot:<id><checksum>]]` that stand for variables in text.

Makes ids, and writes and finds references, without knowing variables. Text without the exact form
or the right checksum is ordinary text.
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
from typing import NamedTuple

OPENING = "[[parrot:"
CLOSING = "]]"
#: Characters of a variable id, and of its checksum.
ID_LENGTH = 27
CHECKSUM_LENGTH = 4

_VARIABLE_ID = re.compile(r"v[a-z2-7]{26}")
_CHECKED_ID = re.compile(r"(v[a-z2-7]{26})([a-z2-7]{4})")
_BRACKETS_OPEN = re.compile(r"(?:\[|\\u005[bB]){2}\Z")
_BRACKETS_CLOSE = re.compile(r"(?:\]|\\u005[dD]){2}")
#: Two opening brackets, both written as JSON escapes.
_LONGEST_OPENING = 12
_WORD = "parrot:"
# NOTE: begins with a literal, because such an expression is found seven times faster. The search
# holds the interpreter's lock, so a thread would not help with large bodies.
_MAY_BE = r"parrot:(?:(?<=\[parrot:)|(?<=u005[bB]parrot:))"
_IN_TEXT = re.compile(_MAY_BE)
_IN_BYTES = re.compile(_MAY_BE.encode())


class Found(NamedTuple):
    """A reference in a text: `text[start:end]`."""

    start: int
    end: int
    variable_id: str


def mint_variable_id() -> str:
    """Make a new id: `v` and 26 letters or digits with 128 random bits."""
    return "v" + base64.b32encode(secrets.token_bytes(16)).decode().rstrip("=").lower()


def is_variable_id(text: str) -> bool:
    return _VARIABLE_ID.fullmatch(text) is not None


def _checksum(variable_id: str) -> str:
    digest = hashlib.blake2b(variable_id.encode(), digest_size=5, person=b"parrot ref").digest()
    return base64.b32encode(digest).decode()[:CHECKSUM_LENGTH].lower()


def reference_of(variable_id: str) -> str:
    """Return the reference to a variable.

    Raises:
        ValueError: the id does not have the form of `mint_variable_id`.
    """
    if not is_variable_id(variable_id):
        raise ValueError(f"{variable_id!r} is not a variable id")
    return f"{OPENING}{variable_id}{_checksum(variable_id)}{CLOSING}"


def has_reference(data: bytes | str) -> bool:
    """Return true if the data may contain a reference, even with escaped brackets.

    One pass in C, no false negatives.
    """
    found = _IN_TEXT.search(data) if isinstance(data, str) else _IN_BYTES.search(data)
    return found is not None


def _checked(text: str, position: int) -> str | None:
    """Return the id at `position` if its checksum is right."""
    match = _CHECKED_ID.match(text, position)
    if match is None or _checksum(match[1]) != match[2]:
        return None
    return match[1]


def variable_id_of(text: str) -> str | None:
    """Return the id of a whole reference, with or without brackets; None for other text."""
    plain = text.strip()
    if plain.startswith(OPENING) and plain.endswith(CLOSING):
        plain = plain[len(OPENING) : -len(CLOSING)]
    plain = plain.removeprefix(_WORD)
    return _checked(plain, 0) if len(plain) == ID_LENGTH + CHECKSUM_LENGTH else None


def find_references(text: str) -> list[Found]:
    """Return all well-formed references with a valid checksum, in order; linear in the text."""
    found: list[Found] = []
    position = text.find(OPENING)
    while position >= 0:
        end = position + len(OPENING)
        closing = end + ID_LENGTH + CHECKSUM_LENGTH
        variable_id = _checked(text, end) if text.startswith(CLOSING, closing) else None
        if variable_id is not None:
            end = closing + len(CLOSING)
            found.append(Found(position, end, variable_id))
        position = text.find(OPENING, end)
    return found


def find_escaped_references(text: str, start: int, end: int) -> list[Found]:
    r"""Return the references in `text[start:end]`, the inside of a JSON string literal.

    The brackets may be literal or written as `\u005b` and `\u005d`.
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
    """Return true if an odd number of backslashes precedes `position`, counted back to `floor`."""
    before = position
    while before > floor and text[before - 1] == "\\":
        before -= 1
    return (position - before) % 2 == 1
