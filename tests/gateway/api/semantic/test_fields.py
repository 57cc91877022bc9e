"""Semantic fields: headers and body say the same things, and what nobody knows is named."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from parrot_scheduler.task import LATENCY

from parrot_gateway.api.semantic.fields import (
    FIELDS,
    Given,
    SemanticFields,
    may_be_semantic,
    read_fields,
)
from parrot_gateway.calls.requests.call import CallRequest
from parrot_gateway.exceptions import InvalidRequestError
from parrot_gateway.semantic.templates.reference import mint_variable_id, reference_of


def read(headers: dict[str, str] | None = None, parrot: Any = None) -> SemanticFields:
    raw = [(name.lower().encode(), text.encode()) for name, text in (headers or {}).items()]
    body = {"model": "m", **({} if parrot is None else {"parrot": parrot})}
    return read_fields(raw, fields_of(json.dumps(body).encode()))


def fields_of(body: bytes) -> dict[str, msgspec.Raw]:
    return CallRequest("chat", body).known_fields


def shown(fields: SemanticFields) -> dict[str, Any]:
    """Comparable: transforms by what was written."""
    transform = None if fields.transform is None else fields.transform.text
    names = ("session", "output", "inputs", "defer", "objective", "context", "priority", "dedupe")
    names += ("name", "run", "parent", "group")
    return {name: getattr(fields, name) for name in names} | {"transform": transform}


@pytest.mark.parametrize(
    ("header", "text", "field", "value"),
    [
        ("X-Parrot-Session", " my run ", "session", "my run"),
        ("X-Parrot-Session", "für später", "session", "für später"),
        ("X-Parrot-Output", "draft", "output", "draft"),
        ("X-Parrot-Input", "a=x, b = y", "inputs", {"a": "x", "b": "y"}),
        ("X-Parrot-Defer", "TRUE", "defer", True),
        ("X-Parrot-Defer", "0", "defer", False),
        ("X-Parrot-Objective", "latency", "objective", "latency"),
        ("X-Parrot-Transform", "strip | lower", "transform", "strip | lower"),
        ("X-Parrot-Context", "chat<main", "context", "chat<main"),
        ("X-Parrot-Priority", "-3", "priority", -3),
        ("X-Parrot-Dedupe", "false", "dedupe", False),
        ("X-Parrot-Name", "first draft", "name", "first draft"),
        ("X-Parrot-Run", "3f1c", "run", "3f1c"),
        ("X-Parrot-Parent", " step 2 ", "parent", "step 2"),
        ("X-Parrot-Group", "map:1", "group", "map:1"),
        ("X-Parrot-Group", "g" * 256, "group", "g" * 256),
    ],
)
def test_headers_and_body_say_the_same(header: str, text: str, field: str, value: Any) -> None:
    by_header, by_body = read({header: text}), read(parrot={field: value})
    assert shown(by_header) == shown(by_body)
    assert not by_header.is_empty or field == "defer"


def test_every_header_has_a_twin() -> None:
    for header, field in FIELDS.items():
        with pytest.raises(InvalidRequestError) as caught:
            read(parrot={field: []})
        assert caught.value.param == f"parrot.{field}"
        assert hasattr(SemanticFields(), field)
        assert header.startswith(b"x-parrot-")


def test_the_body_wins_field_by_field() -> None:
    fields = read(
        {"X-Parrot-Session": "h", "X-Parrot-Output": "h", "X-Parrot-Input": "x=h"},
        {"session": "b", "inputs": {"y": "b"}, "output": None},
    )
    assert (fields.session, fields.output, fields.inputs) == ("b", "h", {"y": "b"})


def test_inputs_may_be_given_as_texts_or_variables() -> None:
    reference = reference_of(mint_variable_id())
    inputs = {"a": {"value": ""}, "b": {"variable": "v"}, "c": reference}
    assert read(parrot={"inputs": inputs}).inputs == {"a": Given(""), "b": "v", "c": reference}


def test_repeated_input_headers_add_up() -> None:
    raw = [(b"x-parrot-input", b"a=1"), (b"x-parrot-input", b"b=2")]
    assert read_fields(raw, {}).inputs == {"a": "1", "b": "2"}


@pytest.mark.parametrize(
    ("headers", "parrot", "param"),
    [
        ({"X-Parrot-Sesion": "x"}, None, "X-Parrot-Sesion"),
        ({"X-Parrot-": "x"}, None, "X-Parrot-"),
        ({"X-Parrot-Defer": "maybe"}, None, "X-Parrot-Defer"),
        ({"X-Parrot-Priority": "1.5"}, None, "X-Parrot-Priority"),
        ({"X-Parrot-Priority": "9" * 30}, None, "X-Parrot-Priority"),
        ({"X-Parrot-Run": "r" * 257}, None, "X-Parrot-Run"),
        (None, {"parent": "p" * 257}, "parrot.parent"),
        (None, {"group": 1}, "parrot.group"),
        (None, {"group": ["a"]}, "parrot.group"),
        ({"X-Parrot-Input": "justaname"}, None, "X-Parrot-Input"),
        ({"X-Parrot-Input": "1a=x"}, None, "X-Parrot-Input"),
        ({"X-Parrot-Input": "a="}, None, "X-Parrot-Input"),
        ({"X-Parrot-Objective": "soon"}, None, "X-Parrot-Objective"),
        ({"X-Parrot-Transform": "eval(x)"}, None, "transform"),
        (None, {"sesion": "x"}, "parrot.sesion"),
        (None, "session", "parrot"),
        (None, ["session"], "parrot"),
        (None, {"session": 1}, "parrot.session"),
        (None, {"session": " "}, "parrot.session"),
        (None, {"defer": 1}, "parrot.defer"),
        (None, {"priority": True}, "parrot.priority"),
        (None, {"priority": 10**9}, "parrot.priority"),
        (None, {"inputs": {"a": 1}}, "parrot.inputs.a"),
        (None, {"inputs": {"a": {"value": 1}}}, "parrot.inputs.a"),
        (None, {"inputs": {"a": {"value": "x", "variable": "y"}}}, "parrot.inputs.a"),
        (None, {"inputs": {"a b": "x"}}, "parrot.inputs"),
        (None, {"inputs": {f"a{n}": "x" for n in range(1025)}}, "parrot.inputs"),
        (None, {"objective": "ttft=200"}, "parrot.objective"),
    ],
)
def test_what_is_not_understood_is_named(
    headers: dict[str, str] | None, parrot: Any, param: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read(headers, parrot)
    assert caught.value.param == param
    assert caught.value.status == 400


def test_a_header_given_twice_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="twice"):
        read_fields([(b"x-parrot-output", b"a"), (b"x-parrot-output", b"b")], {})


@pytest.mark.parametrize("value", [None, {}, {"session": None}])
def test_nothing_is_nothing(value: Any) -> None:
    assert read(parrot=value).is_empty
    assert read({"X-Parrot-Session": ""}).is_empty


@pytest.mark.parametrize("body", [b"", b"[]", b'{"parrot"', b'"parrot"', b'{"x": "\\"parrot\\""}'])
def test_bodies_that_are_none_say_nothing(body: bytes) -> None:
    assert read_fields([], fields_of(body)).is_empty


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5))
def test_nonsense_is_an_error_of_the_client(value: Any) -> None:
    for field in FIELDS.values():
        # Anything else than an error of the client's would fail the test.
        with suppress(InvalidRequestError):
            read(parrot={field: value})


@pytest.mark.parametrize(
    ("headers", "body", "expected"),
    [
        ([], b'{"model": "parrot-demo", "prompt": "a parrot: [[x]]"}', False),
        ([(b"authorization", b"x")], b"{}", False),
        ([(b"x-parrot-defer", b"1")], b"{}", True),
        ([(b"x-parrot-unknown", b"1")], b"{}", True),
        ([], b'{"parrot": {}}', True),
        ([], b'{"prompt": "[[parrot:x]]"}', True),
        ([], b'{"prompt": "\\u005b\\u005bparrot:x]]"}', True),
    ],
)
def test_ordinary_requests_are_told_apart(
    headers: list[tuple[bytes, bytes]], body: bytes, expected: bool
) -> None:
    assert may_be_semantic(headers, body) is expected


def test_latency_is_read() -> None:
    assert read({"X-Parrot-Objective": "Latency"}).objective == LATENCY
