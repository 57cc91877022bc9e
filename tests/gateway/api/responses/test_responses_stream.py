"""Streams of `/v1/responses`: the order of events, failures, clients that leave."""

from __future__ import annotations

import json

from harness.gateway.responding import MESSAGE_EVENTS, events_of, get, strict
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.serving import Service
from parrot_engine.protocol import Failed


async def test_order_of_events(service: Service) -> None:
    status, headers, body = await service.post(
        "/v1/responses", {"model": "m", "input": "Hi", "stream": True}
    )
    assert status == 200
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert b"[DONE]" not in body
    events = events_of(body)
    assert [event["type"] for event in events] == ["response.created", *MESSAGE_EVENTS]
    created, _, added, part, *deltas, done, part_done, item_done, completed = events
    assert created["response"]["status"] == "in_progress"
    assert created["response"]["output"] == []
    assert created["response"]["usage"] is None
    final = completed["response"]
    assert final["id"] == created["response"]["id"]
    assert added["item"]["status"] == "in_progress"
    assert {added["item"]["id"], part["item_id"], done["item_id"], item_done["item"]["id"]} == {
        final["output"][0]["id"]
    }
    assert [delta["delta"] for delta in deltas] == ["Hello", " world"]
    assert done["text"] == part_done["part"]["text"] == "Hello world"
    assert final["output"] == [item_done["item"]]
    assert final["usage"]["output_tokens"] == 3


async def test_accumulator_of_the_client(service: Service) -> None:
    async with strict(service) as client:
        async with client.responses.stream(model="m", input="Hi") as stream:
            snapshots = [e.snapshot async for e in stream if e.type == "response.output_text.delta"]
            final = await stream.get_final_response()
        assert snapshots == ["Hello", "Hello world"]
        assert final.output_text == "Hello world"
        kept = await client.responses.retrieve(final.id)
        assert kept.output_text == "Hello world"


async def test_empty_answer(service: Service, engine: ScriptedRemoteEngine) -> None:
    engine.script = lambda prompt, sampling: [engine.im_end]
    async with strict(service) as client:
        async with client.responses.stream(model="m", input="Hi") as stream:
            kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert final.output_text == ""
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"


async def test_failure_in_mid_stream(service: Service, engine: ScriptedRemoteEngine) -> None:
    engine.script = lambda prompt, sampling: [65, Failed(0, "engine_error", "secret")]
    status, _, body = await service.post(
        "/v1/responses", {"model": "m", "input": "Hi", "stream": True}
    )
    assert status == 200
    assert b"secret" not in body
    events = events_of(body)
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    assert events[-2]["code"] == "engine_error"
    assert events[-1]["response"]["status"] == "failed"
    assert events[-1]["response"]["error"]["code"] == "server_error"
    assert service.gateway.responses.statistics().entries == 0
    engine.script = lambda prompt, sampling: [Failed(0, "engine_error", "secret")]
    status, _, body = await service.post(
        "/v1/responses", {"model": "m", "input": "Hi", "stream": True}
    )
    assert (status, json.loads(body)["error"]["code"]) == (500, "engine_error")


async def test_client_that_leaves_cancels(service: Service, engine: ScriptedRemoteEngine) -> None:
    engine.automatic = False
    body = json.dumps({"model": "m", "input": "Hi", "stream": True}).encode()
    _, writer = await service.send("/v1/responses", body)
    await engine.wait_for(lambda: bool(engine.contexts))
    writer.close()
    await engine.wait_for(lambda: not engine.contexts)
    assert service.gateway.responses.statistics().entries == 0


async def test_stream_is_told_again(service: Service) -> None:
    _, _, live = await service.post(
        "/v1/responses", {"model": "m", "input": "Hi", "stream": True, "top_logprobs": 1}
    )
    events = events_of(live)
    path = f"/v1/responses/{events[0]['response']['id']}?stream=true"
    assert (await get(service, path))[1] == live
    _, rest = await get(service, f"{path}&starting_after=4")
    assert live.endswith(rest)
    assert json.loads(rest.split(b"data: ")[1].split(b"\n")[0])["sequence_number"] == 5
    status, body = await get(service, f"{path}&starting_after=x")
    assert (status, json.loads(body)["error"]["param"]) == (400, "starting_after")
    async with strict(service) as client:
        again = await client.responses.retrieve(events[0]["response"]["id"], stream=True)
        assert [event.type async for event in again][-1] == "response.completed"
