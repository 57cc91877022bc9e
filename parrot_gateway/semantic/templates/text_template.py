"""A text as a template: where it has places for values, and what it is with them.

A place is a declared placeholder `{{name}}` or a reference `[[parrot:…]]`. All else, braces and
brackets included, is ordinary text. Values are put in once and never scanned. Where a value lands
in a string of a JSON document it is escaped, so that the document stays valid; elsewhere it is put
in as it is. Request bodies are in `template`; nothing here waits for a value.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Iterator, KeysView, Mapping
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

#: Characters that the values may come to in one text or body.
MAX_INSERTED_CHARACTERS = 32 * 1024 * 1024
#: JSON documents inside strings of JSON documents that are followed down.
MAX_NESTED_DOCUMENTS = 3

_NAME = r"[A-Za-z_][A-Za-z0-9_]{0,127}"
_PLACEHOLDER_NAME = re.compile(_NAME)
_PLACEHOLDER = re.compile(rf"\{{\{{[ \t]*+({_NAME})[ \t]*+\}}\}}")


class Placeholder(NamedTuple):
    """`{{name}}` in a template."""

    name: str


#: Literal text, never empty, or a place for a value.
Piece: TypeAlias = str | Placeholder


@dataclass(frozen=True, slots=True)
class Binding:
    """What a placeholder stands for: a variable, or a text given with the request.

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
    """Whether `{{name}}` can be a placeholder: ASCII letters, digits and `_`, no digit first."""
    return _PLACEHOLDER_NAME.fullmatch(name) is not None


def parse_placeholders(text: str, names: Collection[str]) -> list[Piece]:
    """The text cut at the placeholders that `names` declares; `{{other}}` stays text.

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
    """Names of what looks like a placeholder and is not one of `names`; linear in the text."""
    return {match[1] for match in _PLACEHOLDER.finditer(text)}.difference(names)


class _Spot(NamedTuple):
    """A place in a text: `text[start:end]`, inside `depth` levels of JSON strings."""

    start: int
    end: int
    #: Of a variable id the id; of a placeholder its name.
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
    """All places of a text, in order."""
    spots = _references_and_placeholders(text, names)
    if not is_json and '"' not in text:
        return spots
    # Escaped references are no spots yet, but their word can be seen.
    marks = sorted({spot.start for spot in spots}.union(_positions(text, "parrot:")))
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


def _positions(text: str, word: str) -> Iterator[int]:
    position = text.find(word)
    while position >= 0:
        yield position
        position = text.find(word, position + 1)


def _spots_of_literal(
    text: str, literal: Span, names: Collection[str], nesting: int
) -> list[_Spot]:
    """Places in a JSON string, and in the JSON documents that this string may hold in turn."""
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
    """Values on their way into a template, with a bound on what they come to.

    Args:
        values: by variable id; one that is missing is a KeyError when it is wanted.
        max_characters: of all insertions together.
    """

    __slots__ = ("_left", "_max_characters", "_values")

    def __init__(self, values: Mapping[str, str], max_characters: int) -> None:
        self._values = {key: well_formed(value) for key, value in values.items()}
        self._max_characters = max_characters
        self._left = max_characters

    def value(self, variable_id: str) -> str:
        """The value of a variable."""
        return self._values[variable_id]

    def count(self, characters: int) -> None:
        """Take note of characters to be inserted.

        Raises:
            RequestTooLargeError: they come to more than the bound.
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
            verbatim: values are put in as they are everywhere, in strings of JSON documents too.
            names: takes note of the placeholders seen.
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
        """Whether it has no place for a value."""
        return all(isinstance(piece, str) for piece in self.pieces)

    @property
    def variables(self) -> KeysView[str]:
        """Ids of the variables whose values it needs, in the order of their first place."""
        found: dict[str, None] = {}
        for piece in self.pieces:
            if isinstance(piece, _Slot):
                source = piece.source
                found |= dict.fromkeys([source] if isinstance(source, str) else source.variables)
        return found.keys()

    def render(
        self, values: Mapping[str, str], *, max_characters: int = MAX_INSERTED_CHARACTERS
    ) -> str:
        """The text with the values, by variable id, in place.

        Raises:
            RequestTooLargeError: the values come to more than `max_characters`.
        """
        return self.fill(Filling({key: values[key] for key in self.variables}, max_characters))

    def fill(self, filling: Filling) -> str:
        """The text with values in place, counted against the filling's bound."""
        texts: list[str] = []
        for piece in self.pieces:
            if isinstance(piece, str):
                texts.append(piece)
            else:
                texts.append(_insert(piece, filling))
        return "".join(texts)


def _insert(slot: _Slot, filling: Filling) -> str:
    source = slot.source
    text = filling.value(source) if isinstance(source, str) else source.fill(filling)
    filling.count(len(text))
    for _ in range(slot.depth):
        size = len(text)
        text = escape_json(text)
        filling.count(len(text) - size)
    return text
