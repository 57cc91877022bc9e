"""One call as its client sees it: what came is kept, and what may not come is noticed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from parrot_bench.chaos import answers
from parrot_bench.chaos.answers import Answer
from parrot_bench.chaos.mix import KINDS, requests

MIX = {request.kind: request for request in requests("m", len(KINDS), 64)}
USAGE = {"prompt_tokens": 5, "completion_tokens": 2}


def delta(index: int = 0, reason: str | None = None, **fields: Any) -> str:
    choice = {"index": index, "delta": fields, "finish_reason": reason}
    return json.dumps({"id": "x", "choices": [choice]})


START, HELLO, END = (
    delta(role="assistant", content=""),
    delta(content="Hello"),
    delta(reason="stop"),
)
TOTAL = json.dumps({"id": "x", "choices": [], "usage": USAGE})


Handler = Callable[[web.StreamResponse], Awaitable[None]]


async def ask(handler: Handler, kind: str = "chat", status: int = 200) -> Answer:
    """The answer that a client gets of a server whose body `handler` writes."""

    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        await handler(response)
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    try:
        async with aiohttp.ClientSession() as http:
            return await answers.call(http, f"http://127.0.0.1:{port}/v1", Answer(MIX[kind]))
    finally:
        await runner.cleanup()


async def read(*events: str, kind: str = "chat", end: bytes = b"", status: int = 200) -> Answer:
    """The answer that a client makes of a stream of these events."""

    async def write(response: web.StreamResponse) -> None:
        for event in events:
            await response.write(f"data: {event}\n\n".encode())
        await response.write(end)

    return await ask(write, kind, status)


async def test_a_whole_stream() -> None:
    answer = await read(START, HELLO, HELLO, END, TOTAL, "[DONE]")
    assert (answer.failure, answer.faults) == ("", [])
    assert answer.choices[0].content == "HelloHello"
    assert answer.usage == (5, 2)
    assert len(answer.arrivals) == 2


async def test_a_tool_call_is_joined() -> None:
    begin = {"index": 0, "id": "c", "function": {"name": "weather", "arguments": ""}}
    more = {"index": 0, "function": {"arguments": "{}"}}
    answer = await read(
        START, delta(tool_calls=[begin]), delta(tool_calls=[more]), END, TOTAL, "[DONE]",
        kind="tools",
    )  # fmt: skip
    assert (answer.choices[0].tool, answer.choices[0].arguments) == ("weather", "{}")
    assert answer.faults == []
    again = await read(
        START, delta(tool_calls=[begin]), delta(tool_calls=[begin]), END, TOTAL, "[DONE]",
        kind="tools",
    )  # fmt: skip
    assert again.faults == ["a second tool call"]


@pytest.mark.parametrize(
    ("events", "failure"),
    [
        ((START, HELLO), "ended without [DONE]"),
        ((START, HELLO, '{"error": {"code": "engine_lost"}}', "[DONE]"), "in band engine_lost"),
        ((START, HELLO, TOTAL, "[DONE]"), "a candidate without an end"),
        ((START, HELLO, END, "[DONE]"), "no usage"),
        ((START, "{"), "malformed: "),
    ],
)
async def test_what_is_not_whole_has_failed(events: tuple[str, ...], failure: str) -> None:
    assert (await read(*events)).failure.startswith(failure)


async def test_a_cut_within_an_event_and_a_refusal_have_failed() -> None:
    assert (await read(START, end=b"data: {")).failure == "cut within an event"
    assert (await read("x", status=503)).failure.startswith("503 data: x")


@pytest.mark.parametrize(
    ("events", "fault"),
    [
        ((START, START, END, TOTAL, "[DONE]"), "2 roles of a candidate"),
        ((START, END, HELLO, TOTAL, "[DONE]"), "a delta after the finish reason"),
        ((START, END, TOTAL, TOTAL, "[DONE]"), "two usages"),
        ((START, END, TOTAL, "[DONE]", "[DONE]"), "an event after [DONE]"),
        ((START, END, TOTAL.replace('"x"', '"y"'), "[DONE]"), "2 ids of chunks"),
    ],
)
async def test_broken_streams_are_noticed(events: tuple[str, ...], fault: str) -> None:
    answer = await read(*events)
    assert (answer.failure, answer.faults) == ("", [fault])


async def test_a_silent_call_hangs_whatever_comments_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "PATIENCE_S", 0.2)

    async def write(response: web.StreamResponse) -> None:
        with suppress(ConnectionError):
            while True:
                await response.write(b": keep-alive\n\n")
                await asyncio.sleep(0.05)

    answer = await ask(write)
    assert (answer.failure, answer.hung) == ("no byte for 0.2 s", True)
