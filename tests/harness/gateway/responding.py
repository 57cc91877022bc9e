"""Helpers of the tests of chats, responses and conversations."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
from parrot_engine.protocol import Fill, Generate

from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.serving import Service, read_answer

STRICT = {"_strict_response_validation": True, "max_retries": 0, "api_key": "none"}


#: Types of the events of a response of one message, in two deltas, behind `response.created`.
MESSAGE_EVENTS = (
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
)


def strict(service: Service) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{service.root}/v1", **STRICT)  # type: ignore[arg-type]


def prompt_of(engine: ScriptedRemoteEngine) -> str:
    fills = [item for item in engine.submitted if isinstance(item, Fill)]
    return engine.tokenizer.decode(fills[-1].token_ids, skip_special_tokens=False)


def sampling_of(engine: ScriptedRemoteEngine) -> Any:
    return [item for item in engine.submitted if isinstance(item, Generate)][-1].sampling


async def refused(service: Service, **body: Any) -> dict[str, Any]:
    status, _, answer = await service.post("/v1/responses", {"model": "m", "input": "Hi", **body})
    error: dict[str, Any] = json.loads(answer)["error"]
    return {"status": status, "param": error["param"], "code": error["code"]}


async def get(service: Service, path: str, method: str = "GET") -> tuple[int, bytes]:
    reader, writer = await service.connect()
    writer.write(f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode())
    try:
        async with asyncio.timeout(60):
            status, _, body = await read_answer(reader)
    finally:
        writer.close()
    return status, body


def events_of(body: bytes) -> list[dict[str, Any]]:
    events = []
    for block in body.decode().removesuffix("\n\n").split("\n\n"):
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events
