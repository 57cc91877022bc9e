"""Advice that clients add to errors of the gateway."""

from __future__ import annotations

import inspect

import pytest
from parrot_client import errors
from parrot_client.errors import advice_for, sentence

from parrot_gateway import exceptions

URL = "http://gateway/v1"


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (401, "invalid_api_key", "PARROT_API_KEY"),
        (401, "a_code_of_an_upstream", "PARROT_API_KEY"),
        (401, None, "PARROT_API_KEY"),
        (404, None, "ends in /v1"),
        (404, "unknown_route", "ends in /v1"),
        (404, "model_not_found", f"curl {URL}/models"),
        (404, "variable_not_found", "sessions.ttl_s"),
        (424, "dependency_failed", "/v1/sessions/{session}/graph"),
        (None, "dependency_failed", "run the deferred call again"),
        (504, "timeout", "server.call_timeout_s"),
    ],
)
def test_advice(status: int | None, code: str | None, words: str) -> None:
    advice = advice_for(status, code, URL)
    assert advice is not None
    assert words in advice
    assert "{base_url}" not in advice


@pytest.mark.parametrize(("status", "code"), [(404, "of_an_upstream"), (429, None), (500, "x")])
def test_some_errors_have_none(status: int, code: str | None) -> None:
    assert advice_for(status, code, URL) is None


def test_every_code_is_one_of_the_gateway() -> None:
    source = inspect.getsource(exceptions)
    others = {"unknown_route", "no_text", "transform_failed"}
    assert [code for code in errors._BY_CODE if code not in source and code not in others] == []


@pytest.mark.parametrize("message", ["Sorry", "Sorry.", "Sorry!", "Sorry?"])
def test_a_message_that_another_sentence_can_follow(message: str) -> None:
    assert sentence(message)[-1] in ".!?"
    assert sentence(message).rstrip(".") == message.rstrip(".")
