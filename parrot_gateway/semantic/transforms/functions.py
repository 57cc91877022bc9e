"""The functions of transforms: their arguments, and their effect on a text or list of texts.

The signature of a function below `@_function` is the one that pipelines call; it checks arguments
and returns the operation. Every operation is linear in its text and limited in its result.
`grammar` describes how pipelines are written.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec
import re2

from parrot_gateway.calls.requests.call import mend_surrogates
from parrot_gateway.exceptions import TransformSyntaxError
from parrot_gateway.semantic.templates.text_template import Placeholder, parse_placeholders
from parrot_gateway.semantic.transforms.grammar import Argument, FunctionCall

#: Values in a pipeline. A final list becomes its texts as lines.
Value: TypeAlias = str | list[str]

#: Maximum texts in a list.
MAX_ITEMS = 100_000
#: Maximum instructions of a compiled pattern, and instructions times bytes of text. At worst, RE2
#: takes a step per instruction and byte.
MAX_PATTERN_SIZE = 10_000
MAX_PATTERN_WORK = 200_000_000
#: Maximum levels of a JSON pointer.
MAX_POINTER = 64

_INTEGER = re.compile(r"-?[0-9]{1,9}")
_POINTER = re.compile(r"(?:/(?:[^~/]|~[01])*)*")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})[ \t]*(.*)")
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ARRAY = msgspec.json.Decoder(list[msgspec.Raw])
_VALUE = msgspec.json.Decoder(msgspec.Raw)
_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")


class StepError(Exception):
    """Reason why an operation could not be applied; becomes a `TransformError` that names the
    step.
    """


class BadArgumentError(Exception):
    """An argument of the right kind has a wrong value.

    Args:
        parameter: its name.
        expected: what it should be.
    """

    def __init__(self, parameter: str, expected: str) -> None:
        super().__init__(expected)
        self.parameter = parameter
        self.expected = expected


class Limits(NamedTuple):
    """Limits of an operation."""

    #: Maximum characters of any result.
    max_characters: int
    #: Returns the longest beginning of a text within a number of tokens.
    cut_tokens: Callable[[str, int], str] | None = None

    def check(self, characters: int) -> None:
        """Refuse a result that is too long, before it is made if possible."""
        if characters > self.max_characters:
            raise StepError(f"its result is longer than {self.max_characters} characters")


#: Maps a value to the next one; raises `StepError`.
Operation: TypeAlias = Callable[[Value, Limits], Value]


class Function(NamedTuple):
    """A function that a pipeline may call."""

    name: str
    #: Makes the operation from the given arguments; may raise `BadArgumentError`.
    make: Callable[..., Operation]
    parameters: Mapping[str, inspect.Parameter]

    @property
    def signature(self) -> str:
        """Return name and parameters as in the documentation."""
        shown = [
            name if each.default is each.empty else f"{name}={_shown_default(each.default)}"
            for name, each in self.parameters.items()
        ]
        return f"{self.name}({', '.join(shown)})" if shown else self.name

    def bind(self, call: FunctionCall, text: str) -> Operation:
        """Make the operation of a step.

        Args:
            text: the whole pipeline, for errors.

        Raises:
            TransformSyntaxError: arguments are missing, unknown, repeated or wrong.
        """
        given: dict[str, Argument] = {}
        for number, argument in enumerate(call.arguments):
            name = self._parameter_of(argument, number, text)
            if name in given:
                raise TransformSyntaxError(
                    text, argument.position, f"{name} only once in {self.signature}"
                )
            given[name] = argument
        for name, parameter in self.parameters.items():
            if name not in given and parameter.default is parameter.empty:
                raise TransformSyntaxError(
                    text, call.position, f"{self.signature} with an argument {name}"
                )
        values = {
            name: _convert(given[name], parameter, text)
            for name, parameter in self.parameters.items()
            if name in given
        }
        try:
            return self.make(**values)
        except BadArgumentError as error:
            at = given.get(error.parameter)
            position = call.position if at is None else at.position
            raise TransformSyntaxError(text, position, error.expected) from None

    def _parameter_of(self, argument: Argument, number: int, text: str) -> str:
        if argument.keyword is not None and argument.keyword in self.parameters:
            return argument.keyword
        positional = [p for p in self.parameters.values() if p.kind is not p.KEYWORD_ONLY]
        if argument.keyword is None and number < len(positional):
            return positional[number].name
        raise TransformSyntaxError(text, argument.position, f"the arguments of {self.signature}")


def _shown_default(default: object) -> object:
    return "…" if default in (None, "") else default


def _convert(argument: Argument, parameter: inspect.Parameter, text: str) -> int | str:
    if parameter.annotation not in (int, int | None):
        return argument.value
    if argument.is_quoted or _INTEGER.fullmatch(argument.value) is None:
        raise TransformSyntaxError(
            text, argument.position, f"a whole number for {parameter.name}, of at most 9 digits"
        )
    return int(argument.value)


FUNCTIONS: dict[str, Function] = {}


def _function(make: Callable[..., Operation]) -> Callable[..., Operation]:
    """Register a function under the name of `make` without underscores."""
    name = make.__name__.strip("_")
    FUNCTIONS[name] = Function(name, make, inspect.signature(make, eval_str=True).parameters)
    return make


def _at_least(name: str, number: int, least: int) -> int:
    if number < least:
        raise BadArgumentError(name, f"a number of at least {least} for {name}")
    return number


def _position(name: str, number: int) -> int:
    if number == 0:
        raise BadArgumentError(
            name, f"a {name} other than 0: positions count from 1, or from -1 back from the end"
        )
    return number


def _not_empty(name: str, text: str) -> str:
    if not text:
        raise BadArgumentError(name, f"a {name} that is not empty")
    return text


def _each(function: Callable[[str, Limits], str]) -> Operation:
    """Turn a function of one text into an operation that maps the texts of a list."""

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


def _cut(text: str, separator: str) -> list[str]:
    parts = text.split(separator, MAX_ITEMS)
    if len(parts) > MAX_ITEMS:
        raise StepError(f"there are more than {MAX_ITEMS} parts")
    return parts


def _as_list(value: Value) -> list[str]:
    """Return a list unchanged, or a text's lines: ended by LF, CRLF or CR, also the last one."""
    if not isinstance(value, str):
        return value
    lines = _cut(value.replace("\r\n", "\n").replace("\r", "\n"), "\n")
    if not lines[-1]:
        lines.pop()
    return lines


def _sliced(part: slice) -> Operation:
    """Slice a list's texts, or a text's lines."""
    return lambda value, _: _as_list(value)[part]


@_function
def _code_block(lang: str = "") -> Operation:
    """Return the inside of the first fenced Markdown block, of a language if given."""

    def apply(text: str, _: Limits) -> str:
        position = 0
        inside: int | None = None
        fence = ""
        while position < len(text):
            end = text.find("\n", position)
            following = len(text) if end < 0 else end + 1
            match = _FENCE.fullmatch(text[position:following].rstrip("\r\n"))
            if match is not None and not fence and "`" not in match[2]:
                fence = match[1]
                tag = match[2].split(maxsplit=1)
                if not lang or (tag and tag[0].lower() == lang.lower()):
                    inside = following
            elif (
                match is not None and fence and not match[2].strip() and match[1].startswith(fence)
            ):
                if inside is not None:
                    return _without_line_end(text[inside:position])
                fence = ""
            position = following
        if inside is None:
            raise StepError(f"there is no code block of {lang}" if lang else "no code block")
        return _without_line_end(text[inside:])

    return _each(apply)


def _without_line_end(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")


@_function
def _first(n: int = 1) -> Operation:
    return _sliced(slice(0, _at_least("n", n, 0)))


@_function
def _join(sep: str) -> Operation:
    def apply(value: Value, limits: Limits) -> Value:
        texts = _as_list(value)
        limits.check(sum(map(len, texts)) + len(sep) * max(0, len(texts) - 1))
        return sep.join(texts)

    return apply


@_function
def _json(pointer: str = "") -> Operation:
    """Return the value at a JSON pointer: a string as its characters, other values as written."""
    if _POINTER.fullmatch(pointer) is None or pointer.count("/") > MAX_POINTER:
        raise BadArgumentError(
            "pointer",
            f"a JSON pointer such as /items/0/name, of at most {MAX_POINTER} levels "
            "(~0 for ~, ~1 for / in a name)",
        )
    keys = [key.replace("~1", "/").replace("~0", "~") for key in pointer.split("/")[1:]]

    def apply(text: str, _: Limits) -> str:
        try:
            raw = bytes(_VALUE.decode(mend_surrogates(text.encode())))
            for key in keys:
                raw = bytes(_below(raw, key))
        except (msgspec.DecodeError, RecursionError) as error:
            reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise StepError(f"the text is not JSON ({reason})") from None
        return str(json.loads(raw)) if raw.startswith(b'"') else raw.decode()

    return _each(apply)


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


@_function
def _last(n: int = 1) -> Operation:
    return _sliced(slice(-n, None) if _at_least("n", n, 0) else slice(0, 0))


@_function
def _lines(start: int = 1, end: int = -1) -> Operation:
    """Return lines from `start` to `end`, both included; negative positions count from the end."""
    first = _position("start", start) - (start > 0)
    last = None if end == -1 else _position("end", end) + (end < 0)
    return _sliced(slice(first, last))


@_function
def _lower() -> Operation:
    return _each(lambda text, _: text.lower())


@_function
def _regex(pattern: str, group: str = "0") -> Operation:
    """Return a group of a pattern's first match, in RE2's syntax."""
    try:
        compiled = compile_pattern(pattern)
    except ValueError as error:
        raise BadArgumentError("pattern", f"a pattern in RE2's syntax ({error})") from None
    number: int | str = int(group) if group.isascii() and group.isdigit() else group
    known = compiled.groupindex
    if number not in known and not (isinstance(number, int) and number <= compiled.groups):
        names = "".join(f", {name}" for name in known)
        raise BadArgumentError("group", f"a group of the pattern: 0 to {compiled.groups}{names}")
    number = known.get(number, number)

    def apply(text: str, _: Limits) -> str:
        size = len(text) if text.isascii() else len(text.encode())
        if compiled.programsize * size > MAX_PATTERN_WORK:
            raise StepError(f"a text of {len(text)} characters is too long for this pattern")
        match = compiled.search(text)
        if match is None:
            raise StepError("the pattern does not match")
        start, end = match.span(number)
        if start < 0:
            raise StepError(f"group {number} took no part in the match")
        return text[start:end]

    return _each(apply)


def compile_pattern(pattern: str) -> Any:
    """Compile a pattern for `regex`.

    Raises:
        ValueError: it is no valid pattern, or too large.
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


@_function
def _replace(old: str, new: str) -> Operation:
    _not_empty("old", old)

    def apply(text: str, limits: Limits) -> str:
        if len(new) > len(old):
            limits.check(len(text) + text.count(old) * (len(new) - len(old)))
        return text.replace(old, new)

    return _each(apply)


@_function
def _split(sep: str, n: int | None = None) -> Operation:
    """Split at separators (a list: all its texts), or take the n-th part of each text."""
    _not_empty("sep", sep)
    if n is not None:
        position = _position("n", n)
        return _each(lambda text, _: _pick(_cut(text, sep), position))

    def apply(value: Value, limits: Limits) -> Value:
        parts: list[str] = []
        for text in [value] if isinstance(value, str) else value:
            parts += _cut(text, sep)
            if len(parts) > MAX_ITEMS:
                raise StepError(f"there are more than {MAX_ITEMS} parts")
        return parts

    return apply


def _pick(parts: Sequence[str], position: int) -> str:
    if abs(position) > len(parts):
        raise StepError(f"there is no part {position}, only {len(parts)}")
    return parts[position - 1 if position > 0 else position]


@_function
def _strip(chars: str | None = None) -> Operation:
    return _each(lambda text, _: text.strip(chars))


@_function
def _take(n: int) -> Operation:
    return _first(n)


@_function
def _template(text: str) -> Operation:
    """Return the text with the value in every placeholder."""
    pieces = parse_placeholders(text, ("value",))
    constant = sum(len(piece) for piece in pieces if isinstance(piece, str))
    places = pieces.count(Placeholder("value"))
    if not places:
        raise BadArgumentError("text", "a text with {{value}} in it")

    def apply(value: str, limits: Limits) -> str:
        limits.check(constant + places * len(value))
        return "".join(piece if isinstance(piece, str) else value for piece in pieces)

    return _each(apply)


@_function
def _truncate(*, chars: int | None = None, tokens: int | None = None) -> Operation:
    if (chars is None) == (tokens is None):
        raise BadArgumentError("", "either truncate(chars=…) or truncate(tokens=…)")
    if chars is not None:
        limit = _at_least("chars", chars, 0)
        return _each(lambda text, _: text[:limit])
    number = _at_least("tokens", tokens or 0, 0)

    def cut(text: str, limits: Limits) -> str:
        if limits.cut_tokens is None:
            raise StepError("the tokenizer of this model is not at hand; use truncate(chars=…)")
        return limits.cut_tokens(text, number)

    return _each(cut)


@_function
def _upper() -> Operation:
    return _each(lambda text, _: text.upper())
