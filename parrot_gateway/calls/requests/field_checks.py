"""Checks of single fields, and the wording of what is wrong with a body, as OpenAI's.

Everything raised here is a 400 that names the field in `param`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from parrot_gateway.exceptions import (
    InvalidRequestError,
    UnsupportedError,
    invalid_value,
    long_array,
    missing_parameter,
    wrong_type,
)

#: As at Anthropic's; OpenAI takes half of it for functions of chats.
_TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
_TYPE_ERROR = re.compile(r"Expected `(?P<wanted>.+)`, got `(?P<got>.+)`", re.DOTALL)
#: The field may have no name, or one that looks like the end of the message.
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<field>.*?)`?\Z", re.DOTALL)
_LIMIT = re.compile(r"Expected `(\w+)` (of length )?(>=|<=) (\S+)")
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")
_MISSING = re.compile(r"Object missing required field `(?P<field>.+)`", re.DOTALL)
_TYPE_NAMES = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "a boolean",
    "array": "an array",
    "object": "an object",
    "null": "null",
}


def nested_too_deeply(name: str | None = None) -> InvalidRequestError:
    """The error for JSON with too many levels; `name`: of a field."""
    what = "The JSON body of your request" if name is None else f"Invalid '{name}': it"
    return InvalidRequestError(f"{what} is nested too deeply.", param=name)


def explain(message: str, body: bytes) -> InvalidRequestError:
    """msgspec's `… - at `$.messages[0].role`` in OpenAI's words.

    Args:
        body: holds the value at fault, which the message lacks.
    """
    text, _, path = message.partition(" - at `")
    _, of_keys, path = path.removesuffix("`").rpartition("key` in `")
    path = path.removeprefix("$")
    field = path.removeprefix(".").removesuffix("[...]") or None
    unknown = _UNKNOWN.match(text)
    if unknown is not None:
        name = unknown["field"][:80]
        return InvalidRequestError(
            f"Unknown parameter: '{name}'.", param=name, code="unknown_parameter"
        )
    mismatch, missing = _TYPE_ERROR.fullmatch(text), _MISSING.fullmatch(text)
    if missing is not None:
        return missing_parameter(f"{field}.{missing['field']}" if field else missing["field"])
    if field is None:
        return InvalidRequestError("The JSON body of your request has to be an object.")
    if mismatch is not None:
        wanted = [part for part in mismatch["wanted"].split(" | ") if part != "null"]
        got = _TYPE_NAMES.get(mismatch["got"], mismatch["got"])
        kinds = " or ".join(_TYPE_NAMES.get(kind, kind) for kind in wanted)
        return wrong_type(field, f"{kinds}, but got {got} instead")
    limit = _LIMIT.fullmatch(text)
    if limit is not None:
        values = _values_at(body, path)
        if of_keys:
            values = [key for value in values for key in value]
        return _out_of_range(field, limit, values)
    return invalid_value(field, f"{text}.")


def _values_at(body: bytes, path: str) -> list[Any]:
    """The values that a path of msgspec's stands for: several, where it does not name a key."""
    found = [msgspec.json.decode(body)]
    for name, number in _STEP.findall(path):
        if name:
            found = [value[name] for value in found]
        elif number == "...":
            found = [item for value in found for item in value.values()]
        else:
            found = [value[int(number)] for value in found]
    return found


def _out_of_range(field: str, limit: re.Match[str], values: list[Any]) -> InvalidRequestError:
    kind, is_length, bound, number = limit.groups()
    if kind == "str":
        # One of several texts: the field is that of all.
        field = field.partition("[")[0]
    sizes = [len(value) if is_length else value for value in values]
    value = max(sizes) if bound == "<=" else min(sizes)
    if not is_length:
        return _outside(field, float(value) if kind == "float" else value, bound, float(number))
    if kind == "object":
        return InvalidRequestError(
            f"Invalid '{field}': {value} entries, at most {number} are allowed.",
            param=field,
            code="object_above_max_properties",
        )
    if kind == "array":
        return long_array(field, int(number), value)
    return InvalidRequestError(
        f"Invalid '{field}': string too long. Expected a string with maximum length {number}, but "
        f"got a string with length {value} instead.",
        param=field,
        code="string_above_max_length",
    )


def _outside(field: str, value: float, bound: str, limit: float) -> InvalidRequestError:
    kind = "integer" if isinstance(value, int) else "decimal"
    side, extreme = ("below", "minimum") if bound == ">=" else ("above", "maximum")
    shown = str(int(limit)) if float(limit).is_integer() else str(limit)
    return InvalidRequestError(
        f"Invalid '{field}': {kind} {side} {extreme} value. Expected a value {bound} {shown}, but "
        f"got {shown_number(value)} instead.",
        param=field,
        code=f"{kind}_{side}_{extreme[:3]}_value",
    )


def check_range(
    name: str, value: float | None, low: float | None = None, high: float | None = None
) -> None:
    """Refuse a number outside `low`..`high`, both allowed; None is the field left out.

    Raises:
        InvalidRequestError: it is outside.
    """
    if value is not None and low is not None and not value >= low:
        raise _outside(name, value, ">=", low)
    if value is not None and high is not None and not value <= high:
        raise _outside(name, value, "<=", high)


def shown_number(value: float) -> str:
    # NOTE: str() of an integer of thousands of digits raises.
    if isinstance(value, int) and abs(value) >= 10**18:
        return "a number of more than 18 digits"
    return str(value)


def check_choice(name: str, value: str | None, allowed: Iterable[str]) -> None:
    """Refuse a word that is not one of `allowed`.

    Raises:
        InvalidRequestError: it is not.
    """
    if value is not None and value not in allowed:
        raise InvalidRequestError(
            f"Invalid value for '{name}': '{value[:64]}'. Supported values are: "
            + ", ".join(f"'{word}'" for word in allowed)
            + ".",
            param=name,
            code="invalid_value",
        )


def tool_name(value: Any, path: str) -> str:
    """The name of a tool.

    Raises:
        InvalidRequestError: it is missing, or not made of what names are made of.
    """
    if value is None:
        raise missing_parameter(path)
    if not isinstance(value, str):
        raise wrong_type(path, "a string")
    if not _TOOL_NAME.fullmatch(value):
        raise invalid_value(path, "expected up to 128 letters, digits, '_' or '-'.")
    return value


def refuse(body: Any, names: Iterable[str], why: str) -> None:
    """Refuse fields that would change the answer in a way not offered here.

    Null, false and empty values pass.

    Raises:
        UnsupportedError: naming the first such field.
    """
    for name in names:
        value = getattr(body, name)
        if value is None or value is False or value in ("", [], {}):
            continue
        raise UnsupportedError(f"Unsupported parameter: '{name}' {why}.", param=name)


def check_token_ids(name: str, token_ids: Sequence[int] | None, vocab_size: int) -> None:
    """Refuse ids outside the vocabulary.

    Raises:
        InvalidRequestError: naming the field and the id.
    """
    if not token_ids:
        return
    for token_id in (min(token_ids), max(token_ids)):
        if not 0 <= token_id < vocab_size:
            raise invalid_value(
                name,
                f"{shown_number(token_id)} is not a token id of this model, whose vocabulary has "
                f"{vocab_size} tokens.",
            )


def logit_bias_of(value: dict[str, float] | None, vocab_size: int) -> dict[int, float] | None:
    """`logit_bias` with numbers as keys.

    Raises:
        InvalidRequestError: a key that is no token id of this model.
    """
    if not value:
        return None
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 18):
            raise InvalidRequestError(
                f"Invalid key in 'logit_bias': '{key[:32]}'. Keys are token ids, written as "
                "strings.",
                param="logit_bias",
                code="invalid_value",
            )
        check_token_ids("logit_bias", (int(key),), vocab_size)
        biases[int(key)] = bias
    return biases
