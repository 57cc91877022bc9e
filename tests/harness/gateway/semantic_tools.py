"""Helpers of the tests of semantic calls over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.serving import Service, serving
from harness.waiting import until

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
PATHS = [COMPLETIONS, CHAT]


def echo(engine: ScriptedRemoteEngine) -> None:
    """Let the engine answer with the prompt in angle brackets; of a chat, with all of it."""

    def script(prompt: list[int], sampling: object) -> list[int]:
        return engine.text("<" + engine.tokenizer.decode(prompt) + ">")

    engine.script = script


def prompt_of(path: str, text: str) -> dict[str, Any]:
    """The field of a request that holds its prompt."""
    if path == CHAT:
        return {"messages": [{"role": "user", "content": text}]}
    return {"prompt": text}


def body_of(path: str, text: str, **fields: Any) -> dict[str, Any]:
    """A request."""
    return {"model": "m", "max_tokens": 200, **prompt_of(path, text), **fields}


def answer_to(path: str, text: str) -> str:
    """Return the echoing engine's answer to a prompt."""
    if path == CHAT:
        return f"<user\n{text}\nassistant\n>"
    return f"<{text}>"


def text_of(path: str, answer: dict[str, Any]) -> str:
    """The text of a whole answer."""
    choice = answer["choices"][0]
    return str(choice["message"]["content"] if path == CHAT else choice["text"])


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, which must end properly."""
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(e.removeprefix("data: ")) for e in events if e.startswith("data: ")]


class Http(httpx.AsyncClient):
    """An HTTP client of one service."""

    def __init__(self, service: Service) -> None:
        super().__init__(base_url=service.root, timeout=60)
        self.service = service

    async def call(self, path: str, text: str, **fields: Any) -> httpx.Response:
        """A call with `parrot` fields given by keyword `parrot`."""
        return await self.post(path, json=body_of(path, text, **fields))

    async def value(self, variable: str) -> httpx.Response:
        """Wait for a variable."""
        return await self.get(f"/v1/variables/{variable}")

    async def gauges(self) -> dict[str, int]:
        """Return the gauges of calls in work from `/health`: all zero when there are none."""
        health = (await self.get("/health")).json()
        calls = health["semantic"]["calls"]
        names = ("waiting", "in_line", "running", "held_bytes", "tasks")
        found = {name: calls[name] for name in names}
        return found | {
            "readers": health["semantic"]["readers"],
            "unfinished": health["semantic"]["sessions"]["unfinished_calls"],
        }

    async def settled(self) -> None:
        """Until nothing is in work any more; the gauges must say so."""
        semantic = self.service.gateway.semantic
        await until(lambda: semantic.executor.unfinished.is_empty and not semantic.executor._tasks)
        await until(lambda: self.service.gate.running == 0)
        gauges = await self.gauges()
        assert set(gauges.values()) == {0}, gauges


@asynccontextmanager
async def http_of(engine: ScriptedRemoteEngine, **settings: Any) -> AsyncIterator[Http]:
    """A served engine that echoes, and a client of it; nothing may be left over."""
    echo(engine)
    async with serving(engine, **settings) as service, Http(service) as http:
        yield http
        async with asyncio.timeout(60):
            await http.settled()
        await service.gateway.semantic.close()
