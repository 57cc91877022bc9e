"""The decoder of a tokenizer, one token at a time: the text that each token contributes.

A tokenizer's decoder turns a whole list of tokens into text. Nearly all language models use one of
two kinds, which this module reads from the serialised pipeline:

- *byte level*: tokens are bytes, the text is their UTF-8 with U+FFFD for what is not valid;
- *sentencepiece*: tokens are text with `▁` for a space, some are single bytes (`<0xE2>`), the
  first space of the whole text may be dropped.

Anything else is `opaque`: it can only be decoded as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

DecoderKind: TypeAlias = Literal["byte_level", "sentencepiece", "opaque"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


def _byte_of_char() -> dict[str, int]:
    """Return GPT-2's map from printable characters to bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table


BYTE_OF_CHAR = _byte_of_char()


@dataclass(frozen=True, slots=True)
class DecoderPlan:
    """The steps by which tokens become text."""

    kind: DecoderKind
    #: Replacements within each token, in order.
    replace: tuple[tuple[str, str], ...] = ()
    #: True: tokens like `<0xE2>` are bytes.
    byte_fallback: bool = False
    #: This character is dropped …
    strip: str = " "
    #: … up to this many times at the very beginning of the text.
    strip_left: int = 0
    #: Every `▁` of the first token is dropped instead of becoming a space.
    bare_first: str | None = None


def read_plan(pipeline: Mapping[str, Any]) -> DecoderPlan:
    """Read the plan of a serialised tokenizer, given as the parsed `tokenizer.json`."""
    decoder = pipeline.get("decoder")
    if decoder is None:
        return DecoderPlan("opaque")
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return DecoderPlan("byte_level")
    if kinds == ["Metaspace"]:
        return _metaspace_plan(steps[0])
    return _sentencepiece_plan(steps) or DecoderPlan("opaque")


def _metaspace_plan(step: dict[str, Any]) -> DecoderPlan:
    mark = step["replacement"]
    scheme = step.get("prepend_scheme", "always")
    prefixed = scheme != "never" and step.get("add_prefix_space", True)
    return DecoderPlan(
        "sentencepiece", replace=((mark, " "),), bare_first=mark if prefixed else None
    )


def _sentencepiece_plan(steps: list[dict[str, Any]]) -> DecoderPlan | None:
    """Read `Replace* ByteFallback? Fuse? Strip?`; None for anything else."""
    rest = list(steps)
    replace: list[tuple[str, str]] = []
    while rest and rest[0]["type"] == "Replace":
        pattern = rest[0]["pattern"].get("String")
        if not pattern:
            return None
        replace.append((pattern, rest[0]["content"]))
        rest.pop(0)
    byte_fallback = bool(rest) and rest[0]["type"] == "ByteFallback"
    if byte_fallback:
        rest.pop(0)
    fused = bool(rest) and rest[0]["type"] == "Fuse"
    if fused:
        rest.pop(0)
    strip, strip_left = " ", 0
    if fused and rest and rest[0]["type"] == "Strip" and rest[0]["stop"] == 0:
        strip, strip_left = rest[0]["content"], rest[0]["start"]
        rest.pop(0)
    if rest or not (replace or byte_fallback):
        return None
    return DecoderPlan(
        "sentencepiece",
        replace=tuple(replace),
        byte_fallback=byte_fallback,
        strip=strip,
        strip_left=strip_left,
    )


class TokenPieces:
    """The piece of every token id, looked up once per id and cached.

    A piece is `bytes` in a byte-level tokenizer; elsewhere `str`, or `int` for a single-byte token.
    Ids outside the vocabulary have no piece.
    """

    __slots__ = ("_backend", "_special", "_table", "first", "plan")

    def __init__(self, backend: Backend, plan: DecoderPlan) -> None:
        self._backend = backend
        self.plan = plan
        added = backend.get_added_tokens_decoder()
        self._special = {token_id for token_id, token in added.items() if token.special}
        # Two ids may have the same text; the text decides, as in the tokenizers library.
        contents = {added[token_id].content for token_id in self._special}
        self._special |= {i for i, token in added.items() if token.content in contents}
        self._table: dict[int, bytes | str | int | None] = {}

    def is_special(self, token_id: int) -> bool:
        """Return true if decoding skips this token when special tokens are skipped."""
        return token_id in self._special

    def get(self, token_id: int) -> bytes | str | int | None:
        try:
            return self._table[token_id]
        except KeyError:
            piece = self._make(token_id)
            self._table[token_id] = piece
            return piece

    def first_text(self, token_id: int) -> bytes | str | int | None:
        mark = self.plan.bare_first
        token = self._backend.id_to_token(token_id) if mark is not None else None
        if mark is None or token is None:
            return self.get(token_id)
        return str(token).replace(mark, "")

    def _make(self, token_id: int) -> bytes | str | int | None:
        if not 0 <= token_id < 2**32:
            return None
        token = self._backend.id_to_token(token_id)
        if token is None:
            return None
        if self.plan.kind == "byte_level":
            try:
                return bytes([BYTE_OF_CHAR[char] for char in token])
            except KeyError:
                return str(token).encode()
        text = str(token)
        for old, new in self.plan.replace:
            text = text.replace(old, new)
        if self.plan.byte_fallback and (match := _BYTE_TOKEN.match(text)):
            return int(match[1], 16)
        return text
