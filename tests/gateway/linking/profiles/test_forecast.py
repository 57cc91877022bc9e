"""Forecasts are found by the beginnings of prompts, for each tenant apart."""

from __future__ import annotations

from zlib import crc32

import msgspec

from parrot_gateway.linking.profiles.forecast import Forecast, Forecasts, TemplateForecast
from parrot_gateway.linking.profiles.templates import Template, prompt_of, step_of


def body(*texts: str, **more: object) -> bytes:
    messages = [{"role": "user", "content": text} for text in texts]
    return msgspec.json.encode({"model": "model", "messages": messages, **more})


def template(text: bytes, key: str) -> Template:
    return Template(key, len(text), crc32(text), crc32(text[: step_of(len(text))]))


def known(text: bytes, key: str, weight: float = 10.0) -> TemplateForecast:
    return TemplateForecast(template(text, key), Forecast(key, weight))


def beginning(text: str) -> bytes:
    """The prompt of a body up to the end of `text`."""
    return prompt_of(body(text)).split(b'"}]')[0]


def test_the_longest_template_that_is_known_well_counts() -> None:
    forecasts = Forecasts()
    short, long = beginning("Summarise"), beginning("Summarise this for a child: " * 9)
    forecasts.update("ada", [known(short, "short"), known(long, "long", weight=2.0)])
    call = body("Summarise this for a child: " * 10)
    found = forecasts.of("ada", call)
    assert found is not None
    assert found.template == "short"
    forecasts.update("ada", [known(long, "long", weight=8.0)])
    found = forecasts.of("ada", call)
    assert found is not None
    assert found.template == "long"
    forecasts.update("ada", [], ["short"])
    assert forecasts.of("ada", body("Summarise that")) is None
    assert forecasts.of("ada", call) is not None
    forecasts.update("ada", [], ["long"])
    assert forecasts.of("ada", call) is None


def test_a_template_known_little_counts_where_there_is_no_other() -> None:
    forecasts = Forecasts()
    forecasts.update("ada", [known(beginning("Hello"), "hello", weight=1.0)])
    found = forecasts.of("ada", body("Hello there"))
    assert found is not None
    assert found.weight == 1.0


def test_tenants_share_nothing() -> None:
    forecasts = Forecasts()
    forecasts.update("ada", [known(beginning("Hello"), "hello")])
    assert forecasts.of("bob", body("Hello")) is None


def test_what_stands_before_the_prompt_does_not_count() -> None:
    assert prompt_of(body("Hi")) == prompt_of(body("Hi").replace(b'"model"', b'"other-model"'))
    responses = b'{"input": "What is this?", "instructions": "You are kind."}'
    assert prompt_of(responses) == b'"instructions": "You are kind."}'
    quoted = body('"system": no key, "messages": neither')
    assert prompt_of(quoted).startswith(b'"messages":')
    for garbage in (b"", b"{}", b"\xff" * 99, b'{"n": 1}'):
        assert prompt_of(garbage) == b""
