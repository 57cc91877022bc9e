"""Errors of the gateway itself, as exceptions of the real client."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest
from harness.openai_client import Driver, Kind, result
from harness.processes import DEMO_MODEL, GatewayProcess

ASK = [{"role": "user", "content": "Hello."}]


WITH_THE_WRONG_KEY: dict[str, Callable[[Driver], Awaitable[Any]]] = {
    "completion": lambda api: api.complete(model=DEMO_MODEL, prompt="x"),
    "stream": lambda api: api.stream_chat(model=DEMO_MODEL, messages=ASK),
    "model": lambda api: result(api.client.models.retrieve(DEMO_MODEL)),
}


@pytest.mark.parametrize("ask", WITH_THE_WRONG_KEY.values(), ids=WITH_THE_WRONG_KEY)
async def test_wrong_key(
    kind: Kind, demo: GatewayProcess, ask: Callable[[Driver], Awaitable[Any]]
) -> None:
    accepted = demo.health()["calls"]["accepted"]
    driver = Driver(kind, demo.base_url, "sk-wrong")
    with pytest.raises(openai.AuthenticationError) as caught:
        await ask(driver)
    await driver.close()
    assert caught.value.code == "invalid_api_key"
    assert caught.value.type == "invalid_request_error"
    assert caught.value.request_id
    assert "sk-wrong" not in str(caught.value)
    assert demo.health()["calls"]["accepted"] == accepted


@pytest.mark.parametrize("stream", [False, True])
async def test_unknown_model(api: Driver, stream: bool) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await api.chat(model="gpt-unknown", messages=ASK, stream=stream)
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
    assert DEMO_MODEL in caught.value.message
    assert caught.value.request_id.startswith("req_")


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("temperature", {"temperature": 3}),
        ("top_p", {"top_p": -0.1}),
        ("n", {"n": 0}),
        ("max_completion_tokens", {"max_completion_tokens": 0}),
        ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
        ("frequency_penalty", {"frequency_penalty": -2.5}),
        ("stop", {"stop": ["a", "b", "c", "d", "e"]}),
        ("logit_bias", {"logit_bias": {"0": 101}}),
        ("messages", {"messages": []}),
        ("messages[0].role", {"messages": [{"role": "wizard", "content": "x"}]}),
        ("temperature", {"temperature": "hot"}),
        ("stream_options", {"stream_options": {"include_usage": True}}),
    ],
)
async def test_a_bad_field_is_named(api: Driver, param: str, body: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await api.chat(**{"model": DEMO_MODEL, "messages": ASK, "max_tokens": 2, **body})
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert caught.value.request_id


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("logprobs", {"logprobs": 6}),
        ("best_of", {"best_of": 1, "n": 2}),
        ("best_of", {"best_of": 2, "stream": True}),
        ("max_tokens", {"max_tokens": -1}),
        ("prompt", {"prompt": [[1, 2], "x"]}),
        ("prompt", {"prompt": [-1]}),
        ("prompt", {"prompt": []}),
    ],
)
async def test_a_bad_field_of_a_completion_is_named(
    api: Driver, param: str, body: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await api.complete(**{"model": DEMO_MODEL, "prompt": "x", "max_tokens": 2, **body})
    assert caught.value.param == param


TOO_LONG: dict[str, Callable[[Driver, int], Awaitable[Any]]] = {
    "completion": lambda api, limit: api.complete(
        model=DEMO_MODEL, prompt=[5] * 8, max_tokens=limit
    ),
    "prompt": lambda api, limit: api.complete(model=DEMO_MODEL, prompt=[5] * (limit + 1)),
    "chat": lambda api, limit: api.chat(
        model=DEMO_MODEL, messages=[{"role": "user", "content": "word " * (limit + 1)}]
    ),
    "stream": lambda api, limit: api.stream_chat(
        model=DEMO_MODEL, messages=ASK, max_completion_tokens=limit
    ),
}


@pytest.mark.parametrize("ask", TOO_LONG.values(), ids=TOO_LONG)
async def test_too_long_for_the_context(
    api: Driver, ask: Callable[[Driver, int], Awaitable[Any]]
) -> None:
    model = await result(api.client.models.retrieve(DEMO_MODEL))
    limit = model.model_extra["max_model_len"]
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(api, limit)
    assert caught.value.code == "context_length_exceeded"
    assert str(limit) in caught.value.message


async def test_a_route_that_is_not_there(api: Driver) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await result(api.client.moderations.create(model=DEMO_MODEL, input="x"))
    assert caught.value.request_id
