"""The functions of transforms: their names, arguments, and what they are for.

A table. What they do is in `operations`; how they are written is in `grammar`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from parrot_gateway.exceptions import TransformSyntaxError
from parrot_gateway.semantic.templates.text_template import Placeholder, parse_placeholders
from parrot_gateway.semantic.transforms import operations
from parrot_gateway.semantic.transforms.grammar import Argument, FunctionCall
from parrot_gateway.semantic.transforms.operations import Operation, each

_INTEGER = re.compile(r"-?[0-9]{1,9}")
_POINTER = re.compile(r"(?:/(?:[^~/]|~[01])*)*")
#: Levels that a JSON pointer may go down.
MAX_POINTER = 64


class BadArgumentError(Exception):
    """An argument has the right kind and a wrong value.

    Args:
        parameter: which one.
        expected: what it should be.
    """

    def __init__(self, parameter: str, expected: str) -> None:
        super().__init__(expected)
        self.parameter = parameter
        self.expected = expected


class Parameter(NamedTuple):
    """A parameter of a function."""

    name: str
    #: `int` or `str`.
    kind: type
    is_required: bool = False
    #: Shown in the signature; None shows only the name, as optional.
    default: str | None = None
    needs_keyword: bool = False

    @property
    def signature(self) -> str:
        """How it is shown."""
        if self.is_required:
            return self.name
        return f"{self.name}=…" if self.default is None else f"{self.name}={self.default}"


@dataclass(frozen=True, slots=True)
class Function:
    """A function that a pipeline may name."""

    name: str
    parameters: tuple[Parameter, ...]
    #: Makes the operation from the arguments that were given; may raise `BadArgumentError`.
    make: Callable[..., Operation]

    @property
    def signature(self) -> str:
        """Name and parameters, as in the documentation."""
        inside = ", ".join(parameter.signature for parameter in self.parameters)
        return f"{self.name}({inside})" if inside else self.name

    def bind(self, call: FunctionCall, text: str) -> Operation:
        """The operation of a step.

        Args:
            text: the whole pipeline, for errors.

        Raises:
            TransformSyntaxError: arguments are missing, unknown, repeated or wrong.
        """
        given: dict[str, Argument] = {}
        for number, argument in enumerate(call.arguments):
            parameter = self._parameter(argument, number, text)
            if parameter.name in given:
                raise TransformSyntaxError(
                    text, argument.position, f"{parameter.name} only once in {self.signature}"
                )
            given[parameter.name] = argument
        values: dict[str, Any] = {}
        for parameter in self.parameters:
            if parameter.name in given:
                values[parameter.name] = _convert(given[parameter.name], parameter, text)
            elif parameter.is_required:
                raise TransformSyntaxError(
                    text, call.position, f"{self.signature} with an argument {parameter.name}"
                )
        try:
            return self.make(**values)
        except BadArgumentError as error:
            at = given.get(error.parameter)
            position = call.position if at is None else at.position
            raise TransformSyntaxError(text, position, error.expected) from None

    def _parameter(self, argument: Argument, number: int, text: str) -> Parameter:
        if argument.keyword is not None:
            for parameter in self.parameters:
                if parameter.name == argument.keyword:
                    return parameter
        else:
            positional = [p for p in self.parameters if not p.needs_keyword]
            if number < len(positional):
                return positional[number]
        raise TransformSyntaxError(text, argument.position, f"the arguments of {self.signature}")


def _convert(argument: Argument, parameter: Parameter, text: str) -> Any:
    if parameter.kind is str:
        return argument.value
    if argument.is_quoted or _INTEGER.fullmatch(argument.value) is None:
        raise TransformSyntaxError(
            text, argument.position, f"a whole number for {parameter.name}, of at most 9 digits"
        )
    return int(argument.value)


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


def _strip(chars: str | None = None) -> Operation:
    return each(lambda text, _: text.strip(chars))


def _lower() -> Operation:
    return each(lambda text, _: text.lower())


def _upper() -> Operation:
    return each(lambda text, _: text.upper())


def _json(pointer: str = "") -> Operation:
    if _POINTER.fullmatch(pointer) is None or pointer.count("/") > MAX_POINTER:
        raise BadArgumentError(
            "pointer",
            f"a JSON pointer such as /items/0/name, of at most {MAX_POINTER} levels "
            "(~0 for ~, ~1 for / in a name)",
        )
    keys = [key.replace("~1", "/").replace("~0", "~") for key in pointer.split("/")[1:]]
    return operations.json_value(keys)


def _regex(pattern: str, group: str = "0") -> Operation:
    try:
        compiled = operations.compile_pattern(pattern)
    except ValueError as error:
        raise BadArgumentError("pattern", f"a pattern in RE2's syntax ({error})") from None
    number: int | str = int(group) if group.isascii() and group.isdigit() else group
    known = compiled.groupindex
    if number not in known and not (isinstance(number, int) and number <= compiled.groups):
        names = "".join(f", {name}" for name in known)
        raise BadArgumentError("group", f"a group of the pattern: 0 to {compiled.groups}{names}")
    return operations.regex(compiled, known.get(number, number))


def _code_block(lang: str = "") -> Operation:
    return operations.code_block(lang)


def _join(sep: str) -> Operation:
    return operations.join(sep)


def _lines(start: int = 1, end: int = -1) -> Operation:
    return operations.sliced(operations.slice_of(_position("start", start), _position("end", end)))


def _split(sep: str, n: int | None = None) -> Operation:
    return operations.split(_not_empty("sep", sep), None if n is None else _position("n", n))


def _first(n: int = 1) -> Operation:
    return operations.sliced(slice(0, _at_least("n", n, 0)))


def _last(n: int = 1) -> Operation:
    return operations.sliced(slice(-n, None) if _at_least("n", n, 0) else slice(0, 0))


def _truncate(chars: int | None = None, tokens: int | None = None) -> Operation:
    if (chars is None) == (tokens is None):
        raise BadArgumentError("", "either truncate(chars=…) or truncate(tokens=…)")
    if chars is None:
        return operations.truncate_tokens(_at_least("tokens", tokens or 0, 0))
    limit = _at_least("chars", chars, 0)
    return each(lambda text, _: text[:limit])


def _replace(old: str, new: str) -> Operation:
    return operations.replace(_not_empty("old", old), new)


def _template(text: str) -> Operation:
    pieces = parse_placeholders(text, ("value",))
    if Placeholder("value") not in pieces:
        raise BadArgumentError("text", "a text with {{value}} in it")
    return operations.template(pieces)


_N = Parameter("n", int, default="1")

FUNCTIONS: Mapping[str, Function] = {
    function.name: function
    for function in (
        Function("code_block", (Parameter("lang", str),), _code_block),
        Function("first", (_N,), _first),
        Function("join", (Parameter("sep", str, True),), _join),
        Function("json", (Parameter("pointer", str),), _json),
        Function("last", (_N,), _last),
        Function(
            "lines",
            (Parameter("start", int, default="1"), Parameter("end", int, default="-1")),
            _lines,
        ),
        Function("lower", (), _lower),
        Function(
            "regex", (Parameter("pattern", str, True), Parameter("group", str, default="0")), _regex
        ),
        Function("replace", (Parameter("old", str, True), Parameter("new", str, True)), _replace),
        Function("split", (Parameter("sep", str, True), Parameter("n", int)), _split),
        Function("strip", (Parameter("chars", str),), _strip),
        Function("take", (Parameter("n", int, True),), _first),
        Function("template", (Parameter("text", str, True),), _template),
        Function(
            "truncate",
            (
                Parameter("chars", int, needs_keyword=True),
                Parameter("tokens", int, needs_keyword=True),
            ),
            _truncate,
        ),
        Function("upper", (), _upper),
    )
}
