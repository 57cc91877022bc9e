"""A client that goes away: its contexts are freed at once, whatever the call was doing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.serving import Service, read_answer, read_chunk, read_head, serving
from harness.waiting import until
from parrot_engine.protocol import FreeContext, Generated

PATHS = ["/v1/completions", "/v1/chat/completions"]


class Call(NamedTuple):
    engine: ScriptedRemoteEngine
    service: Service
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


def body(path: str, **fields: Any) -> bytes:
    prompt: dict[str, Any] = {"prompt": ["Hi", "Ho"]}
    if path.endswith("chat/completions"):
        prompt = {"messages": [{"role": "user", "content": "Hi"}], "n": 2}
    return json.dumps({"model": "m", "max_tokens": 100, **prompt, **fields}).encode()


@asynccontextmanager
async def called(path: str, steps: int, **fields: Any) -> AsyncIterator[Call]:
    """Call an engine and go some steps: queued (0), filled (1), generating (3)."""
    engine = ScriptedRemoteEngine(lambda prompt, sampling: [65] * 1000, automatic=False)
    async with serving(engine) as service:
        reader, writer = await service.send(path, body(path, **fields))
        await engine.wait_for(lambda: len(engine.contexts) >= 2)
        for _ in range(steps):
            engine.step()
        yield Call(engine, service, reader, writer)


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_contexts_are_freed(path: str, stream: bool, steps: int) -> None:
    async with called(path, steps, stream=stream) as (engine, service, _, writer):
        await asyncio.sleep(0)
        writer.transport.abort()
        await engine.wait_for(lambda: not engine.contexts)
        assert not engine._runs
        frees = [item for item in engine.submitted if isinstance(item, FreeContext)]
        assert len(frees) >= 2
        await until(lambda: not service.gate.running)


async def test_a_polite_close_counts_too() -> None:
    async with called(PATHS[0], 0) as (engine, _, _, writer):
        writer.close()
        await engine.wait_for(lambda: not engine.contexts)


async def test_the_client_closes_its_stream() -> None:
    engine = ScriptedRemoteEngine(lambda prompt, sampling: [65] * 1000, max_context_tokens=2000)
    async with serving(engine) as service, service.client() as client:
        stream = await client.completions.create(
            model="m", prompt="x", stream=True, max_tokens=1000
        )
        async for _ in stream:
            engine.automatic = False
            break
        await stream.close()
        await engine.wait_for(lambda: not engine.contexts)


async def test_others_go_on(service: Service, engine: ScriptedRemoteEngine) -> None:
    engine.automatic = False
    _, leaver = await service.send(PATHS[0], body(PATHS[0], stream=True))
    stayer = asyncio.create_task(service.post(PATHS[0], body(PATHS[0])))
    await engine.wait_for(lambda: len(engine.contexts) == 4)
    engine.step()
    engine.step()
    leaver.transport.abort()
    await engine.wait_for(lambda: len(engine.contexts) == 2)
    engine.automatic = True
    engine.step()
    status, _, answer = await stayer
    assert status == 200
    assert [choice["text"] for choice in json.loads(answer)["choices"]] == ["Hello world"] * 2


async def test_while_tokenizing() -> None:
    """Gone before anything was submitted: nothing ever is."""
    engine = ScriptedRemoteEngine(max_context_tokens=1_000_000)
    text = "the quick brown fox " * 40_000
    async with serving(engine) as service:
        _, writer = await service.send(
            PATHS[0], json.dumps({"model": "m", "prompt": text}).encode()
        )
        await until(lambda: service.gate.running)
        writer.transport.abort()
        await until(lambda: not service.gate.running)
    assert engine.submitted == []


async def test_events_after_the_end_are_ignored() -> None:
    """Tokens that were on their way when a stop string was found."""
    engine = ScriptedRemoteEngine(automatic=False)
    engine.script = lambda prompt, sampling: engine.text("aSTOPb")
    async with serving(engine) as service:
        task = asyncio.create_task(
            service.post(PATHS[0], {"model": "m", "prompt": "x", "n": 2, "stop": "STOP"})
        )
        await engine.wait_for(lambda: len(engine._runs) == 2)
        first = min(engine._runs)
        engine.step()
        for _ in range(3):
            engine.step()
        # Both have stopped for the gateway's eyes only once it has read the events.
        engine.deliver([Generated(first, engine.text("late", end=False))])
        status, _, answer = await task
    choices = json.loads(answer)["choices"]
    assert status == 200
    assert [choice["text"] for choice in choices] == ["a", "a"]


async def test_many_leavers_leave_nothing() -> None:
    engine = ScriptedRemoteEngine(lambda prompt, sampling: [65] * 1000, automatic=False)
    async with serving(engine) as service:
        for _ in range(20):
            writers = []
            for _ in range(25):
                _, writer = await service.send(PATHS[1], body(PATHS[1], stream=True))
                writers.append(writer)
            await engine.wait_for(lambda: len(engine.contexts) == 75)
            for writer in writers:
                writer.transport.abort()
            await engine.wait_for(lambda: not engine.contexts)


async def test_headers_of_a_stream_wait_for_the_first_token() -> None:
    engine = ScriptedRemoteEngine(automatic=False)
    async with serving(engine) as service:
        reader, writer = await service.send(PATHS[1], body(PATHS[1], stream=True))
        await engine.wait_for(lambda: len(engine.contexts) == 3)
        engine.step()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(read_head(reader), 0.05)
        writer.close()
        await engine.wait_for(lambda: not engine.contexts)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("stream", "steps"), [(False, 3), (True, 0), (True, 3)])
async def test_a_call_cut_off_by_a_shutdown_is_told(path: str, stream: bool, steps: int) -> None:
    async with called(path, steps, stream=stream) as (engine, service, reader, writer):
        if stream and steps:
            # The stream has begun.
            await reader.readuntil(b"\r\n\r\n")
        assert await service.gate.drain(0.01) is False
        assert service.gate.cut_off() == 1
        assert await service.gate.drain(1.0)
        await engine.settle()
        if stream and steps:
            parts = []
            async with asyncio.timeout(60):
                while chunk := await read_chunk(reader):
                    parts.append(chunk)
            *_, last, done, rest = b"".join(parts).split(b"\n\n")
            assert (done, rest) == (b"data: [DONE]", b"")
            error = json.loads(last.removeprefix(b"data: "))["error"]
        else:
            async with asyncio.timeout(60):
                status, headers, answer = await read_answer(reader)
            assert status == 503
            assert float(headers[b"retry-after"]) > 0
            error = json.loads(answer)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == "shutting_down"
        writer.close()


def request(path: str) -> bytes:
    """A whole request, as it stands in a pipeline."""
    raw = body(path)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


@pytest.mark.parametrize("how", ["abort", "close"])
@pytest.mark.parametrize("queued", [1, 3])
async def test_requests_queued_behind_do_not_hide_it(queued: int, how: str) -> None:
    engine = ScriptedRemoteEngine(lambda prompt, sampling: [65] * 1000, automatic=False)
    async with serving(engine) as service:
        _, writer = await service.connect()
        writer.write(request(PATHS[0]))
        await engine.wait_for(lambda: len(engine.contexts) == 2)
        writer.write(request(PATHS[0]) * queued)
        # Their bytes have been read when those of a later connection have been.
        assert (await service.post("/tokenize", {"prompt": "Hi"}))[0] == 200
        writer.transport.abort() if how == "abort" else writer.close()
        await engine.wait_for(lambda: not engine.contexts)
        await until(lambda: not service.gate.running)
    assert service.gate.accepted == 2


async def test_a_queued_request_is_answered_and_its_own_leave_noticed() -> None:
    engine = ScriptedRemoteEngine(lambda prompt, sampling: [65] * 3, automatic=False)
    async with serving(engine) as service:
        reader, writer = await service.connect()
        writer.write(request(PATHS[0]) + request(PATHS[0]))
        await engine.wait_for(lambda: len(engine.contexts) == 2)
        assert service.gate.running == 1
        engine.automatic = True
        engine.step()
        assert (await read_answer(reader))[0] == 200
        assert (await read_answer(reader))[0] == 200
        engine.automatic = False
        writer.write(request(PATHS[0]) + request(PATHS[1])[:-10])
        await engine.wait_for(lambda: len(engine.contexts) == 2)
        writer.transport.abort()
        await engine.wait_for(lambda: not engine.contexts)
        await until(lambda: not service.gate.running)
