"""Responses made in the background: polled, followed, resumed, cancelled."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from harness.gateway.responding import MESSAGE_EVENTS, events_of, get, prompt_of, strict
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.serving import Service, read_chunk, read_head
from openai.types.responses import ResponseOutputMessage
from openai.types.responses import ResponseTextDeltaEvent as TextDelta
from parrot_engine.protocol import Failed

from parrot_gateway.telemetry.call_record import CallRecord


async def poll(service: Service, response_id: str, *statuses: str) -> dict[str, Any]:
    """Until it has one of these statuses."""
    async with asyncio.timeout(60):
        while True:
            _, body = await get(service, f"/v1/responses/{response_id}")
            answer: dict[str, Any] = json.loads(body)
            if answer["status"] in statuses:
                return answer


async def test_polling(service: Service, engine: ScriptedRemoteEngine) -> None:
    engine.automatic = False
    records: list[CallRecord] = []
    service.gateway.call_records.sinks.append(records.append)
    async with strict(service) as client:
        queued = await client.responses.create(model="m", input="Hi", background=True)
        assert (queued.status, queued.background, queued.output) == ("queued", True, [])
        running = await poll(service, queued.id, "in_progress")
        assert running["output"] == []
        with pytest.raises(openai.BadRequestError) as early:
            await client.responses.create(model="m", input="More", previous_response_id=queued.id)
        assert early.value.code == "response_in_progress"
        engine.automatic = True
        engine.step()
        assert [record.status for record in records] == [400], "that of the second call"
        await poll(service, queued.id, "completed")
        (record,) = records[1:]
        assert (record.path, record.deferred, record.status) == ("/v1/responses", True, 200)
        assert (record.output_tokens, record.finish_reason) == (3, "stop")
        done = await client.responses.retrieve(queued.id)
        assert done.output_text == "Hello world"
        assert done.usage is not None
        await client.responses.create(model="m", input="More", previous_response_id=queued.id)
        assert "Hello world" in prompt_of(engine)
        # It has ended: cancelling changes nothing.
        assert (await client.responses.cancel(queued.id)).status == "completed"


async def test_following_and_resuming(service: Service, engine: ScriptedRemoteEngine) -> None:
    engine.automatic = False
    body = json.dumps({"model": "m", "input": "Hi", "background": True, "stream": True}).encode()
    reader, writer = await service.send("/v1/responses", body)
    await read_head(reader)
    seen = await read_chunk(reader)
    response_id = json.loads(seen.split(b"data: ")[1].split(b"\n")[0])["response"]["id"]
    await engine.wait_for(lambda: bool(engine.contexts))
    engine.step()
    engine.step()
    # It goes on without the client that asked for it.
    writer.close()
    path = f"/v1/responses/{response_id}?stream=true"
    following = asyncio.create_task(get(service, f"{path}&starting_after=2"))
    engine.automatic = True
    engine.step()
    _, rest = await following
    _, whole = await get(service, path)
    events = events_of(whole)
    assert [event["type"] for event in events] == [
        "response.created", "response.queued", *MESSAGE_EVENTS,
    ]  # fmt: skip
    assert [events[n]["response"]["status"] for n in range(3)] == [
        "queued", "queued", "in_progress",
    ]  # fmt: skip
    assert whole.startswith(seen)
    assert whole.endswith(rest)
    assert json.loads(rest.split(b"data: ")[1].split(b"\n")[0])["sequence_number"] == 3
    assert (await get(service, f"{path}&starting_after=99"))[1] == b""
    async with strict(service) as client:
        async with client.responses.stream(response_id=response_id) as stream:
            final = await stream.get_final_response()
        assert final.output_text == "Hello world"


async def test_cancelling(service: Service, engine: ScriptedRemoteEngine) -> None:
    engine.automatic = False
    records: list[CallRecord] = []
    service.gateway.call_records.sinks.append(records.append)
    async with strict(service) as client:
        running = await client.responses.create(model="m", input="Hi", background=True)
        await engine.wait_for(lambda: bool(engine.contexts))
        engine.step()
        engine.step()
        following = asyncio.create_task(
            get(service, f"/v1/responses/{running.id}?stream=true&starting_after=3")
        )
        followed = await client.responses.retrieve(running.id, stream=True)
        delta = await anext(e.delta async for e in followed if isinstance(e, TextDelta))
        await followed.close()
        cancelled = await client.responses.cancel(running.id)
        assert cancelled.status == "cancelled"
        (message,) = cancelled.output
        assert isinstance(message, ResponseOutputMessage)
        assert (message.status, cancelled.output_text) == ("incomplete", delta)
        await engine.settle()
        _, rest = await following
        assert json.loads(rest.split(b"data: ")[-1])["response"]["status"] == "cancelled"
        assert [(record.status, record.error_code) for record in records] == [(499, "cancelled")]
        assert (await client.responses.cancel(running.id)).status == "cancelled"
        assert (await client.responses.retrieve(running.id)).status == "cancelled"
        # Forgetting one that runs ends it.
        other = await client.responses.create(model="m", input="Hi", background=True)
        await engine.wait_for(lambda: bool(engine.contexts))
        await client.responses.delete(other.id)
        await engine.settle()
        engine.automatic = True
        whole = await client.responses.create(model="m", input="x")
        with pytest.raises(openai.BadRequestError) as wrong:
            await client.responses.cancel(whole.id)
        assert "'background'" in wrong.value.message


async def test_failing(service: Service, engine: ScriptedRemoteEngine) -> None:
    engine.script = lambda prompt, sampling: [65, Failed(0, "engine_error", "secret")]
    answer = await service.respond(background=True)
    failed = await poll(service, answer["id"], "failed")
    assert failed["error"]["code"] == "server_error"
    _, told = await get(service, f"/v1/responses/{answer['id']}?stream=true")
    assert b"secret" not in told
    assert [event["type"] for event in events_of(told)[-2:]] == ["error", "response.failed"]
    # What can be seen to be wrong is told at once.
    status, _, _ = await service.post(
        "/v1/responses", {"model": "m", "input": "x" * 600, "background": True}
    )
    assert status == 400
    assert service.gateway.responses.statistics().entries == 1


async def test_conversations_keep_their_order(
    service: Service, engine: ScriptedRemoteEngine
) -> None:
    engine.automatic = False
    async with strict(service) as client:
        conversation = (await client.conversations.create()).id
        first = await client.responses.create(
            model="m", input="One", background=True, conversation=conversation
        )
        second = await client.responses.create(
            model="m", input="Two", background=True, conversation=conversation
        )
        await engine.wait_for(lambda: bool(engine.contexts))
        engine.automatic = True
        engine.step()
        await poll(service, second.id, "completed")
        assert (await client.responses.retrieve(first.id)).status == "completed"
        prompt = prompt_of(engine)
        assert prompt.index("One") < prompt.index("Hello world") < prompt.index("Two")


async def test_the_end_of_the_gateway(service: Service, engine: ScriptedRemoteEngine) -> None:
    engine.automatic = False
    answer = await service.respond(background=True)
    await engine.wait_for(lambda: bool(engine.contexts))
    await service.gateway.background.close()
    await engine.settle()
    await poll(service, answer["id"], "cancelled")
