"""The gateway's fields of a call, and what answers say of it."""

from __future__ import annotations

from typing import Any

import pytest
from parrot_client.fields import (
    ESSENTIAL_FIELDS,
    FIELDS,
    REFERENCE,
    REFERENCE_START,
    answer_metadata,
    merge_fields,
    take_fields,
)

from parrot_gateway.api.semantic.fields import FIELDS as FIELDS_BY_HEADER


def test_the_gateway_knows_every_field() -> None:
    assert set(FIELDS) <= set(FIELDS_BY_HEADER.values())
    assert set(ESSENTIAL_FIELDS) <= set(FIELDS)


def test_fields_are_taken_out_of_arguments() -> None:
    arguments = {"session": "s", "temperature": 0, "defer": None}
    assert take_fields(arguments) == {"session": "s", "defer": None}
    assert arguments == {"temperature": 0}


@pytest.mark.parametrize(
    ("layers", "merged"),
    [
        ([{"session": "a"}, {"session": "b"}], {"session": "b"}),
        ([{"session": "a"}, {"session": None}], {"session": "a"}),
        ([{"defer": True}, {"defer": False}], {}),
        ([{"defer": False}, {"defer": True}], {"defer": True}),
        ([{"priority": 0, "dedupe": False, "output": None}], {"priority": 0, "dedupe": False}),
        ([], {}),
    ],
)
def test_the_last_layer_that_says_something_counts(
    layers: list[dict[str, Any]], merged: dict[str, Any]
) -> None:
    assert merge_fields(*layers) == merged


def test_headers_of_an_answer() -> None:
    headers = {
        "x-parrot-session": "ses_1",
        "x-parrot-call": "call_1",
        "x-parrot-cached-tokens": "12",
        "x-parrot-queue-ms": "1.5",
        "x-request-id": "r",
    }
    assert answer_metadata(headers) == {
        "session": "ses_1",
        "call": "call_1",
        "cached_tokens": 12,
        "queue_ms": 1.5,
    }
    assert answer_metadata({"x-request-id": "r"}) == {}


def test_references_in_texts() -> None:
    text = "a [[parrot:vyc7znafmb3jqvl6xx4gyph2iham5tf]] b [[parrot:]] [[other:x]]"
    assert REFERENCE.findall(text) == ["[[parrot:vyc7znafmb3jqvl6xx4gyph2iham5tf]]"]
    assert REFERENCE.findall(text)[0].startswith(REFERENCE_START)
