"""What the functions of transforms do to a text, or to a list of texts.

Every operation is linear in its text, bounded in its result, and knows nothing of syntax. Names and
arguments are in `functions`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec
import re2

from parrot_gateway.generation.requests.validation import mend_surrogates
from parrot_gateway.semantic.templates.text_template import Piece

#: What flows through a pipeline. A list ends as its texts in lines.
Value: TypeAlias = str | list[str]

#: Texts in a list.
MAX_ITEMS = 100_000
#: Instructions of a compiled pattern, and instructions times bytes of text. RE2 takes a step per
#: instruction and byte when it is at its worst.
MAX_PATTERN_SIZE = 10_000
MAX_PATTERN_WORK = 200_000_000

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})[ \t]*(.*)")
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ARRAY = msgspec.json.Decoder(list[msgspec.Raw])
_VALUE = msgspec.json.Decoder(msgspec.Raw)
_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")


class StepError(Exception):
    """Why an operation could not be applied; becomes a `TransformError` that names the step."""


class Limits:
    """What an operation may use.

    Args:
        max_characters: of any result.
        cut_tokens: gives the longest beginning of a text of at most so many tokens.
    """

    __slots__ = ("cut_tokens", "max_characters")

    def __init__(
        self, max_characters: int, cut_tokens: Callable[[str, int], str] | None = None
    ) -> None:
        self.max_characters = max_characters
        self.cut_tokens = cut_tokens

    def check(self, characters: int) -> None:
        """Refuse a result of so many characters if it is too long, before it is made if it can."""
        if characters > self.max_characters:
            raise StepError(f"its result is longer than {self.max_characters} characters")


#: Takes a value and gives the next one; raises `StepError`.
Operation: TypeAlias = Callable[[Value, Limits], Value]


def each(function: Callable[[str, Limits], str]) -> Operation:
    """A function of one text as an operation: of a list it takes every text."""

    def apply(value: Value, limits: Limits) -> Value:
        if isinstance(value, str):
            return function(value, limits)
        results: list[str] = []
        characters = 0
        for text in value:
            results.append(function(text, limits))
            characters += len(results[-1])
            limits.check(characters)
        return results

    return apply


def split_lines(text: str) -> list[str]:
    """Its lines, ended by LF, CRLF or CR; a line end at the end begins no further line."""
    lines = _split(text.replace("\r\n", "\n").replace("\r", "\n"), "\n")
    if not lines[-1]:
        lines.pop()
    return lines


def _split(text: str, separator: str) -> list[str]:
    parts = text.split(separator, MAX_ITEMS)
    if len(parts) > MAX_ITEMS:
        raise StepError(f"there are more than {MAX_ITEMS} parts")
    return parts


def as_list(value: Value) -> list[str]:
    """A list as it is, a text as its lines."""
    return split_lines(value) if isinstance(value, str) else value


def slice_of(start: int, end: int) -> slice:
    """From position `start` to position `end`, both included, as Python counts.

    Positions count from 1, negative ones from the end; 0 is none.
    """
    first = start - 1 if start > 0 else start
    return slice(first, None if end == -1 else end if end > 0 else end + 1)


def pick(parts: Sequence[str], position: int) -> str:
    """The part at a position as in `slice_of`."""
    if abs(position) > len(parts):
        raise StepError(f"there is no part {position}, only {len(parts)}")
    return parts[position - 1 if position > 0 else position]


def split(separator: str, position: int | None) -> Operation:
    """The parts between separators; of a list, those of all its texts."""

    def apply(value: Value, limits: Limits) -> Value:
        if position is not None:
            return each(lambda text, _: pick(_split(text, separator), position))(value, limits)
        if isinstance(value, str):
            return _split(value, separator)
        parts: list[str] = []
        for text in value:
            parts += _split(text, separator)
            if len(parts) > MAX_ITEMS:
                raise StepError(f"there are more than {MAX_ITEMS} parts")
        return parts

    return apply


def join(separator: str) -> Operation:
    """One text of all, with the separator between them."""

    def apply(value: Value, limits: Limits) -> Value:
        texts = as_list(value)
        limits.check(sum(map(len, texts)) + len(separator) * max(0, len(texts) - 1))
        return separator.join(texts)

    return apply


def sliced(part: slice) -> Operation:
    """Some of the texts of a list, or of the lines of a text."""
    return lambda value, _: as_list(value)[part]


def replace(old: str, new: str) -> Operation:
    """Every occurrence of one text by another, from left to right."""

    def apply(text: str, limits: Limits) -> str:
        if len(new) > len(old):
            limits.check(len(text) + text.count(old) * (len(new) - len(old)))
        return text.replace(old, new)

    return each(apply)


def template(pieces: Sequence[Piece]) -> Operation:
    """The pieces with the text in every placeholder."""
    constant = sum(len(piece) for piece in pieces if isinstance(piece, str))
    places = sum(not isinstance(piece, str) for piece in pieces)

    def apply(text: str, limits: Limits) -> str:
        limits.check(constant + places * len(text))
        return "".join(piece if isinstance(piece, str) else text for piece in pieces)

    return each(apply)


def truncate_tokens(number: int) -> Operation:
    """The beginning of a text, of at most so many tokens of the model's tokenizer."""

    def apply(text: str, limits: Limits) -> str:
        if limits.cut_tokens is None:
            raise StepError("the tokenizer of this model is not at hand; use truncate(chars=…)")
        return limits.cut_tokens(text, number)

    return each(apply)


def compile_pattern(pattern: str) -> Any:
    """A pattern for `regex`.

    Raises:
        ValueError: it is none, or too large.
    """
    options = re2.Options()
    options.log_errors = False
    try:
        compiled = re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0] if error.args else ""
        text = reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
        raise ValueError(text) from None
    if compiled.programsize > MAX_PATTERN_SIZE:
        raise ValueError(f"it compiles to more than {MAX_PATTERN_SIZE} instructions")
    return compiled


def regex(compiled: Any, group: int | str) -> Operation:
    """A group of the first match of a pattern in RE2's syntax."""
    size: int = compiled.programsize

    def apply(text: str, _: Limits) -> str:
        if size * (len(text) if text.isascii() else len(text.encode())) > MAX_PATTERN_WORK:
            raise StepError(f"a text of {len(text)} characters is too long for this pattern")
        match = compiled.search(text)
        if match is None:
            raise StepError("the pattern does not match")
        start, end = match.span(group)
        if start < 0:
            raise StepError(f"group {group} took no part in the match")
        return text[start:end]

    return each(apply)


def code_block(language: str) -> Operation:
    """The inside of the first fenced block of Markdown, of a language if one is given."""
    wanted = language.lower()

    def apply(text: str, _: Limits) -> str:
        position = 0
        inside: int | None = None
        fence = ""
        while position < len(text):
            end = text.find("\n", position)
            following = len(text) if end < 0 else end + 1
            line = text[position:following].rstrip("\r\n")
            match = _FENCE.fullmatch(line)
            if match is not None and not fence and "`" not in match[2]:
                fence = match[1]
                tag = match[2].split(maxsplit=1)
                if not wanted or (tag and tag[0].lower() == wanted):
                    inside = following
            elif (
                match is not None and fence and not match[2].strip() and match[1].startswith(fence)
            ):
                if inside is not None:
                    return _without_line_end(text[inside:position])
                fence = ""
            position = following
        if inside is None:
            raise StepError(f"there is no code block of {language}" if wanted else "no code block")
        return _without_line_end(text[inside:])

    return each(apply)


def _without_line_end(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")


def json_value(pointer: Sequence[str]) -> Operation:
    """What a JSON pointer finds: a string as its characters, all else as it is written."""

    def apply(text: str, _: Limits) -> str:
        try:
            raw = bytes(_VALUE.decode(mend_surrogates(text.encode())))
            for key in pointer:
                raw = bytes(_below(raw, key))
        except (msgspec.DecodeError, RecursionError) as error:
            reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise StepError(f"the text is not JSON ({reason})") from None
        if raw.startswith(b'"'):
            return str(json.loads(raw))
        return raw.decode()

    return each(apply)


def _below(raw: bytes, key: str) -> msgspec.Raw:
    if raw.startswith(b"{"):
        fields = _OBJECT.decode(raw)
        if key not in fields:
            there = ", ".join(sorted(fields)[:8]) or "none"
            raise StepError(f"there is no field {key!r} (fields: {there})"[:300])
        return fields[key]
    if raw.startswith(b"["):
        items = _ARRAY.decode(raw)
        if _INDEX.fullmatch(key) is None or int(key) >= len(items):
            raise StepError(f"there is no item {key!r} in an array of {len(items)}")
        return items[int(key)]
    raise StepError(f"there is nothing below {key!r}: the value is neither object nor array")
