"""Texts that leave the grammar of a JSON schema in the same state.

A mask of a string of limited length takes milliseconds, and thousands of texts want the same one:
where a schema says of its strings no more than their length, their characters make no difference,
nor does what a value that has ended was. `JsonState` follows one text, and names the states in
which all texts have the same continuations: with the same name comes the same mask.

Names are as exact as they are cautious: a schema with a keyword that is not listed here (patterns,
formats, alternatives that what was written before decides) has none, and of a string that may
become one of an `enum` all characters count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

#: Keywords that constrain nothing, and those that constrain a value as a whole.
_ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "readOnly"}
_ANNOTATIONS |= {"writeOnly", "$schema", "$comment"}
_BOUNDS = {"type", "required", "minItems", "maxItems", "minimum", "maximum"}
_BOUNDS |= {"exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_SCHEMA = {"additionalProperties", "items"}
_SCHEMAS = {"properties", "$defs", "definitions"}
_ALTERNATIVES = {"anyOf", "oneOf"}
_LOCAL = re.compile(r"#(/(\$defs|definitions)/[^/]+)?")
#: Bytes of all beginnings of all strings of enumerations.
_MAX_LITERALS = 1_000_000
#: Bytes of a name's keys and commas.
_MAX_PATH = 2048

#: What is open, characters of the open string, its spelling where it counts, what is not whole.
StateName = tuple[bytes, int, bytes | None, bytes]


class _Unnamed(Exception):
    """Texts of this schema have states without a name."""


class JsonStates(NamedTuple):
    """The facts that name the states of a schema's texts."""

    #: Contents of a string that may still become one of an enumeration.
    literal_starts: frozenset[bytes]
    #: No bound of a string's length is beyond this number of characters.
    longest: int

    @classmethod
    def of(cls, schema: str) -> JsonStates | None:
        """None where a state may depend on more than is kept, or where no string has a bound."""
        literals, bounds = set[bytes](), [0]
        try:
            _read(json.loads(schema), literals, bounds)
        except (_Unnamed, ValueError, TypeError, AttributeError, RecursionError):
            return None
        if max(bounds) == 0 or sum(len(text) ** 2 // 2 for text in literals) > _MAX_LITERALS:
            return None
        starts = {text[:end] for text in literals for end in range(len(text) + 1)}
        return cls(frozenset(starts), max(bounds))


def _spellings(literal: str) -> Iterator[bytes]:
    for ascii_only in (False, True):
        yield json.dumps(literal, ensure_ascii=ascii_only)[1:-1].encode(errors="surrogatepass")


def _read(schema: Any, literals: set[bytes], bounds: list[int]) -> None:
    """Gather the strings of enumerations and the bounds of lengths; `_Unnamed` stops it."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise _Unnamed
    for key, value in schema.items():
        if key in ("minLength", "maxLength"):
            if not isinstance(value, int):
                raise _Unnamed
            bounds.append(value)
        elif key in _SCHEMA:
            _read(value, literals, bounds)
        elif key in _SCHEMAS or key in _ALTERNATIVES or key == "prefixItems":
            parts = value.values() if key in _SCHEMAS else value
            for part in parts:
                _read(part, literals, bounds)
            # Which of two objects it is, what was written in them decides.
            if key in _ALTERNATIVES and sum(map(_may_contain, parts)) > 1:
                raise _Unnamed
        elif key in ("enum", "const"):
            values = value if key == "enum" else [value]
            if any(isinstance(each, (dict, list)) for each in values):
                raise _Unnamed
            for each in values:
                if isinstance(each, str):
                    literals.update(_spellings(each))
        elif key == "$ref":
            if not _LOCAL.fullmatch(value):
                raise _Unnamed
        elif key not in _ANNOTATIONS | _BOUNDS:
            raise _Unnamed


def _may_contain(schema: Any) -> bool:
    """Return True if its values may be objects or arrays."""
    if isinstance(schema, bool):
        return schema
    if "enum" in schema or "const" in schema:
        return False
    types = schema.get("type")
    types = [types] if isinstance(types, str) else types
    return types is None or "object" in types or "array" in types


class JsonState:
    """Follows one text from its beginning; it is a beginning of a text of the schema."""

    __slots__ = ("_count", "_open", "_rest", "_spelling", "_states", "_string", "_wants_key")

    def __init__(self, states: JsonStates) -> None:
        self._states = states
        #: Of each open object or array what is written in it: keys, and where values ended.
        self._open: list[bytes] = [b""]
        self._wants_key = False
        self._string: Literal["key", "value"] | None = None
        #: Characters of the open string, and all of them where they count.
        self._count = 0
        self._spelling: bytes | None = None
        #: The bytes of a character that is not whole; outside of strings of a number, a word, a
        #: space.
        self._rest = b""

    def name(self) -> StateName | None:
        """Return the state's name: texts with equal names go on alike. None: it is too long."""
        path = b"".join(self._open)
        if len(path) > _MAX_PATH:
            return None
        if self._string is None:
            return path, -1, None, self._rest
        count = 0 if self._string == "key" else min(self._count, self._states.longest + 1) + 1
        return path, count, self._spelling, self._rest

    def extend(self, text: bytes) -> None:
        """Go on by some bytes."""
        for byte in text:
            if self._string is None:
                self._go_on(bytes((byte,)))
            elif self._rest:
                self._complete(byte)
            elif byte == 0x22:
                content = self._spelling if self._string == "key" else None
                self._open[-1] += b'"' + (content or b"") + b'"'
                self._string = None
            elif byte == 0x5C or byte >= 0x80:
                self._rest = bytes((byte,))
            else:
                self._append(bytes((byte,)))

    def _go_on(self, character: bytes) -> None:
        """Outside of strings."""
        if character not in b' \t\r\n,:]}["{':
            self._rest = self._rest.strip() + character
            return
        if self._rest.strip() and character in b" \t\r\n,]}":
            self._open[-1] += b"0"
            self._rest = b""
        if character in b" \t\r\n":
            self._rest += character
            return
        self._rest = b""
        if character == b'"':
            self._string = "key" if self._wants_key else "value"
            self._count = 0
            self._spelling = b"" if self._wants_key or self._states.literal_starts else None
        elif character in b"{[":
            self._open.append(character)
            self._wants_key = character == b"{"
        elif character in b"}]":
            self._open.pop()
            self._open[-1] += b"0"
        else:
            self._open[-1] += character
            self._wants_key = character == b"," and self._open[-1][:1] == b"{"

    def _complete(self, byte: int) -> None:
        """Within an escape or a character of several bytes."""
        unit = self._rest = self._rest + bytes((byte,))
        if unit[0] == 0x5C:
            size = 6 if unit[1] == 0x75 else 2
        else:
            size = 4 if unit[0] >= 0xF0 else 3 if unit[0] >= 0xE0 else 2
        if len(unit) == size:
            self._rest = b""
            self._append(unit)

    def _append(self, unit: bytes) -> None:
        """One character of a string."""
        self._count += 1
        if self._spelling is not None:
            spelling = self._spelling + unit
            # NOTE: what an escape stands for is for the grammar to say.
            counts = self._string == "key" or b"\\" in spelling
            if not counts and spelling not in self._states.literal_starts:
                self._spelling = None
            else:
                self._spelling = spelling
        elif unit[:2] == b"\\u":
            self._spelling = unit
