"""Streams of clients that lose their connection, on engines of our own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx
import openai
import pytest
from harness.gateway.resuming import Cut, ask, begin, open_call, open_reader, refused
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.serving import Service, read_chunk, read_head, serving
from harness.numbered_events import events_of, last_id, whole_events, without_numbers
from harness.waiting import until
from openai.types.chat import ChatCompletionChunk
from parrot_engine.protocol import Failed

from parrot_gateway.exceptions import StreamNotFoundError
from parrot_gateway.settings.model import StreamSettings
from parrot_gateway.telemetry.call_record import CallRecord

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES, "stream_options": {"include_usage": True}},
    COMPLETIONS: {"prompt": "Hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 20},
    "/v1/responses": {"input": "Hi"},
}


def decoded(raw: bytes) -> list[Any]:
    """The data of events, without what differs from call to call."""
    found = []
    for event in events_of(raw):
        line = next(line for line in event.split(b"\n") if line.startswith(b"data: "))
        data = line.removeprefix(b"data: ")
        fields = {} if data == b"[DONE]" else json.loads(data)
        found.append(
            {name: value for name, value in fields.items() if name not in ("id", "created")}
        )
    return found


async def _running(
    service: Service, engine: ScriptedRemoteEngine, path: str = COMPLETIONS, **more: Any
) -> Cut:
    """A call that has its first token, on an engine that does nothing by itself."""
    engine.automatic = False
    task = asyncio.create_task(begin(service, path, {**BODIES[path], **more}))
    await engine.wait_for(lambda: bool(engine._fills))
    engine.step()
    engine.step()
    return await task


@pytest.mark.parametrize("path", BODIES)
async def test_events_have_numbers_when_asked_for(service: Service, path: str) -> None:
    _, headers, plain = await service.post(path, {"model": "m", "stream": True, **BODIES[path]})
    assert b"x-parrot-stream" not in headers
    assert b"id: " not in plain
    for way in ({}, {"parrot": {"resume": True}}):
        asks = b"" if way else b"X-Parrot-Resume: true\r\n"
        call = await begin(service, path, {**BODIES[path], **way}, asks=asks)
        assert b"content-length" not in call.headers
        assert b"x-parrot-ignored" not in call.headers
        bare = without_numbers(await call.read_all())
        if path in (CHAT, COMPLETIONS):
            assert decoded(bare) == decoded(plain)
        else:
            assert len(events_of(bare)) == len(events_of(plain))


@pytest.mark.parametrize("path", BODIES)
async def test_cut_anywhere(service: Service, path: str) -> None:
    """At the end of every event, and inside of each."""
    call = await begin(service, path, BODIES[path])
    whole = await call.read_all()
    events = events_of(whole)
    assert len(events) > 3
    ends = [len(b"".join(events[:count])) for count in range(len(events) + 1)]
    cuts = {max(0, end + shift) for end in ends for shift in (-9, -2, -1, 0, 1, 30)}
    for cut in sorted(cuts):
        had = whole_events(whole[:cut])
        after = last_id(had)
        if after == len(events):
            assert (await ask(service, call.stream_id, after))[0] == 204
        else:
            assert had + await call.resume(after) == whole, cut
    assert await call.resume(0) == whole


@pytest.mark.parametrize("path", BODIES)
async def test_really_cut_after_each_event(path: str) -> None:
    """The connection is cut while the call runs, which goes on with the next reader."""
    engine = ScriptedRemoteEngine("the quick fox jumps over", automatic=False)
    async with serving(engine) as service:
        plain = await _answered(service, engine, path)
        for cut_after in range(1, len(events_of(plain))):
            call = await _running(service, engine, path)
            while last_id(call.raw) < cut_after:
                call.raw += await read_chunk(call._reader)
                engine.step()
            call.cut()
            had = whole_events(call.raw)
            engine.automatic = True
            resumed = asyncio.create_task(call.resume(last_id(had)))
            engine.step()
            rest = await resumed
            engine.automatic = False
            whole = await call.resume(0)
            assert had + rest == whole
            if path in (CHAT, COMPLETIONS):
                assert decoded(without_numbers(whole)) == decoded(plain)
            await until(lambda: service.gate.running == 0)


async def _answered(service: Service, engine: ScriptedRemoteEngine, path: str) -> bytes:
    engine.automatic = True
    _, _, plain = await service.post(path, {"model": "m", "stream": True, **BODIES[path]})
    engine.automatic = False
    return plain


async def test_before_the_gateway_notices(engine: ScriptedRemoteEngine) -> None:
    """A client comes back while its first connection still seems to live: both are served."""
    engine.automatic = False
    async with serving(engine) as service:
        call = await _running(service, engine, COMPLETIONS)
        await call.read_until(b"Hello")
        readers = [await open_reader(service, call.stream_id, after) for after in (1, 0, 1)]
        for reader, _ in readers:
            assert (await read_head(reader))[0] == 200
        engine.automatic = True
        engine.step()
        whole = await call.read_all()
        for number, (reader, writer) in enumerate(readers):
            parts = []
            while chunk := await read_chunk(reader):
                parts.append(chunk)
            assert b"".join(events_of(whole)[0 if number == 1 else 1 :]) == b"".join(parts)
            writer.close()


async def test_a_call_runs_on_without_a_reader(
    service: Service, engine: ScriptedRemoteEngine
) -> None:
    engine.automatic = False
    records: list[CallRecord] = []
    service.gateway.call_records.sinks.append(records.append)
    call = await _running(service, engine, CHAT)
    await call.read_until(b"Hello")
    call.cut()
    await until(lambda: service.gateway.streams.statistics().unread == 1)
    assert service.gate.running == 1
    engine.automatic = True
    engine.step()
    await until(lambda: service.gate.running == 0)
    assert engine.contexts == {}
    (record,) = records
    assert (record.status, record.client_left, record.finish_reason) == (200, False, "stop")
    had = whole_events(call.raw)
    rest = await call.resume(last_id(had))
    assert b" world" in rest
    assert rest.endswith(b"data: [DONE]\nid: %d\n\n" % last_id(rest))
    # Twice, and from wherever it likes.
    assert await call.resume(last_id(had)) == rest
    assert await call.resume(0) == had + rest
    assert service.gateway.streams.statistics()._replace(size_bytes=0) == (1, 0, 0)


async def test_nobody_comes_back(engine: ScriptedRemoteEngine) -> None:
    engine.automatic = False
    async with serving(engine, streams=StreamSettings(resume_s=0.05)) as service:
        records: list[CallRecord] = []
        service.gateway.call_records.sinks.append(records.append)
        call = await _running(service, engine, CHAT)
        await call.read_until(b"Hello")
        assert engine.contexts
        call.cut()
        await engine.wait_for(lambda: not engine.contexts)
        await until(lambda: service.gate.running == 0)
        assert [record.client_left for record in records] == [True]
        status, error = await refused(service, call.stream_id, 1)
        assert (status, error["code"], error["param"]) == (404, "stream_not_found", "stream_id")
        assert "Send the call again" in error["message"]
        # One that has ended is kept for as long, and no longer.
        engine.automatic = True
        ended = await begin(service, CHAT, BODIES[CHAT])
        await ended.read_all()
        await until(lambda: service.gateway.streams.statistics() == (0, 0, 0))


async def test_leaving_before_the_answer_begins(
    service: Service, engine: ScriptedRemoteEngine
) -> None:
    """Such a client has no name to come back with."""
    engine.automatic = False
    _, writer = await open_call(service, CHAT, BODIES[CHAT])
    await engine.wait_for(lambda: bool(engine.contexts))
    writer.transport.abort()
    await engine.wait_for(lambda: not engine.contexts)
    await until(lambda: service.gate.running == 0)
    assert service.gateway.streams.statistics().kept == 0


async def test_deleting(service: Service, engine: ScriptedRemoteEngine) -> None:
    """A client that does not want the rest says so; else the call would run on."""
    call = await _running(service, engine, CHAT)
    await call.read_until(b"Hello")
    status, _, body = await ask(service, call.stream_id, method="DELETE")
    assert status == 200
    assert json.loads(body) == {"id": call.stream_id, "object": "stream", "deleted": True}
    await engine.wait_for(lambda: not engine.contexts)
    # Whoever reads it is told.
    last = events_of(await call.read_all())[-1]
    assert json.loads(last.split(b"data: ")[1])["error"]["code"] == "call_cancelled"
    for method in ("GET", "DELETE"):
        assert (await refused(service, call.stream_id, method=method))[0] == 404


async def test_places_to_resume_from(service: Service) -> None:
    call = await begin(service, COMPLETIONS, {"prompt": "Hi"})
    whole = await call.read_all()
    events = events_of(whole)
    name = call.stream_id
    assert (await ask(service, name))[2] == whole
    assert (await ask(service, name, query="?starting_after=1"))[2] == b"".join(events[1:])
    # An `EventSource` comes back to the address that it was given.
    assert (await ask(service, name, 2, query="?starting_after=1"))[2] == b"".join(events[2:])
    status, headers, _ = await ask(service, name, method="HEAD")
    assert (status, headers[b"x-parrot-stream"]) == (200, name.encode())
    assert (await ask(service, name, len(events)))[0] == 204
    for after in (len(events) + 1, "x", -1, "1" * 40, "½"):
        status, error = await refused(service, name, after)
        assert (status, error["param"]) == (400, "Last-Event-ID"), after
    status, error = await refused(service, name, query=f"?starting_after={len(events) + 1}")
    assert (status, error["param"]) == (400, "starting_after")
    assert str(len(events)) in error["message"]
    assert (await refused(service, name, query="?after=1"))[1]["code"] == "unknown_parameter"
    assert (await refused(service, name, method="POST"))[0] == 405


async def test_other_tenants_see_nothing(service: Service) -> None:
    call = await begin(service, COMPLETIONS, {"prompt": "Hi"})
    await call.read_all()
    streams = service.gateway.streams
    mine = streams.find("default", call.stream_id)
    assert mine.id == call.stream_id
    unknown, theirs = await refused(service, "stream_0"), None
    with pytest.raises(StreamNotFoundError) as error:
        streams.find("another", call.stream_id)
    theirs = (error.value.status, error.value.to_dict())
    assert json.dumps(unknown).replace("stream_0", call.stream_id) == json.dumps(theirs)


@pytest.mark.parametrize("path", BODIES)
async def test_only_streams_can_be_resumed(service: Service, path: str) -> None:
    body = {"model": "m", **BODIES[path], "parrot": {"resume": True}}
    body.pop("stream_options", None)
    status, headers, raw = await service.post(path, body)
    assert status == 400
    assert "'stream': true" in json.loads(raw)["error"]["message"]
    assert b"x-parrot-stream" not in headers


@pytest.mark.parametrize("path", BODIES)
async def test_errors_before_the_first_event_have_their_status(
    service: Service, engine: ScriptedRemoteEngine, path: str
) -> None:
    body = {"model": "m", "stream": True, **BODIES[path], "parrot": {"resume": True}}
    status, _, raw = await service.post(path, {**body, "temperature": 99})
    assert status == 400, raw
    engine.script = lambda prompt, sampling: [Failed(0, "numerical_error", "secret")]
    status, headers, raw = await service.post(path, body)
    if path != "/v1/responses":
        assert (status, b"x-parrot-stream" in headers) == (500, False)
        assert service.gateway.streams.statistics().kept == 0


async def test_a_failure_in_mid_stream_is_resumed_too(
    service: Service, engine: ScriptedRemoteEngine
) -> None:
    words = engine.text("Hello", end=False)
    engine.script = lambda prompt, sampling: [*words, Failed(0, "numerical_error", "secret")]
    call = await begin(service, CHAT, BODIES[CHAT])
    whole = await call.read_all()
    assert b"numerical_error" in whole
    assert whole.startswith(events_of(whole)[0])
    assert events_of(whole)[0] + await call.resume(1) == whole


async def test_a_call_of_a_session(service: Service) -> None:
    parrot = {"session": "s", "inputs": {"what": {"value": "hi"}}, "output": "o"}
    body = {"prompt": "Say {{what}}", "parrot": {**parrot, "resume": True}}
    call = await begin(service, COMPLETIONS, body, asks=b"")
    whole = await call.read_all()
    assert b"Hello" in whole
    assert call.headers[b"x-parrot-session"]
    assert await call.resume(0) == whole


LONG = 3000


def long_engine() -> ScriptedRemoteEngine:
    return ScriptedRemoteEngine(
        lambda prompt, sampling: [65] * LONG, max_context_tokens=100_000, tokens_per_step=1
    )


async def test_a_window_of_a_long_stream() -> None:
    engine = long_engine()
    async with serving(engine, streams=StreamSettings(max_stream_bytes=64_000)) as service:
        call = await begin(service, COMPLETIONS, {"prompt": "Hi", "max_tokens": LONG})
        whole = await call.read_all()
        assert len(whole) > 200_000
        assert service.gateway.streams.statistics().size_bytes < 64_000 + 1000
        status, error = await refused(service, call.stream_id, 1)
        assert (status, error["code"]) == (410, "events_gone")
        number = int(error["message"].split("number ")[1].split(" ")[0])
        events = events_of(whole)
        assert 0 < number < len(events)
        assert await call.resume(number) == b"".join(events[number:])
        assert (await refused(service, call.stream_id, number - 1))[0] == 410


async def test_a_call_without_a_reader_waits_at_its_bound() -> None:
    engine = long_engine()
    async with serving(engine, streams=StreamSettings(max_stream_bytes=64_000)) as service:
        call = await begin(service, COMPLETIONS, {"prompt": "Hi", "max_tokens": LONG})
        call.cut()
        stream = service.gateway.streams.find("default", call.stream_id)
        await until(lambda: 2 * stream.log.size_bytes > 64_000)
        # It has ended on the engine, and waits all the same, with all that nobody has read.
        assert service.gate.running == 1
        rest = await call.resume(0)
        events = events_of(rest)
        assert events[0].endswith(b"\nid: 1\n\n")
        assert decoded(without_numbers(rest))[-2]["choices"][0]["finish_reason"] == "length"
        texts = [event["choices"][0]["text"] for event in decoded(rest)[:-1]]
        assert len("".join(texts)) == LONG


async def _ended(service: Service, count: int) -> list[str]:
    names = []
    for _ in range(count):
        call = await begin(service, COMPLETIONS, {"prompt": "Hi"})
        await call.read_all()
        names.append(call.stream_id)
    return names


async def _statuses(service: Service, names: Sequence[str]) -> list[int]:
    return [(await ask(service, name))[0] for name in names]


async def test_streams_that_have_ended_make_room_first() -> None:
    engine = ScriptedRemoteEngine("the quick fox jumps over the quick fox jumps over")
    async with serving(engine, streams=StreamSettings(max_kept=3)) as service:
        ended = await _ended(service, 2)
        first, second = [await _running(service, engine) for _ in range(2)]
        assert await _statuses(service, ended) == [404, 200]
        second.cut()
        await until(lambda: service.gateway.streams.statistics().unread == 1)
        third = await _running(service, engine)
        assert await _statuses(service, ended) == [404, 404]
        # Then those that nobody reads, whose calls are cancelled; then the oldest.
        assert len(engine.contexts) == 3
        fourth = await _running(service, engine)
        await until(lambda: service.gate.running == 3)
        fifth = await _running(service, engine)
        engine.automatic = True
        engine.step()
        calls = (first, third, fourth, fifth)
        # One that had to make room goes on for the client that it has.
        wholes = [await call.read_all() for call in calls]
        assert {whole[-15:] for whole in wholes} == {b"[DONE]\nid: 13\n\n"}
        assert await _statuses(service, [second.stream_id, first.stream_id]) == [404, 404]
        assert [await call.resume(0) for call in calls[1:]] == wholes[1:]


async def test_bytes_of_all_streams(engine: ScriptedRemoteEngine) -> None:
    async with serving(engine) as service:
        (name,) = await _ended(service, 1)
        size = service.gateway.streams.find("default", name).log.size_bytes
    async with serving(engine, streams=StreamSettings(max_bytes=3 * size + 10)) as service:
        names = await _ended(service, 5)
        assert await _statuses(service, names) == [404, 404, 200, 200, 200]


async def test_readers_have_a_limit(service: Service, engine: ScriptedRemoteEngine) -> None:
    call = await _running(service, engine)
    others = [await open_reader(service, call.stream_id) for _ in range(7)]
    for reader, _ in others:
        assert (await read_head(reader))[0] == 200
    status, error = await refused(service, call.stream_id)
    assert (status, error["code"]) == (503, "too_many_readers")
    for _, writer in others:
        writer.transport.abort()
    engine.automatic = True
    engine.step()
    await call.read_all()


async def test_a_draining_gateway_serves_readers(
    service: Service, engine: ScriptedRemoteEngine
) -> None:
    call = await _running(service, engine)
    call.cut()
    service.gate.draining = True
    resumed = asyncio.create_task(call.resume(0))
    await until(lambda: bool(service.gateway.streams.find("default", call.stream_id).is_read))
    engine.automatic = True
    engine.step()
    assert b"[DONE]" in await resumed
    service.gate.draining = False


async def test_a_drain_that_runs_out_of_time(
    service: Service, engine: ScriptedRemoteEngine
) -> None:
    """A call that nobody reads is cut off like any other."""
    call = await _running(service, engine)
    call.cut()
    await until(lambda: service.gateway.streams.statistics().unread == 1)
    assert not await service.gate.drain(0.01)
    service.gate.cut_off()
    assert await service.gate.drain(5)
    assert b"shutting_down" in await call.resume(0)
    service.gate.draining = False


@pytest.mark.parametrize("path", BODIES)
async def test_an_answer_of_one_step(path: str) -> None:
    """It is sent as a whole, whose length would be wrong with numbers in it."""
    engine = ScriptedRemoteEngine("Hi", tokens_per_step=9)
    async with serving(engine) as service:
        _, headers, plain = await service.post(path, {"model": "m", "stream": True, **BODIES[path]})
        assert b"content-length" in headers
        call = await begin(service, path, BODIES[path])
        assert b"content-length" not in call.headers
        whole = await call.read_all()
        assert len(events_of(whole)) == len(events_of(plain))
        assert await call.resume(0) == whole


async def test_web_pages_that_may(engine: ScriptedRemoteEngine) -> None:
    origin = "https://app.example.com"
    async with serving(engine, server={"cors_origins": [origin]}) as service:
        line = f"Origin: {origin}\r\n".encode()
        call = await begin(service, CHAT, BODIES[CHAT], asks=b"X-Parrot-Resume: 1\r\n" + line)
        await call.read_all()
        async with httpx.AsyncClient(base_url=service.root) as page:
            asked = {"Origin": origin, "Last-Event-ID": "1"}
            resumed = await page.get(f"/v1/streams/{call.stream_id}", headers=asked)
            preflight = await page.options(
                f"/v1/streams/{call.stream_id}",
                headers={
                    "Origin": origin,
                    "Access-Control-Request-Method": "DELETE",
                    "Access-Control-Request-Headers": "last-event-id,x-parrot-resume",
                },
            )
        allowed = "access-control-allow-origin"
        assert call.headers[allowed.encode()] == resumed.headers[allowed].encode()
        assert resumed.headers["access-control-expose-headers"] == "*"
        assert resumed.content == b"".join(events_of(call.raw)[1:])
        assert preflight.status_code == 200
        for name in ("last-event-id", "x-parrot-resume"):
            assert name in preflight.headers["access-control-allow-headers"].lower()


async def test_silence_is_bridged() -> None:
    engine = ScriptedRemoteEngine(automatic=False)
    async with serving(engine, keep_alive_s=0.02) as service:
        call = await begin(service, CHAT, BODIES[CHAT])
        assert await call.read_until(b": keep-alive\n\n")
        reader, writer = await open_reader(service, call.stream_id)
        await read_head(reader)
        assert await read_chunk(reader) == b": keep-alive\n\n"
        writer.close()
        engine.automatic = True
        engine.step()
        whole = await call.read_all()
        # Comments are not of the stream.
        assert await call.resume(0) == whole.replace(b": keep-alive\n\n", b"")


async def test_the_openai_client(service: Service, engine: ScriptedRemoteEngine) -> None:
    async with service.client() as client:
        stream = await client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "Hi"}],
            stream=True,
            extra_headers={"X-Parrot-Resume": "true"},
        )
        name = stream.response.headers["x-parrot-stream"]
        chunks = [await anext(stream) for _ in range(2)]
        await stream.close()
        rest = await client.get(
            f"/streams/{name}?starting_after={len(chunks)}",
            cast_to=ChatCompletionChunk,
            stream=True,
            stream_cls=openai.AsyncStream[ChatCompletionChunk],
        )
        chunks += [chunk async for chunk in rest]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "Hello world"
