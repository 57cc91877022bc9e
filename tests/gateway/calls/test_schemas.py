"""Objects that list their properties have no others; whatever says something of them is kept."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from parrot_gateway.calls.schemas import as_meant

A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
B: dict[str, Any] = {"type": "object", "properties": {"b": {"type": "integer"}}}
SHUT = {"additionalProperties": False}


def test_objects_are_closed_wherever_they_are() -> None:
    schema = {
        "type": "object",
        "properties": {
            "one": A,
            "many": {"type": "array", "items": B},
            "pair": {"type": "array", "prefixItems": [A, B]},
            "either": {"anyOf": [A, {"type": "null"}]},
            "named": {"$ref": "#/$defs/node"},
            "map": {"type": "object", "additionalProperties": A},
        },
        "$defs": {"node": {"properties": {"next": {"$ref": "#/$defs/node"}}}},
    }
    given = copy.deepcopy(schema)
    assert as_meant(schema) == {
        "type": "object",
        "properties": {
            "one": A | SHUT,
            "many": {"type": "array", "items": B | SHUT},
            "pair": {"type": "array", "prefixItems": [A | SHUT, B | SHUT]},
            "either": {"anyOf": [A | SHUT, {"type": "null"}]},
            "named": {"$ref": "#/$defs/node"},
            "map": {"type": "object", "additionalProperties": A | SHUT},
        },
        "$defs": {"node": {"properties": {"next": {"$ref": "#/$defs/node"}}, **SHUT}},
        **SHUT,
    }
    assert schema == given


@pytest.mark.parametrize(
    "schema",
    [
        A | {"additionalProperties": True},
        A | {"additionalProperties": {"type": "integer"}},
        A | {"patternProperties": {"^x": {"type": "integer"}}},
        A | {"unevaluatedProperties": False},
        A | {"propertyNames": {"pattern": "^[a-z]$"}},
        A | {"required": ["a", "unlisted"]},
        A | {"minProperties": 2},
        {"type": "object"},
        {"type": "string"},
        {},
        {"enum": [{"properties": {"a": {}}}], "default": {"properties": {}}},
        {"properties": {"a": {}}, "not": A} | SHUT,
    ],
)
def test_these_stay_as_they_are(schema: dict[str, Any]) -> None:
    assert as_meant(schema) == schema


def test_an_object_without_properties_listed_none() -> None:
    assert as_meant({"type": "object", "properties": {}}) == {
        "type": "object",
        "properties": {},
        **SHUT,
    }


@pytest.mark.parametrize(
    "whole",
    [
        {"allOf": [A, B]},
        {"allOf": [{"$ref": "#/$defs/a"}, B]},
        A | {"allOf": [B]},
        A | {"$ref": "#/$defs/b"},
        A | {"anyOf": [B, {"required": ["c"]}]},
        {"allOf": [{"anyOf": [A, {"type": "null"}]}, {"oneOf": [B]}]},
        {"$ref": "#/$defs/c", "properties": {"d": {}}},
    ],
)
def test_parts_of_a_whole_do_not_exclude_one_another(whole: dict[str, Any]) -> None:
    definitions = {"a": A, "b": B, "c": {"allOf": [{"$ref": "#/$defs/a"}]}}
    # As decoded from JSON: no object is shared.
    schema = json.loads(json.dumps({"type": "array", "items": whole, "$defs": definitions}))
    assert "additionalProperties" not in str(as_meant(schema)["items"])
    referred = {name for name in definitions if f"#/$defs/{name}" in str(whole)}
    if "c" in referred:
        referred.add("a")
    for name, made in as_meant(schema)["$defs"].items():
        if "properties" in made:
            assert ("additionalProperties" in made) == (name not in referred)


def test_one_part_that_lists_properties_is_closed() -> None:
    """Pydantic writes a field with a default like this."""
    schema = {
        "type": "object",
        "properties": {"x": {"allOf": [{"$ref": "#/$defs/a"}], "default": {}}},
        "$defs": {"a": A},
        "anyOf": [{"required": ["x"]}, {"required": []}],
    }
    closed = as_meant(schema)
    assert closed["additionalProperties"] is False
    assert closed["$defs"]["a"] == A | SHUT


def test_a_reference_to_itself_ends() -> None:
    schema: dict[str, Any] = {"$ref": "#", "allOf": [{"$ref": "#"}, {"$ref": "#/nowhere/0"}]}
    assert as_meant(schema) == schema
