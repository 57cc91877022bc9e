"""Output that conforms to a grammar: `response_format`, vLLM's `structured_outputs` and its older
`guided_*` fields, SGLang's `json_schema`, `regex` and `ebnf`, as one `Grammar` for the engine.

Shapes are checked here, so that errors name the field; whether a schema can be followed is known
to the engine's library only, whose message then names the place in the schema.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from parrot_engine.protocol import EngineInfo, Grammar

from parrot_gateway.calls.requests.field_checks import nested_too_deeply
from parrot_gateway.calls.requests.types import SamplingFields
from parrot_gateway.calls.schema_formats import unknown_formats
from parrot_gateway.calls.schemas import as_meant
from parrot_gateway.exceptions import (
    InvalidRequestError,
    UnsupportedError,
    invalid_value,
    missing_parameter,
    mutually_exclusive,
    unsupported_value,
    wrong_type,
)

#: Bytes of a grammar, as in the engine.
MAX_GRAMMAR_BYTES = 256 * 1024
MAX_CHOICES = 4096
#: Of a schema.
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_FORMATS = ("text", "json_object", "json_schema")
#: vLLM's fields on how a constraint is followed, of which only the usual way is offered.
_DETAILS = ("disable_fallback", "disable_any_whitespace", "whitespace_pattern",
            "structural_tag")  # fmt: skip
#: vLLM's field by which objects are closed; here they are unless it is false.
_CLOSES = "disable_additional_properties"
_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice",
           "guided_grammar": "grammar"}  # fmt: skip
#: SGLang's fields for the same.
_SGLANG = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}


def requested_grammar(body: SamplingFields, info: EngineInfo) -> tuple[Grammar | None, str]:
    """The grammar that the output has to follow, and the field that sets it.

    Raises:
        InvalidRequestError: a field is malformed, or two set a grammar.
        UnsupportedError: this model's engine follows no grammar.
    """
    found: dict[str, Grammar] = {}
    response_format = getattr(body, "response_format", None)
    grammar = grammar_of_format(response_format, "response_format")
    if grammar is not None:
        found["response_format"] = grammar
    if body.structured_outputs is not None:
        found["structured_outputs"] = _structured(body.structured_outputs)
    for name, kind in (_GUIDED | _SGLANG).items():
        value = getattr(body, name)
        if value is not None:
            found[name] = _constraint(kind, value, name)
    for name in found:
        # The same twice, under an older and a newer name, is what some clients send.
        if found[name] != next(iter(found.values())):
            raise mutually_exclusive(next(iter(found)), name)
    for name, requested in found.items():
        check_supported(info, name)
        if body.ignore_eos:
            raise InvalidRequestError(
                f"Mutually exclusive parameters: 'ignore_eos' and '{name}' cannot be used "
                "together: such an output ends where its grammar does.",
                param="ignore_eos",
                code="mutually_exclusive_parameters",
            )
        return requested, name
    return None, ""


def check_supported(info: EngineInfo, name: str) -> None:
    """Refuse a grammar that the model's engine cannot follow.

    Raises:
        UnsupportedError: naming the field that sets it.
    """
    if not info.supports_grammars:
        raise unsupported_value(
            name,
            f"'{name}' asks for structured output, which is not supported with this model: its "
            "engine follows no grammar.",
        )


def grammar_of_format(value: Any, param: str) -> Grammar | None:
    """The grammar of a chat's `response_format`; None for text.

    Args:
        value: as decoded from JSON.
        param: what the field is called.

    Raises:
        InvalidRequestError: it is none.
        UnsupportedError: a type that is not offered.
    """
    kind = _format_kind(value, param)
    if kind == "json_object":
        return Grammar("json_object")
    if kind == "json_schema":
        described = value.get("json_schema")
        if not isinstance(described, dict):
            name = f"{param}.json_schema"
            raise missing_parameter(name) if described is None else wrong_type(name, "an object")
        return _named_schema(described, f"{param}.json_schema")
    return None


def grammar_of_text_format(value: Any, param: str) -> Grammar | None:
    """The same for `text.format` of the Responses API, where a schema is not nested."""
    kind = _format_kind(value, param)
    if kind == "json_object":
        return Grammar("json_object")
    return _named_schema(value, param) if kind == "json_schema" else None


def schema_grammar(schema: Any, param: str, *, closes: bool = True) -> Grammar:
    """A JSON schema as a grammar.

    Args:
        closes: objects that list properties and say nothing of others have no others.

    Raises:
        InvalidRequestError: it is no object, or too long.
    """
    if not isinstance(schema, dict):
        raise wrong_type(param, "an object")
    try:
        text = msgspec.json.encode(as_meant(schema, closes=closes)).decode()
    except RecursionError:
        raise nested_too_deeply(param) from None
    check_size(text, param)
    return Grammar("json_schema", text)


def ignored_formats(schemas: Iterable[Any]) -> list[str]:
    """Names for `x-parrot-ignored` of the string formats without a meaning in some fields.

    Args:
        schemas: values of fields that hold schemas; a string may be one as JSON.
    """
    read = [_read_schema(value) if isinstance(value, str) else value for value in schemas]
    return [f"format:{name}" for name in unknown_formats(read)]


def _read_schema(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None


def check_size(text: str, param: str) -> None:
    """Refuse a grammar that is too long.

    Raises:
        InvalidRequestError: naming the field.
    """
    if len(text.encode(errors="replace")) > MAX_GRAMMAR_BYTES:
        raise InvalidRequestError(
            f"Invalid '{param}': longer than {MAX_GRAMMAR_BYTES} bytes.",
            param=param,
            code="string_above_max_length",
        )


def _format_kind(value: Any, param: str) -> str:
    if value is None:
        return "text"
    kind = value.get("type") if isinstance(value, dict) else None
    if kind in _FORMATS:
        return str(kind)
    if kind in ("structural_tag", "grammar"):
        raise unsupported_value(
            param,
            f"'{param}' of type '{kind}' is not supported with this model; see "
            "'structured_outputs'.",
        )
    raise invalid_value(
        param, "expected an object whose 'type' is 'text', 'json_object' or 'json_schema'."
    )


def _named_schema(described: Mapping[str, Any], param: str) -> Grammar:
    name = described.get("name")
    if name is None:
        raise missing_parameter(f"{param}.name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise invalid_value(f"{param}.name", "expected up to 64 letters, digits, '_' or '-'.")
    strict = described.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise wrong_type(f"{param}.strict", "a boolean")
    schema = described.get("schema")
    if schema is None:
        return Grammar("json_object")
    return schema_grammar(schema, f"{param}.schema")


def _structured(value: Any) -> Grammar:
    """vLLM's `structured_outputs`: an object with one constraint."""
    param = "structured_outputs"
    if not isinstance(value, dict):
        raise wrong_type(param, "an object")
    closes = value.get(_CLOSES)
    if closes is not None and not isinstance(closes, bool):
        raise wrong_type(f"{param}.{_CLOSES}", "a boolean")
    given = {
        key: item
        for key, item in value.items()
        if item is not None and item is not False and key != _CLOSES
    }
    for key in given:
        if key in _DETAILS:
            raise UnsupportedError(
                f"Unsupported parameter: '{param}.{key}' is not supported with this model.",
                param=f"{param}.{key}",
            )
        if key not in ("json", "json_object", *_GUIDED.values()):
            raise InvalidRequestError(
                f"Unknown parameter: '{param}.{key[:64]}'.",
                param=f"{param}.{key[:64]}",
                code="unknown_parameter",
            )
    if len(given) != 1:
        raise invalid_value(
            param,
            "expected one of 'json', 'json_object', 'regex', 'choice' and 'grammar', but got "
            f"{len(given)}.",
        )
    ((kind, item),) = given.items()
    return _constraint(kind, item, f"{param}.{kind}", closes=closes is not False)


def _constraint(kind: str, value: Any, param: str, *, closes: bool = True) -> Grammar:
    if kind == "json_object":
        if value is not True:
            raise wrong_type(param, "a boolean")
        return Grammar("json_object")
    if kind == "json":
        if isinstance(value, str):
            try:
                value = msgspec.json.decode(value)
            except (msgspec.DecodeError, RecursionError):
                raise invalid_value(param, "the string is not valid JSON.") from None
        return schema_grammar(value, param, closes=closes)
    if kind == "choice":
        return Grammar("choice", msgspec.json.encode(_choices(value, param)).decode())
    if not isinstance(value, str) or not value:
        raise InvalidRequestError(
            f"Invalid '{param}': expected a string that is not empty.",
            param=param,
            code="invalid_type",
        )
    check_size(value, param)
    return Grammar("regex" if kind == "regex" else "lark", value)


def _choices(value: Any, param: str) -> list[str]:
    if (
        not isinstance(value, list)
        or not 0 < len(value) <= MAX_CHOICES
        or not all(isinstance(item, str) and item for item in value)
    ):
        raise invalid_value(
            param, f"expected an array of 1 to {MAX_CHOICES} strings, none of them empty."
        )
    check_size("".join(value), param)
    return value
