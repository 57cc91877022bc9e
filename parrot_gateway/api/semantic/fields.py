"""The semantic fields of a request: `X-Parrot-*` headers, or `parrot` in the body.

The body wins, field by field. Unknown names are refused, so that a typing error never turns a
deferred call into an ordinary one. Reads only; the fields take effect in `calls`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import msgspec

from parrot_gateway.exceptions import InvalidRequestError
from parrot_gateway.linking.service import LINK_HEADER, wants_link
from parrot_gateway.semantic.call_spec import CallOptions, parse_objective
from parrot_gateway.semantic.session import check_name
from parrot_gateway.semantic.templates.reference import has_reference
from parrot_gateway.semantic.templates.text_template import is_placeholder_name
from parrot_gateway.semantic.transforms.transform import parse_transform

PREFIX = b"x-parrot-"
#: Asks for a stream that can be resumed; see `api.streams`.
RESUME_HEADER = b"x-parrot-resume"
MAX_PRIORITY = 1_000_000
#: Placeholders of one call.
MAX_INPUTS = 1024
#: Characters of `run`, `parent` and `group`, which are the client's own.
MAX_ID_CHARACTERS = 256


class Given(NamedTuple):
    """An input whose text came with the request."""

    value: str


#: A variable, as a name, an id or a reference; or a text.
Source: TypeAlias = str | Given


@dataclass(frozen=True, slots=True, kw_only=True)
class SemanticFields(CallOptions):
    """The fields of a request besides those of OpenAI."""

    session: str | None = None
    output: str | None = None
    inputs: Mapping[str, Source] = field(default_factory=dict)
    defer: bool = False
    context: str | None = None
    resume: bool = False

    @property
    def is_empty(self) -> bool:
        """Return whether all have their defaults, but for `resume`, which is of the stream."""
        return replace(self, resume=False) == _NOTHING


_NOTHING = SemanticFields()

#: What every semantic body has in it, and hardly another. NOTE: one pass of the expression takes
#: half the time of `in`.
MARKER = re.compile(rb'parrot[":]')

_BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def may_be_semantic(headers: Iterable[tuple[bytes, bytes]], body: bytes) -> bool:
    """Guess whether a request is semantic, by one look at header names and body bytes.

    No semantic request is missed; some that only look like one are seen through later.
    """
    if MARKER.search(body) is not None and (b'"parrot"' in body or has_reference(body)):
        return True
    # NOTE: a loop takes half the time of `any` and a generator, and every call comes by here.
    for name, _ in headers:  # noqa: SIM110
        if name.startswith(PREFIX):
            return True
    return False


def read_fields(
    headers: Iterable[tuple[bytes, bytes]], body: Mapping[str, msgspec.Raw]
) -> SemanticFields:
    """The semantic fields of a request.

    Args:
        headers: names in lower case.
        body: its fields, undecoded.

    Raises:
        InvalidRequestError: an unknown header or field, or a value that is not understood; names
            the header or the field.
    """
    values = _from_headers(headers)
    values.update(_from_body(body))
    return SemanticFields(**values)


def _from_headers(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for raw_name, raw in headers:
        if not raw_name.startswith(PREFIX):
            continue
        if raw_name == LINK_HEADER:
            wants_link(raw)
            continue
        title = raw_name.decode("latin-1").title()
        name = FIELDS.get(raw_name)
        if name is None:
            known = ", ".join(header.decode().title() for header in FIELDS)
            raise InvalidRequestError(
                f"Unknown header {title}. There are: {known}.", param=title, code="unknown_header"
            )
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            raise _wrong(title, "is not valid UTF-8") from None
        if not text.strip():
            continue
        if name == "inputs":
            values.setdefault("inputs", {}).update(_inputs_of_text(text, title))
            continue
        if name in values:
            raise _wrong(title, "is given twice")
        values[name] = _READERS[name](text, title)
    return values


def _inputs_of_text(text: str, title: str) -> dict[str, Source]:
    """`name=variable, name=variable`."""
    inputs: dict[str, Source] = {}
    for item in text.split(","):
        if not item.strip():
            continue
        name, equals, source = item.partition("=")
        name, source = name.strip(), source.strip()
        if not equals or not source:
            raise _wrong(title, f"needs 'name=variable, …', but has '{item.strip()[:80]}'")
        _add_input(inputs, name, source, title)
    return inputs


def _from_body(body: Mapping[str, msgspec.Raw]) -> dict[str, Any]:
    raw = bytes(body.get("parrot", b"null"))
    if raw == b"null":
        return {}
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError):
        raise InvalidRequestError("'parrot' is not valid JSON.", param="parrot") from None
    if not isinstance(fields, dict):
        raise _wrong("parrot", "must be an object")
    values: dict[str, Any] = {}
    for name, value in fields.items():
        param = f"parrot.{name}"
        if name not in _READERS:
            known = ", ".join(_READERS)
            raise InvalidRequestError(
                f"Unknown field '{param[:80]}'. There are: {known}.",
                param=param[:80],
                code="unknown_parameter",
            )
        if value is not None:
            values[name] = _READERS[name](value, param)
    return values


def _read_inputs(value: Any, param: str) -> dict[str, Source]:
    if isinstance(value, str):
        return _inputs_of_text(value, param)
    if not isinstance(value, dict):
        raise _wrong(param, "must be an object of name: variable")
    inputs: dict[str, Source] = {}
    for name, source in value.items():
        below = f"{param}.{name[:80]}"
        if isinstance(source, dict):
            if source.keys() == {"value"} and isinstance(source["value"], str):
                _add_input(inputs, name, Given(source["value"]), param)
                continue
            if source.keys() != {"variable"}:
                raise _wrong(below, 'must be a variable, {"variable": …} or {"value": text}')
            source = source["variable"]
        if not isinstance(source, str) or not source.strip():
            raise _wrong(below, 'must be a variable, {"variable": …} or {"value": text}')
        _add_input(inputs, name, source, param)
    return inputs


def _add_input(inputs: dict[str, Source], name: str, source: Source, param: str) -> None:
    if not is_placeholder_name(name):
        raise _wrong(
            param,
            f"has the name '{name[:80]}'; names of placeholders have ASCII letters, digits and _, "
            "and begin with no digit",
        )
    if name in inputs:
        raise _wrong(param, f"declares '{name}' twice")
    if len(inputs) >= MAX_INPUTS:
        raise _wrong(param, f"declares more than {MAX_INPUTS} placeholders")
    inputs[name] = source


def _read_text(value: Any, param: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise _wrong(param, "must be a text")
    return value.strip()


def _read_id(value: Any, param: str) -> str:
    text = _read_text(value, param)
    if len(text) > MAX_ID_CHARACTERS:
        raise _wrong(param, f"is longer than {MAX_ID_CHARACTERS} characters")
    return text


def _read_bool(value: Any, param: str) -> bool:
    if isinstance(value, bool):
        return value
    found = _BOOLEANS.get(value.strip().lower()) if isinstance(value, str) else None
    if found is None:
        raise _wrong(param, "must be true or false")
    return found


def _read_priority(value: Any, param: str) -> int:
    if isinstance(value, str) and len(value) < 16:
        try:
            value = int(value)
        except ValueError:
            value = None
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) > MAX_PRIORITY:
        raise _wrong(param, f"must be an integer from -{MAX_PRIORITY} to {MAX_PRIORITY}")
    return value


#: Reads the value of each field, of a header (a text) or of the body (any JSON value).
_READERS: Mapping[str, Callable[[Any, str], Any]] = {
    "session": _read_text,
    "output": _read_text,
    "inputs": _read_inputs,
    "defer": _read_bool,
    "objective": lambda value, param: parse_objective(_read_text(value, param), param),
    "transform": lambda value, param: parse_transform(_read_text(value, param)),
    "context": _read_text,
    "priority": _read_priority,
    "dedupe": _read_bool,
    "name": lambda value, param: check_name(_read_text(value, param), param),
    "run": _read_id,
    "parent": _read_id,
    "group": _read_id,
    "resume": _read_bool,
}

#: Body field of each header.
FIELDS: Mapping[bytes, str] = {
    PREFIX + (b"input" if name == "inputs" else name.encode()): name for name in _READERS
}


def _wrong(param: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param} {what}.", param=param, code="invalid_value")
