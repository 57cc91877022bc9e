"""Errors are LangChain's and openai's at once, and their messages say what to do."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from harness.processes import GatewayProcess, closed_port
from harness.scripted_upstream import (
    Answer,
    ScriptedUpstream,
    chat_document,
    chunk,
    completion_document,
    data,
    document,
    event_stream,
)
from harness.scripted_upstream import error as scripted_error
from langchain_core import exceptions as core
from langchain_parrot import (
    ChatParrot,
    ParrotConnectionError,
    ParrotContextOverflowError,
    ParrotError,
    ParrotFeatureError,
    ParrotFieldError,
    ParrotLLM,
    ParrotStreamError,
    ParrotTimeoutError,
)

HELLO = "Hello"


def refused(message: str, status: int = 400, **fields: Any) -> Answer:
    """An error in OpenAI's shape."""
    body = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return document({"error": {**body, **fields}}, status)


async def raised(model: ChatParrot | ParrotLLM, how: str, **arguments: Any) -> Exception:
    """Return what a call raises, in each of four ways."""
    try:
        if how == "invoke":
            model.invoke(HELLO, **arguments)
        elif how == "ainvoke":
            await model.ainvoke(HELLO, **arguments)
        elif how == "stream":
            list(model.stream(HELLO, **arguments))
        else:
            [piece async for piece in model.astream(HELLO, **arguments)]
    except Exception as error:
        return error
    pytest.fail("nothing was raised")


HOW = pytest.mark.parametrize("how", ["invoke", "ainvoke", "stream", "astream"])
KIND = pytest.mark.parametrize("kind", [ChatParrot, ParrotLLM])


@KIND
@HOW
async def test_nothing_answers(kind: type[ChatParrot | ParrotLLM], how: str) -> None:
    url = f"http://127.0.0.1:{closed_port()}/v1"
    error = await raised(kind(model="m", base_url=url, max_retries=0), how)
    assert isinstance(error, ParrotConnectionError)
    assert isinstance(error, openai.APIConnectionError)
    assert isinstance(error, core.ModelConnectionError)
    assert error.is_retryable
    assert url in str(error)
    assert "parrot-gateway serve" in str(error)
    assert "PARROT_BASE_URL" in str(error)


@KIND
@HOW
async def test_a_wrong_key(
    gateway: GatewayProcess, kind: type[ChatParrot | ParrotLLM], how: str
) -> None:
    model = kind(model="m", base_url=gateway.base_url, api_key="wrong")  # type: ignore[arg-type]
    error = await raised(model, how)
    assert isinstance(error, openai.AuthenticationError)
    assert isinstance(error, core.ModelAuthenticationError)
    assert (error.status_code, error.code) == (401, "invalid_api_key")
    assert "PARROT_API_KEY" in str(error)


@KIND
@HOW
async def test_an_unknown_model(
    demo: GatewayProcess, kind: type[ChatParrot | ParrotLLM], how: str
) -> None:
    model = kind(model="nobody", base_url=demo.base_url, api_key=demo.api_key)  # type: ignore[arg-type]
    error = await raised(model, how)
    assert isinstance(error, openai.NotFoundError)
    assert isinstance(error, core.ModelNotFoundError)
    assert "parrot-demo" in str(error)
    assert f"curl {demo.base_url}/models" in str(error)


async def test_a_base_url_without_v1(demo: GatewayProcess) -> None:
    model = ChatParrot(model="m", base_url=demo.root, api_key=demo.api_key)  # type: ignore[arg-type]
    error = await raised(model, "invoke")
    assert isinstance(error, openai.NotFoundError)
    assert "ends in /v1" in str(error)


@HOW
async def test_a_prompt_that_is_too_long(demo: GatewayProcess, how: str) -> None:
    model = ChatParrot(model="parrot-demo", base_url=demo.base_url, api_key=demo.api_key)  # type: ignore[arg-type]
    error = await raised(model.model_copy(update={"max_tokens": 1_000_000}), how)
    assert isinstance(error, ParrotContextOverflowError)
    assert isinstance(error, core.ContextOverflowError)
    assert isinstance(error, openai.BadRequestError)
    assert error.code == "context_length_exceeded"


def peer(upstream: ScriptedUpstream, *answers: Answer, **arguments: Any) -> ChatParrot:
    """A model at a server that is no Parrot Gateway."""
    return ChatParrot(
        **{
            "model": upstream.script(*answers),
            "base_url": upstream.base_url,
            "max_retries": 0,
            "linking": False,
            **arguments,
        }
    )


UNKNOWN = [
    refused("Unrecognized request argument supplied: parrot"),
    refused("Unknown parameter: 'parrot'.", param="parrot", code="unknown_parameter"),
    refused("Unknown field 'parrot.group'.", param="parrot.group", code="unknown_parameter"),
    refused("body.parrot: Extra inputs are not permitted", 422),
]


@pytest.mark.parametrize("answer", UNKNOWN)
@HOW
async def test_a_server_that_refuses_parrots_fields(
    upstream: ScriptedUpstream, answer: Answer, how: str
) -> None:
    error = await raised(peer(upstream, answer, group="g"), how)
    assert isinstance(error, ParrotFieldError)
    assert isinstance(error, ParrotFeatureError)
    assert isinstance(error, core.ModelInvalidRequestError)
    assert "no Parrot Gateway, or an older one" in str(error)
    assert "linking=False" in str(error)


async def test_a_model_named_parrot_is_no_field(upstream: ScriptedUpstream) -> None:
    answer = refused("Unknown parameter: 'min_q' of parrot-demo.", param="min_q")
    assert not isinstance(await raised(peer(upstream, answer), "invoke"), ParrotFeatureError)


@pytest.mark.parametrize(
    "fields", [{"output": "x"}, {"inputs": {"a": "b"}}, {"transform": "strip"}]
)
@HOW
async def test_a_server_that_passes_over_parrots_fields(
    upstream: ScriptedUpstream, fields: dict[str, Any], how: str
) -> None:
    answer = document(chat_document())
    if "stream" in how:
        answer = event_stream(data(chunk("m", {"content": "x"})), b"data: [DONE]\n\n")
    error = await raised(peer(upstream, answer), how, **fields)
    assert isinstance(error, ParrotFeatureError)
    assert f"passed over {next(iter(fields))}" in str(error)


def test_hints_that_a_server_passes_over_do_no_harm(upstream: ScriptedUpstream) -> None:
    model = peer(upstream, document(chat_document()), session="s", priority=1, objective="latency")
    assert model.invoke(HELLO).content == "Hello."


def test_an_answer_that_is_none(upstream: ScriptedUpstream) -> None:
    for answer in (document(b"<html>"), document({"object": "list"}), document([])):
        with pytest.raises(ParrotFeatureError, match=r"without choices.*ends in /v1"):
            peer(upstream, answer).invoke(HELLO)
    model = upstream.script(document({**completion_document(), "choices": []}))
    with pytest.raises(ParrotFeatureError, match="without choices"):
        ParrotLLM(model=model, base_url=upstream.base_url).invoke(HELLO)


@pytest.mark.parametrize(
    ("status", "of_openai", "of_langchain"),
    [
        (400, openai.BadRequestError, core.ModelInvalidRequestError),
        (403, openai.PermissionDeniedError, core.ModelPermissionDeniedError),
        (409, openai.ConflictError, ParrotError),
        (418, openai.APIStatusError, ParrotError),
        (429, openai.RateLimitError, core.ModelRateLimitError),
        (503, openai.InternalServerError, core.ModelAPIError),
        (504, openai.InternalServerError, core.ModelTimeoutError),
    ],
)
@HOW
async def test_every_status_is_an_error_of_both(
    upstream: ScriptedUpstream,
    status: int,
    of_openai: type[Exception],
    of_langchain: type[Exception],
    how: str,
) -> None:
    error = await raised(peer(upstream, scripted_error(status)), how)
    assert isinstance(error, of_openai)
    assert isinstance(error, of_langchain)
    assert isinstance(error, openai.APIStatusError)
    assert (error.status_code, error.code) == (status, f"scripted_{status}")
    assert f"scripted {status}." in str(error)
    assert isinstance(error.__cause__, openai.APIStatusError)


@HOW
async def test_no_answer_in_time(upstream: ScriptedUpstream, how: str) -> None:
    gate = upstream.gate()
    model = peer(upstream, document(chat_document(), before=gate), timeout=0.1)
    error = await raised(model, how)
    gate.open()
    assert isinstance(error, ParrotTimeoutError)
    assert isinstance(error, openai.APITimeoutError)
    assert isinstance(error, core.ModelTimeoutError)
    assert "timeout=" in str(error)


BEGINNING = data(chunk("m", {"role": "assistant", "content": "Once"}))
OVERFLOW = {"message": "too long", "type": "x", "param": None, "code": "context_length_exceeded"}


@pytest.mark.parametrize("how", ["stream", "astream"])
async def test_a_stream_that_breaks(upstream: ScriptedUpstream, how: str) -> None:
    error = await raised(peer(upstream, event_stream(BEGINNING, cut=True)), how)
    assert isinstance(error, ParrotError)
    assert isinstance(error, openai.APIError)


@pytest.mark.parametrize("how", ["stream", "astream"])
async def test_a_stream_that_tells_of_an_error(upstream: ScriptedUpstream, how: str) -> None:
    end = data({"error": {**OVERFLOW, "code": "engine_lost"}}), b"data: [DONE]\n\n"
    error = await raised(peer(upstream, event_stream(BEGINNING, *end)), how)
    assert isinstance(error, ParrotStreamError)
    assert isinstance(error, core.ModelAPIError)
    assert error.code == "engine_lost"
    end = data({"error": OVERFLOW}), b"data: [DONE]\n\n"
    error = await raised(peer(upstream, event_stream(BEGINNING, *end)), how)
    assert isinstance(error, core.ContextOverflowError)


def test_an_error_of_the_users_own_stays_what_it_is(upstream: ScriptedUpstream) -> None:
    model = peer(upstream, event_stream(BEGINNING, b"data: [DONE]\n\n"))
    stream = model.stream(HELLO)
    next(stream)
    with pytest.raises(ZeroDivisionError):
        stream.throw(ZeroDivisionError())  # type: ignore[attr-defined]


def test_failures_are_tried_again_as_often_as_said(upstream: ScriptedUpstream) -> None:
    model = peer(upstream, scripted_error(500), document(chat_document()), max_retries=1)
    assert model.invoke(HELLO).content == "Hello."
    assert len(upstream.calls(model.model)) == 2
