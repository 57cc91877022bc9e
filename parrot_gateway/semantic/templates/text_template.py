"""A text as a template, with places for values.

A place is a declared placeholder `{{name}}` or a reference `[[parrot:…]]`; other braces and
brackets are ordinary text. Inserted values are not scanned. A value in a string of a JSON document
is escaped, so that the document stays valid.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, KeysView, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from parrot_gateway.exceptions import RequestTooLargeError
from parrot_gateway.semantic.templates.json_text import (
    Span,
    decode_literal,
    escape_json,
    find_documents,
    find_literals,
    well_formed,
)
from parrot_gateway.semantic.templates.reference import find_escaped_references, find_references

#: Maximum characters of all values in one text or body.
MAX_INSERTED_CHARACTERS = 32 * 1024 * 1024
#: Maximum levels of JSON documents inside strings of JSON documents.
MAX_NESTED_DOCUMENTS = 3

_NAME = r"[A-Za-z_][A-Za-z0-9_]{0,127}"
_PLACEHOLDER_NAME = re.compile(_NAME)
_PLACEHOLDER = re.compile(rf"\{{\{{[ \t]*+({_NAME})[ \t]*+\}}\}}")


class Placeholder(NamedTuple):
    """`{{name}}` in a template."""

    name: str


#: Non-empty literal text, or a place for a value.
Piece: TypeAlias = str | Placeholder


@dataclass(frozen=True, slots=True)
class Binding:
    """A variable, or a text from the request, that replaces a placeholder.

    References in such a text are replaced too; placeholders in it are not.

    Raises:
        ValueError: both are given, or none.
    """

    variable_id: str | None = None
    value: str | None = None

    def __post_init__(self) -> None:
        if (self.variable_id is None) == (self.value is None):
            raise ValueError("a placeholder is bound to a variable or to a value")


def is_placeholder_name(name: str) -> bool:
    """Return true if `{{name}}` can be a placeholder: ASCII letters, digits and `_`, no digit
    first.
    """
    return _PLACEHOLDER_NAME.fullmatch(name) is not None


def parse_placeholders(text: str, names: Collection[str]) -> list[Piece]:
    """Split the text at the placeholders that `names` declares; `{{other}}` stays text.

    Blanks are allowed inside the braces. Linear in the text.
    """
    pieces: list[Piece] = []
    position = 0
    for match in _PLACEHOLDER.finditer(text):
        if match[1] in names:
            if match.start() > position:
                pieces.append(text[position : match.start()])
            pieces.append(Placeholder(match[1]))
            position = match.end()
    if position < len(text):
        pieces.append(text[position:])
    return pieces


def undeclared_placeholders(text: str, names: Collection[str]) -> set[str]:
    """Return the placeholders in a text that are not among `names`; linear in the text."""
    return {match[1] for match in _PLACEHOLDER.finditer(text)}.difference(names)


class _Spot(NamedTuple):
    """A place in a text: `text[start:end]`, inside `depth` levels of JSON strings."""

    start: int
    end: int
    #: Id of a variable, or a placeholder.
    what: str | Placeholder
    depth: int


def _references_and_placeholders(text: str, names: Collection[str]) -> list[_Spot]:
    spots = [_Spot(start, end, id_, 0) for start, end, id_ in find_references(text)]
    if names:
        spots += _placeholders(text, names, 0, len(text))
        spots.sort()
    return spots


def _placeholders(text: str, names: Collection[str], start: int, end: int) -> Iterator[_Spot]:
    for match in _PLACEHOLDER.finditer(text, start, end):
        if match[1] in names:
            yield _Spot(match.start(), match.end(), Placeholder(match[1]), 0)


def _find_spots(
    text: str, names: Collection[str], *, is_json: bool, nesting: int = 0
) -> list[_Spot]:
    """Return all places of a text, in order."""
    spots = _references_and_placeholders(text, names)
    if not is_json and '"' not in text:
        return spots
    # Escaped references are not among the spots yet, but they contain this word.
    words = (match.start() for match in re.finditer("parrot:", text))
    marks = sorted({spot.start for spot in spots}.union(words))
    if not marks:
        return spots
    documents = [Span(0, len(text))] if is_json else find_documents(text, marks[-1]).spans
    by_start = {spot.start: spot for spot in spots}
    for document in documents:
        inside = marks[bisect_left(marks, document.start) : bisect_left(marks, document.end)]
        for literal in find_literals(text, document, inside):
            for spot in _spots_of_literal(text, literal, names, nesting):
                by_start[spot.start] = spot
    return [by_start[start] for start in sorted(by_start)]


def _spots_of_literal(
    text: str, literal: Span, names: Collection[str], nesting: int
) -> list[_Spot]:
    """Return the places in a JSON string and in the JSON documents inside it."""
    spots = [
        _Spot(start, end, id_, 1) for start, end, id_ in find_escaped_references(text, *literal)
    ]
    if names and text.find("{{", *literal) >= 0:
        spots += (spot._replace(depth=1) for spot in _placeholders(text, names, *literal))
        spots.sort()
    if not spots or nesting + 1 >= MAX_NESTED_DOCUMENTS or text.find('\\"', *literal) < 0:
        return spots
    decoded = decode_literal(text, literal)
    if decoded is None:
        return spots
    inner = _find_spots(decoded, names, is_json=False, nesting=nesting + 1)
    if [spot.what for spot in inner] != [spot.what for spot in spots]:
        return spots
    return [
        spot._replace(depth=1 + deeper.depth) for spot, deeper in zip(spots, inner, strict=True)
    ]


class _Slot(NamedTuple):
    #: A variable id, or a text of the request that may hold references.
    source: str | TextTemplate
    depth: int


class Names:
    """The placeholders seen so far."""

    __slots__ = ("undeclared", "used")

    def __init__(self) -> None:
        self.used: set[str] = set()
        self.undeclared: set[str] = set()


class Filling:
    """The values of a template, with a limit on the inserted characters.

    Args:
        values: by variable id.
        names: ids of the variables that the template needs; one without a value is a KeyError.
        max_characters: limit of all insertions together.
    """

    __slots__ = ("_left", "_max_characters", "values")

    def __init__(
        self,
        values: Mapping[str, str],
        names: Iterable[str],
        max_characters: int = MAX_INSERTED_CHARACTERS,
    ) -> None:
        self.values = {name: well_formed(values[name]) for name in names}
        self._max_characters = max_characters
        self._left = max_characters

    def count(self, characters: int) -> None:
        """Count characters to be inserted.

        Raises:
            RequestTooLargeError: they exceed the limit.
        """
        self._left -= characters
        if self._left < 0:
            raise RequestTooLargeError(
                "The values of the references and placeholders in your request come to more than "
                f"{self._max_characters} characters, which is this gateway's limit."
            )


@dataclass(frozen=True, slots=True)
class TextTemplate:
    """One text with places for values."""

    pieces: tuple[str | _Slot, ...]

    @classmethod
    def of(
        cls,
        text: str,
        inputs: Mapping[str, Binding] | None = None,
        *,
        is_json: bool = False,
        verbatim: bool = False,
        names: Names | None = None,
    ) -> TextTemplate:
        """Find the places of a text; linear.

        Args:
            inputs: the declared placeholders.
            is_json: the text is known to be a JSON document, valid or not.
            verbatim: values are inserted without escapes, in strings of JSON documents too.
            names: collects the placeholders seen.
        """
        declared = inputs or {}
        if names is not None and declared:
            names.undeclared |= undeclared_placeholders(text, declared)
        pieces: list[str | _Slot] = []
        position = 0
        spots = (
            _references_and_placeholders(text, declared)
            if verbatim
            else _find_spots(text, declared, is_json=is_json)
        )
        for start, end, what, depth in spots:
            if start > position:
                pieces.append(text[position:start])
            pieces.append(_Slot(cls._source(what, declared), depth))
            if names is not None and isinstance(what, Placeholder):
                names.used.add(what.name)
            position = end
        if position < len(text):
            pieces.append(text[position:])
        return cls(tuple(pieces))

    @classmethod
    def _source(cls, what: str | Placeholder, inputs: Mapping[str, Binding]) -> str | TextTemplate:
        if isinstance(what, str):
            return what
        binding = inputs[what.name]
        if binding.variable_id is not None:
            return binding.variable_id
        return cls.of(well_formed(binding.value or ""))

    @property
    def is_constant(self) -> bool:
        return all(isinstance(piece, str) for piece in self.pieces)

    @property
    def variables(self) -> KeysView[str]:
        """Return the ids of the variables that it needs, in order of first use."""
        found: dict[str, None] = {}
        for piece in self.pieces:
            if isinstance(piece, _Slot):
                source = piece.source
                found |= dict.fromkeys([source] if isinstance(source, str) else source.variables)
        return found.keys()

    def render(
        self, values: Mapping[str, str], *, max_characters: int = MAX_INSERTED_CHARACTERS
    ) -> str:
        """Return the text with the values, by variable id, in place.

        Raises:
            KeyError: a value is missing.
            RequestTooLargeError: the values exceed `max_characters`.
        """
        return self.fill(Filling(values, self.variables, max_characters))

    def fill(self, filling: Filling) -> str:
        return "".join(
            piece if isinstance(piece, str) else _insert(piece, filling) for piece in self.pieces
        )


def _insert(slot: _Slot, filling: Filling) -> str:
    source = slot.source
    text = filling.values[source] if isinstance(source, str) else source.fill(filling)
    filling.count(len(text))
    for _ in range(slot.depth):
        size = len(text)
        text = escape_json(text)
        filling.count(len(text) - size)
    return text
