"""One call over HTTP, and everything that its client got, with times."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from parrot_bench.chaos.mix import Request

#: A call without a byte for so long hangs; a gateway sends comments meanwhile, which do not count.
PATIENCE_S = 60.0


@dataclass(slots=True)
class Choice:
    """One candidate, joined from its deltas."""

    content: str = ""
    #: Name and arguments of the only tool call.
    tool: str = ""
    arguments: str = ""
    finish_reason: str | None = None
    #: Tokens with log-probabilities.
    tokens: list[str] = field(default_factory=list)
    roles: int = 0


@dataclass(slots=True)
class Answer:
    """One call as its client sees it; it grows while the answer comes.

    Attributes:
        began, ended: `time.monotonic` at its request and at its end.
        arrivals: times of events with content (`time.monotonic`).
        failure: why it failed; empty if it did not.
        faults: rules of the protocol that it broke.
    """

    request: Request
    began: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    choices: list[Choice] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    #: Tokens of prompt and completion.
    usage: tuple[int, int] | None = None
    failure: str = ""
    hung: bool = False
    faults: list[str] = field(default_factory=list)


class _Ended(Exception):
    """The answer ended early; the message says why."""


async def call(http: aiohttp.ClientSession, base_url: str, answer: Answer) -> Answer:
    """Send the call of a new answer, and read that to its end, whatever becomes of it."""
    request = answer.request
    answer.choices = [Choice() for _ in range(request.choices)]
    url = f"{base_url}/chat/completions"
    try:
        async with http.post(url, json=request.body) as response:
            if response.status != 200:
                raise _Ended(f"{response.status} {_code(await response.read())}")
            if request.is_streamed:
                await _read_stream(answer, response.content)
            else:
                async with asyncio.timeout(PATIENCE_S):
                    _read_whole(answer, await response.read())
    except _Ended as reason:
        answer.failure = str(reason)
    except TimeoutError:
        answer.failure, answer.hung = f"no byte for {PATIENCE_S:g} s", True
    except aiohttp.ClientError as error:
        answer.failure = f"connection: {type(error).__name__}"
    except (msgspec.MsgspecError, LookupError, TypeError, AttributeError) as error:
        answer.failure = f"malformed: {error!r}"
    answer.ended = time.monotonic()
    return answer


def _code(body: bytes) -> str:
    try:
        error = msgspec.json.decode(body)["error"]
        return str(error.get("code") or error["message"])
    except (msgspec.MsgspecError, LookupError, TypeError, AttributeError):
        return body[:80].decode("utf-8", "replace")


async def _events(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of each event; comments are left out."""
    buffer = b""
    heard = time.monotonic()
    while True:
        async with asyncio.timeout(max(0.0, heard + PATIENCE_S - time.monotonic())):
            data = await stream.readany()
        if not data:
            if buffer.strip():
                raise _Ended("cut within an event")
            return
        *events, buffer = (buffer + data).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: "):
                heard = time.monotonic()
                yield event[6:]


async def _read_stream(answer: Answer, stream: aiohttp.StreamReader) -> None:
    is_done = False
    ids = set()
    async for data in _events(stream):
        if is_done:
            answer.faults.append("an event after [DONE]")
        if data == b"[DONE]":
            is_done = True
            continue
        chunk = msgspec.json.decode(data)
        if "error" in chunk:
            raise _Ended(f"in band {_code(data)}")
        ids.add(chunk["id"])
        if chunk["choices"] and answer.usage is not None:
            answer.faults.append("a delta after the usage")
        for part in chunk["choices"]:
            _take(answer, part)
        if chunk.get("usage"):
            if answer.usage is not None:
                answer.faults.append("two usages")
            answer.usage = _usage(chunk["usage"])
    if not is_done:
        raise _Ended("ended without [DONE]")
    if len(ids) != 1:
        answer.faults.append(f"{len(ids)} ids of chunks")
    for choice in answer.choices:
        if choice.roles != 1:
            answer.faults.append(f"{choice.roles} roles of a candidate")
    _check_end(answer)


def _take(answer: Answer, part: dict[str, Any]) -> None:
    choice = answer.choices[part["index"]]
    delta = part["delta"]
    choice.roles += "role" in delta
    content = delta.get("content") or ""
    logprobs = (part.get("logprobs") or {}).get("content") or []
    if choice.finish_reason is not None:
        answer.faults.append("a delta after the finish reason")
    for called in delta.get("tool_calls") or ():
        function = called.get("function") or {}
        if called["index"] != 0 or (function.get("name") and choice.tool):
            answer.faults.append("a second tool call")
        choice.tool += function.get("name") or ""
        choice.arguments += function.get("arguments") or ""
    choice.content += content
    choice.tokens += [entry["token"] for entry in logprobs]
    if part["finish_reason"] is not None:
        choice.finish_reason = part["finish_reason"]
    if content or delta.get("tool_calls"):
        answer.arrivals.append(time.monotonic())


def _read_whole(answer: Answer, body: bytes) -> None:
    whole = msgspec.json.decode(body)
    for part in whole["choices"]:
        choice = answer.choices[part["index"]]
        choice.content = part["message"]["content"] or ""
        choice.finish_reason = part["finish_reason"]
    answer.usage = _usage(whole["usage"])
    _check_end(answer)


def _check_end(answer: Answer) -> None:
    if any(choice.finish_reason is None for choice in answer.choices):
        raise _Ended("a candidate without an end")
    if answer.usage is None:
        raise _Ended("no usage")


def _usage(usage: dict[str, int]) -> tuple[int, int]:
    return usage["prompt_tokens"], usage["completion_tokens"]
