"""Errors of an upstream through the gateway: exceptions, and how often the work is done.

The gateway and the client retry by the same rules; together they must not do more than one of
them alone. The calls that arrive at the upstream are counted.
"""

from __future__ import annotations

import asyncio

import openai
import pytest
from harness.openai_client import Driver, collect, first_of, result
from harness.processes import GatewayProcess
from harness.scripted_upstream import (
    Answer,
    ScriptedUpstream,
    chat_document,
    chat_events,
    document,
    error,
    event_stream,
)

ASK = [{"role": "user", "content": "Hello."}]

#: Status, headers, calls at the upstream, exception: the client's own rules, without a gateway.
TABLE: list[tuple[int, dict[str, str], int, type[openai.APIStatusError]]] = [
    (400, {}, 1, openai.BadRequestError),
    (400, {"x_should_retry": "true"}, 3, openai.BadRequestError),
    (401, {}, 1, openai.AuthenticationError),
    (403, {}, 1, openai.PermissionDeniedError),
    (404, {}, 1, openai.NotFoundError),
    (408, {}, 3, openai.APIStatusError),
    (409, {}, 3, openai.ConflictError),
    (422, {}, 1, openai.UnprocessableEntityError),
    (429, {"retry_after_ms": "20"}, 3, openai.RateLimitError),
    (429, {"retry_after": "130"}, 1, openai.RateLimitError),
    (500, {}, 3, openai.InternalServerError),
    (529, {}, 3, openai.InternalServerError),
    (503, {"x_should_retry": "false"}, 1, openai.InternalServerError),
]


@pytest.mark.parametrize("prefix", ["scripted", "once"])
@pytest.mark.parametrize(("status", "headers", "calls", "exception"), TABLE)
async def test_the_work_is_done_as_often_as_without_a_gateway(
    through: Driver,
    upstream: ScriptedUpstream,
    prefix: str,
    status: int,
    headers: dict[str, str],
    calls: int,
    exception: type[openai.APIStatusError],
) -> None:
    if not any(name.startswith("retry_after") for name in headers):
        headers = {**headers, "retry_after_ms": "5"}  # nothing else than the waiting changes
    model = upstream.script(error(status, **headers))
    with pytest.raises(exception) as caught:
        await through.chat(model=f"{prefix}/{model}", messages=ASK)
    assert len(upstream.calls(model)) == calls
    failure = caught.value
    assert failure.status_code == status
    assert failure.code == f"scripted_{status}"
    assert failure.body == {
        "message": f"scripted {status}",
        "type": "scripted_error",
        "param": None,
        "code": f"scripted_{status}",
    }
    assert failure.request_id.startswith("req_")


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
async def test_exhausted_retries_tell_the_client_not_to_repeat(
    through: Driver, upstream: ScriptedUpstream, status: int
) -> None:
    model = upstream.script(error(status))
    with pytest.raises(openai.APIStatusError) as caught:
        await through.chat(model=model, messages=ASK, stream=True)
    assert caught.value.response.headers["x-should-retry"] == "false"
    calls = upstream.calls(model)
    assert len(calls) == 3
    assert {call.headers["x-stainless-retry-count"] for call in calls} == {"0"}


async def test_a_retry_that_succeeds_is_not_seen(
    through: Driver, upstream: ScriptedUpstream
) -> None:
    model = upstream.script(error(503), error(429), document(chat_document("At last.")))
    answer = await through.chat(model=model, messages=ASK)
    assert answer.choices[0].message.content == "At last."
    assert len(upstream.calls(model)) == 3


async def test_retry_after_of_the_upstream_reaches_the_client(
    through: Driver, upstream: ScriptedUpstream
) -> None:
    model = upstream.script(error(429, retry_after="130", x_ratelimit_reset_requests="6m0s"))
    with pytest.raises(openai.RateLimitError) as caught:
        await through.chat(model=model, messages=ASK)
    headers = caught.value.response.headers
    assert headers["retry-after"] == "130"
    assert headers["x-ratelimit-reset-requests"] == "6m0s"


async def test_an_upstream_that_is_down(through: Driver, relay: GatewayProcess) -> None:
    before = relay.health()["calls"]["accepted"]
    with pytest.raises(openai.InternalServerError) as caught:
        await through.chat(model="dead/model", messages=ASK)
    assert caught.value.status_code == 502
    assert caught.value.code == "upstream_error"
    assert "127.0.0.1" not in str(caught.value)
    assert relay.health()["calls"]["accepted"] == before + 1


async def test_an_upstream_that_is_silent(through: Driver, upstream: ScriptedUpstream) -> None:
    gate = upstream.gate()
    model = upstream.script(document(chat_document(), before=gate))
    with pytest.raises(openai.InternalServerError) as caught:
        await through.chat(model=f"hasty/{model}", messages=ASK)
    assert caught.value.status_code == 504
    assert caught.value.code == "upstream_timeout"
    [call] = upstream.calls(model)
    assert await asyncio.to_thread(call.aborted.wait, 10)
    gate.open()


async def test_a_connection_that_breaks_before_the_answer_is_tried_again(
    through: Driver, upstream: ScriptedUpstream
) -> None:
    model = upstream.script(
        event_stream(cut=True), Answer(parts=(b"{",), cut=True, chunked=True),
        document(chat_document("Whole.")),
    )  # fmt: skip
    answer = await through.chat(model=model, messages=ASK)
    assert answer.choices[0].message.content == "Whole."


@pytest.mark.parametrize("break_off", ["cut", "end"])
async def test_a_stream_that_breaks_off_raises(
    through: Driver, upstream: ScriptedUpstream, break_off: str
) -> None:
    model = upstream.script(event_stream(*chat_events(["One", "two"])[:2], cut=break_off == "cut"))
    stream = await through.chat(model=model, messages=ASK, stream=True)
    with pytest.raises(openai.APIError) as caught:
        await collect(stream)
    assert caught.value.code == "upstream_error"
    assert len(upstream.calls(model)) == 1


async def test_a_stream_that_falls_silent_raises(
    through: Driver, upstream: ScriptedUpstream
) -> None:
    gate = upstream.gate()
    model = upstream.script(event_stream(*chat_events(["One"])[:2], gate))
    stream = await through.chat(model=f"hasty/{model}", messages=ASK, stream=True)
    with pytest.raises(openai.APIError) as caught:
        await collect(stream)
    assert caught.value.code == "upstream_timeout"
    gate.open()


async def test_an_error_event_of_the_upstream_raises(
    through: Driver, upstream: ScriptedUpstream
) -> None:
    failure = b'data: {"error": {"message": "no", "type": "t", "param": null, "code": "boom"}}\n\n'
    model = upstream.script(event_stream(chat_events(["x"])[0], failure, b"data: [DONE]\n\n"))
    stream = await through.chat(model=model, messages=ASK, stream=True)
    with pytest.raises(openai.APIError) as caught:
        await collect(stream)
    assert caught.value.code == "boom"


async def test_closing_a_stream_aborts_it_at_the_upstream(
    through: Driver, upstream: ScriptedUpstream
) -> None:
    gate = upstream.gate()
    model = upstream.script(event_stream(*chat_events(["One"])[:2], gate))
    stream = await through.chat(model=model, messages=ASK, stream=True)
    await first_of(stream)
    await result(stream.close())
    [call] = upstream.calls(model)
    assert await asyncio.to_thread(call.aborted.wait, 10)
    assert not call.completed.is_set()


async def test_what_the_caller_sends_reaches_the_upstream(
    through: Driver, upstream: ScriptedUpstream
) -> None:
    model = upstream.script(document(chat_document()))
    await through.chat(
        model=model,
        messages=ASK,
        extra_body={"guided_regex": "a+", "parrot": {"session": "s"}, "cache_salt": "x"},
        extra_headers={"X-Custom": "yes", "X-Parrot-Session": "s"},
    )
    [call] = upstream.calls(model)
    assert call.json == {
        "model": model, "messages": ASK, "guided_regex": "a+", "cache_salt": "x"
    }  # fmt: skip
    assert call.headers["x-custom"] == "yes"
    assert "x-parrot-session" not in call.headers
    # Neither the gateway nor this upstream has a key of its own.
    assert call.headers["authorization"] == "Bearer the caller's own key"
