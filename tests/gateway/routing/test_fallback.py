"""Fallbacks: when another backend is tried, and what the client gets when all have failed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import pytest
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.serving import Service, serving
from harness.scripted_upstream import (
    LISTED_MODEL,
    Answer,
    ScriptedUpstream,
    chat_document,
    chat_events,
    document,
    error,
    event_stream,
)

from parrot_gateway.settings.model import UpstreamSettings

CHAT = {"messages": [{"role": "user", "content": "Hello."}]}
PATH = "/v1/chat/completions"
OK = document(chat_document("from the fallback"))
OK_STREAM = event_stream(*chat_events(["from", " the", " fallback"]))
ROLE, WORD, *_ = chat_events(["One"])


class Chain:
    """A gateway before upstreams `a`, `b` and so on, each the fallback of the one before."""

    def __init__(self, service: Service, upstreams: list[ScriptedUpstream]) -> None:
        self.service = service
        self.upstreams = upstreams

    def script(self, *answers: Answer | list[Answer]) -> None:
        """The answers of each upstream."""
        for upstream, answer in zip(self.upstreams, answers, strict=True):
            upstream.script_listed(*(answer if isinstance(answer, list) else [answer]))

    async def ask(self, path: str = PATH, **fields: Any) -> tuple[int, dict[str, str], bytes]:
        body = {"model": "a", **CHAT, **fields}
        status, headers, answer = await self.service.post(path, body)
        return status, {name.decode(): value.decode() for name, value in headers.items()}, answer

    def calls(self) -> list[int]:
        """How often each upstream was called."""
        return [len(upstream.received) for upstream in self.upstreams]


@asynccontextmanager
async def chain(
    engine: ScriptedRemoteEngine, count: int = 2, last: str | None = None, **settings: Any
) -> AsyncIterator[Chain]:
    """The gateway; `last` is the fallback of the last upstream."""
    async with AsyncExitStack() as stack:
        upstreams = [stack.enter_context(ScriptedUpstream()) for _ in range(count)]
        names = "abcd"[:count]
        following = [*names[1:], last]
        given: dict[str, Any] = {
            "max_retries": 0, "backoff_s": 0.001, "breaker_failures": 1000,
            "forward_authorization": False, **settings,
        }  # fmt: skip
        entries = [
            UpstreamSettings(
                name=name,
                url=upstream.base_url,
                models=[upstream.models[0]],
                fallback=other,
                **given,
            )
            for name, other, upstream in zip(names, following, upstreams, strict=True)
        ]
        service = await stack.enter_async_context(serving(engine, upstreams=entries))
        for upstream in service.gateway.upstreams.values():
            await upstream.start()
            stack.push_async_callback(upstream.close)
        yield Chain(service, upstreams)


def refusal(status: int, message: str, code: str | None = None) -> Answer:
    fields = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return document({"error": fields}, status)


#: Answers that another backend is tried after, with the reason that the client gets to see.
ELSEWHERE: dict[str, tuple[Answer, str]] = {
    "500": (error(500), "server_error"),
    "501": (error(501), "server_error"),
    "html": (
        Answer(502, parts=(b"<html>Bad Gateway</html>",), content_type="text/html"),
        "server_error",
    ),
    "429": (error(429), "rate_limited"),
    "429 for long": (error(429, retry_after="3600"), "rate_limited"),
    "401": (error(401), "key_refused"),
    "403": (error(403), "key_refused"),
    "404": (error(404), "not_found"),
    "too long, by code": (refusal(400, "No.", "context_length_exceeded"), "context_length"),
    "too long for vllm": (
        refusal(400, "This model's maximum context length is 4096 tokens. However, …"),
        "context_length",
    ),
    "too long for sglang": (
        refusal(400, "The input (9 tokens) is longer than the model's context length (8 tokens)."),
        "context_length",
    ),
    "too long for llama.cpp": (
        refusal(400, "the request exceeds the available context size, try increasing it"),
        "context_length",
    ),
    "cut": (Answer(parts=(b'{"half":',), chunked=True, cut=True), "connection"),
    "an error with 200": (refusal(200, "overloaded"), "answer_error"),
}


@pytest.mark.parametrize("name", ELSEWHERE)
@pytest.mark.parametrize("stream", [False, True])
async def test_another_backend_answers(
    engine: ScriptedRemoteEngine, name: str, stream: bool
) -> None:
    async with chain(engine) as backends:
        answer, reason = ELSEWHERE[name]
        backends.script(answer, OK_STREAM if stream else OK)
        status, headers, body = await backends.ask(stream=stream)
        assert (status, backends.calls()) == (200, [1, 1])
        assert b"fallback" in body
        assert (headers["x-parrot-engine"], headers["x-parrot-tried"]) == ("b", f"a={reason}")


@pytest.mark.parametrize(
    "answer", [error(400), error(409), error(422), refusal(400, "Prefill is not supported.")]
)
async def test_a_refusal_of_the_request_is_told_at_once(
    engine: ScriptedRemoteEngine, answer: Answer
) -> None:
    async with chain(engine) as backends:
        backends.script(answer, OK)
        status, headers, body = await backends.ask()
        assert (status, body, backends.calls()) == (answer.status, answer.parts[0], [1, 0])
        assert "x-parrot-tried" not in headers


#: Streams that fail before their first content.
EMPTY_STREAMS: dict[str, Answer] = {
    "ended": event_stream(),
    "ended after a comment": event_stream(b": hello\n\n"),
    "ended after the role": event_stream(ROLE),
    "cut after the role": event_stream(ROLE, cut=True),
    "cut within an event": event_stream(ROLE, WORD[:20], cut=True),
    "only the end": event_stream(b"data: [DONE]\n\n"),
    "an error": event_stream(ROLE, b'data: {"error": {"message": "out of memory"}}\n\n'),
    "no json": event_stream(ROLE, b'data: {"choices": [}\n\n'),
}


@pytest.mark.parametrize("name", EMPTY_STREAMS)
async def test_a_stream_that_fails_before_its_first_content(
    engine: ScriptedRemoteEngine, name: str
) -> None:
    async with chain(engine) as backends:
        backends.script(EMPTY_STREAMS[name], OK_STREAM)
        status, headers, body = await backends.ask(stream=True)
        assert (status, body) == (200, b"".join(chat_events(["from", " the", " fallback"])))
        assert headers["x-parrot-engine"] == "b"
        assert headers["x-parrot-tried"] in ("a=connection", "a=answer_error")


async def test_what_has_begun_is_not_begun_again(engine: ScriptedRemoteEngine) -> None:
    async with chain(engine) as backends:
        backends.script(event_stream(ROLE, WORD, cut=True), OK_STREAM)
        status, headers, body = await backends.ask(stream=True)
        assert (status, backends.calls()) == (200, [1, 0])
        assert body.startswith(ROLE + WORD)
        assert b'"code":"upstream_error"' in body
        assert body.endswith(b"data: [DONE]\n\n")
        assert headers["x-parrot-engine"] == "a"


async def test_role_and_first_content_come_together(engine: ScriptedRemoteEngine) -> None:
    async with chain(engine) as backends:
        gate = backends.upstreams[0].gate()
        *begun, last, done = chat_events(["One"])
        backends.script(event_stream(*begun, gate, last, done), OK_STREAM)
        body = msgspec.json.encode({"model": "a", "stream": True, **CHAT})
        reader, writer = await backends.service.send(PATH, body)
        read = await reader.readuntil(WORD.strip())
        assert ROLE in read
        gate.open()
        assert b"[DONE]" in await reader.readuntil(b"[DONE]")
        writer.close()


async def test_an_empty_answer_is_an_answer(engine: ScriptedRemoteEngine) -> None:
    async with chain(engine) as backends:
        events = chat_events([])
        backends.script(event_stream(*events), OK_STREAM)
        _, headers, body = await backends.ask(stream=True)
        assert (body, headers["x-parrot-engine"]) == (b"".join(events), "a")


@pytest.mark.parametrize(
    "events",
    [
        [b'data: {"type":"response.created"}\n\n', b'data: {"type":"response.failed","response":'
         b'{"error":{"message":"no","code":"server_error"}}}\n\n'],
        [b'data: {"type":"response.created"}\n\n'],
    ],
)  # fmt: skip
async def test_responses_that_fail_before_their_first_content(
    engine: ScriptedRemoteEngine, events: list[bytes]
) -> None:
    async with chain(engine) as backends:
        whole = [
            b'data: {"type":"response.created"}\n\n',
            b'data: {"type":"response.output_text.delta","delta":"x"}\n\n',
            b'data: {"type":"response.completed","response":{}}\n\n',
        ]
        backends.script(event_stream(*events), event_stream(*whole))
        async with backends.service.client() as client:
            create = client.responses.with_raw_response.create
            answer = await create(model="a", input="x", stream=True)
            body = await answer.http_response.aread()
        assert (body, answer.headers["x-parrot-engine"]) == (b"".join(whole), "b")


# All fail


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        # The first that an upstream gave, and no refusal of what the first would perhaps take.
        ([error(500), error(503)], (500, "scripted_500")),
        ([error(500), error(400)], (500, "scripted_500")),
        ([error(429), error(404)], (429, "scripted_429")),
        ([refusal(400, "No.", "context_length_exceeded"), error(500)],
         (400, "context_length_exceeded")),
        ([event_stream(cut=True), error(429)], (429, "scripted_429")),
        ([error(401), error(500)], (500, "scripted_500")),
        ([error(401), error(400)], (502, "upstream_key_refused")),
        ([error(500), refusal(400, "No.", "context_length_exceeded")], (500, "scripted_500")),
    ],
)  # fmt: skip
async def test_the_error_that_is_told(
    engine: ScriptedRemoteEngine, answers: list[Answer], told: tuple[int, str]
) -> None:
    async with chain(engine) as backends:
        backends.script(*answers)
        status, headers, body = await backends.ask()
        assert (status, msgspec.json.decode(body)["error"]["code"]) == told
        assert backends.calls() == [1, 1]
        assert headers["x-parrot-tried"].count("=") == 2


async def test_the_bytes_of_the_first_refusal_come_back(engine: ScriptedRemoteEngine) -> None:
    async with chain(engine) as backends:
        raw = b'{ "error" : {"message":"busy",  "code":"busy", "x":1.0e0} }'
        backends.script(document(raw, 503, {"x-odd": "yes", "retry-after": "30"}), error(400))
        status, headers, body = await backends.ask()
        assert (status, body, headers["x-odd"]) == (503, raw, "yes")
        assert (headers["x-parrot-engine"], headers["retry-after"]) == ("a", "30")


async def test_the_shortest_wait_is_told(engine: ScriptedRemoteEngine) -> None:
    async with chain(engine) as backends:
        backends.script(error(429, retry_after="60"), error(429, retry_after="7"))
        status, headers, _ = await backends.ask()
        assert (status, headers["retry-after"]) == (429, "7")


async def test_an_open_breaker_tells_the_shortest_wait(engine: ScriptedRemoteEngine) -> None:
    settings = {"breaker_failures": 1, "breaker_open_s": 300.0}
    async with chain(engine, **settings) as backends:
        backends.script(error(500), [error(500, retry_after="5"), error(500)])
        await backends.ask()
        status, headers, body = await backends.ask()
        assert (status, msgspec.json.decode(body)["error"]["code"]) == (503, "upstream_unavailable")
        assert "'a'" in msgspec.json.decode(body)["error"]["message"]
        assert 0 < float(headers["retry-after"]) <= 300
        assert headers["x-parrot-tried"] == "a=unavailable, b=unavailable"
        assert backends.calls() == [1, 1]


# Chains


async def test_a_fallback_that_refuses_is_not_the_end(engine: ScriptedRemoteEngine) -> None:
    async with chain(engine, 3) as backends:
        backends.script(error(500), refusal(400, "Prefill is not supported."), OK)
        status, headers, _ = await backends.ask()
        assert (status, backends.calls()) == (200, [1, 1, 1])
        assert headers["x-parrot-tried"] == "a=server_error, b=refused"


async def test_a_circle_ends(engine: ScriptedRemoteEngine) -> None:
    async with chain(engine, 3, last="a") as backends:
        backends.script(error(500), error(502), error(503))
        status, _, _ = await backends.ask()
        assert (status, backends.calls()) == (500, [1, 1, 1])


@pytest.mark.parametrize("stream", [False, True])
async def test_own_engines_come_last(engine: ScriptedRemoteEngine, stream: bool) -> None:
    async with chain(engine, 1, last="m") as backends:
        backends.script(error(500))
        status, headers, body = await backends.ask(stream=stream)
        assert status == 200
        assert b"Hello" in body
        assert headers["x-parrot-tried"] == "a=server_error"
        assert headers["x-parrot-engine"]


async def test_an_own_engine_that_refuses_is_not_told(engine: ScriptedRemoteEngine) -> None:
    async with chain(engine, 1, last="m") as backends:
        backends.script(error(500))
        status, _, body = await backends.ask(temperature=1e9)
        assert (status, msgspec.json.decode(body)["error"]["code"]) == (500, "scripted_500")


async def test_messages_fall_back_as_well(engine: ScriptedRemoteEngine) -> None:
    async with chain(engine) as backends:
        backends.script(error(429), OK)
        status, headers, body = await backends.ask("/v1/messages", max_tokens=5)
        assert (status, msgspec.json.decode(body)["content"][0]["text"]) == (
            200,
            "from the fallback",
        )
        assert headers["x-parrot-engine"] == "b"
        backends.script(error(429), error(400))
        status, _, body = await backends.ask("/v1/messages", max_tokens=5)
        assert status == 429
        assert msgspec.json.decode(body)["error"]["type"] == "rate_limit_error"


async def test_a_callers_own_key_is_not_tried_elsewhere(engine: ScriptedRemoteEngine) -> None:
    async with chain(engine, forward_authorization=True) as backends:
        for status in (401, 403):
            backends.script(error(status), OK)
            assert (await backends.ask())[0] == status
        assert backends.calls() == [2, 0]


async def test_tokens_are_counted_by_the_fallback(engine: ScriptedRemoteEngine) -> None:
    path = "/v1/messages/count_tokens"
    async with chain(engine, api="anthropic") as backends:
        backends.script(error(429), document({"input_tokens": 7}))
        status, headers, body = await backends.ask(path, model=LISTED_MODEL)
        assert (status, body, headers["x-parrot-engine"]) == (200, b'{"input_tokens": 7}', "b")
        backends.script(error(500), error(500))
        assert (await backends.ask(path, model=LISTED_MODEL))[0] == 500
    async with chain(engine, 1, last="m", api="anthropic") as backends:
        backends.script(error(429))
        status, _, body = await backends.ask(path, model=LISTED_MODEL)
        assert (status, list(msgspec.json.decode(body))) == (200, ["input_tokens"])


async def test_errors_in_answers_do_not_open_the_breaker(engine: ScriptedRemoteEngine) -> None:
    async with chain(engine, breaker_failures=1, max_retries=2) as backends:
        backends.script(refusal(200, "no"), OK)
        for _ in range(3):
            assert (await backends.ask())[0] == 200
        # Nor are they tried again at the same server.
        assert backends.calls() == [3, 3]
        assert backends.service.gateway.upstreams["a"].describe()["breaker"] == "closed"
