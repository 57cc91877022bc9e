"""A docstring as a template: literal text and `{{name}}` of declared parameters.

Pure: independent of sessions and HTTP. Braces around anything other than a declared parameter are
ordinary text, here and on the server.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, TypeAlias

# NOTE: the server's own rule, because it parses the prompt again.
_NAME = r"[A-Za-z_][A-Za-z0-9_]{0,127}"
_PLACEHOLDER_NAME = re.compile(_NAME)
_PLACEHOLDER = re.compile(rf"\{{\{{[ \t]*+({_NAME})[ \t]*+\}}\}}")


class Placeholder(NamedTuple):
    """`{{name}}`."""

    name: str


#: Literal text, never empty, or a placeholder.
Piece: TypeAlias = str | Placeholder


class Prompt(NamedTuple):
    """A prompt as it is sent.

    Attributes:
        text: the prompt with a placeholder for every input.
        inputs: names of its parameters, in order of first use.
        values: further placeholders with their texts.
    """

    text: str
    inputs: tuple[str, ...]
    values: dict[str, str]


def is_placeholder_name(name: str) -> bool:
    """Return true if `{{name}}` can be a placeholder: ASCII letters, digits and `_`, at most
    128.
    """
    return _PLACEHOLDER_NAME.fullmatch(name) is not None


def parse_template(text: str, names: Collection[str]) -> list[Piece]:
    """Split at the placeholders of declared names; everything else is literal. Linear in the
    text.
    """
    pieces: list[Piece] = []
    position = 0
    for match in _PLACEHOLDER.finditer(text):
        if match[1] not in names:
            continue
        if match.start() > position:
            pieces.append(text[position : match.start()])
        pieces.append(Placeholder(match[1]))
        position = match.end()
    if position < len(text):
        pieces.append(text[position:])
    return pieces


def render(pieces: Sequence[Piece], values: Mapping[str, str]) -> list[Piece]:
    """Replace some placeholders by their values as literal text, which is not parsed."""
    rendered: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, Placeholder) and piece.name in values:
            piece = values[piece.name]
        if isinstance(piece, Placeholder):
            rendered.append(piece)
        elif rendered and isinstance(rendered[-1], str):
            rendered[-1] += piece
        elif piece:
            rendered.append(piece)
    return rendered


def write_prompt(pieces: Sequence[Piece]) -> Prompt:
    """Join the pieces so that the server finds the same placeholders in the text, and no others.

    The server would mistake literal text that looks like a placeholder for one. So its opening
    braces become a placeholder that stands for two braces.
    """
    inputs = tuple(dict.fromkeys(p.name for p in pieces if isinstance(p, Placeholder)))
    if not inputs:
        return Prompt("".join(map(_written, pieces)), (), {})
    opening = "opening_braces"
    while opening in inputs:
        opening += "_"
    text = ""
    for piece in render(pieces, {}):
        if isinstance(piece, str):
            piece = _PLACEHOLDER.sub(lambda found: f"{{{{{opening}}}}}{found[0][2:]}", piece)
        text += _written(piece)
    is_used = any(isinstance(p, Placeholder) for p in parse_template(text, [opening]))
    return Prompt(text, inputs, {opening: "{{"} if is_used else {})


def _written(piece: Piece) -> str:
    return f"{{{{{piece.name}}}}}" if isinstance(piece, Placeholder) else piece
