"""Streams on the wire: frames, order, writes, keep-alives and failures."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import openai
import pytest
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.serving import Service, read_chunk, read_head, serving
from parrot_engine.protocol import Failed

PATHS = ["/v1/completions", "/v1/chat/completions"]


def body(path: str, **fields: Any) -> bytes:
    prompt: dict[str, Any] = {"prompt": "Hi"}
    if path.endswith("chat/completions"):
        prompt = {"messages": [{"role": "user", "content": "Hi"}]}
    return json.dumps({"model": "m", "stream": True, **prompt, **fields}).encode()


def events(raw: bytes) -> list[Any]:
    """Decoded events; asserts that there is nothing but `data:` lines and blank ones."""
    assert raw.endswith(b"\n\n")
    blocks = raw.removesuffix(b"\n\n").split(b"\n\n")
    found: list[Any] = []
    for block in blocks:
        assert block.startswith(b"data: "), block
        assert b"\n" not in block
        data = block.removeprefix(b"data: ")
        found.append("[DONE]" if data == b"[DONE]" else json.loads(data))
    return found


@pytest.mark.parametrize("path", PATHS)
async def test_frames(service: Service, path: str) -> None:
    status, headers, raw = await service.post(path, body(path))
    assert status == 200
    assert headers[b"content-type"] == b"text/event-stream; charset=utf-8"
    assert headers[b"cache-control"] == b"no-cache"
    found = events(raw)
    assert found[-1] == "[DONE]"
    assert found.count("[DONE]") == 1
    kind = "chat.completion.chunk" if "chat" in path else "text_completion"
    assert {chunk["object"] for chunk in found[:-1]} == {kind}
    assert len({chunk["id"] for chunk in found[:-1]}) == 1
    assert all("usage" not in chunk for chunk in found[:-1])
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in found[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]


async def test_chat_order(service: Service) -> None:
    path = PATHS[1]
    options = {"include_usage": True}
    _, _, raw = await service.post(path, body(path, n=3, stream_options=options))
    found = events(raw)[:-1]
    # The roles of all choices come first, in their order.
    roles = [chunk["choices"][0] for chunk in found[:3]]
    assert [choice["index"] for choice in roles] == [0, 1, 2]
    for choice in roles:
        assert choice["delta"] == {"role": "assistant", "content": "", "refusal": None}
    # The reason has a chunk of its own, before the usage, which is last.
    assert found[-1]["choices"] == []
    assert found[-1]["usage"]["completion_tokens"] == 9
    for chunk in found[:-1]:
        assert chunk["usage"] is None
        if chunk["choices"][0]["finish_reason"] is not None:
            assert chunk["choices"][0]["delta"] == {}
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in found[:-1]]
    assert reasons.count("stop") == 3


@pytest.mark.parametrize("path", PATHS)
async def test_one_chunk_for_what_one_step_gave(path: str) -> None:
    engine = ScriptedRemoteEngine("abcdef", tokens_per_step=3)
    async with serving(engine) as service:
        _, _, raw = await service.post(path, body(path))
    texts = []
    for chunk in events(raw)[:-1]:
        choice = chunk["choices"][0]
        texts.append(choice.get("text", choice.get("delta", {}).get("content")))
    assert [text for text in texts if text] == ["abc", "def"]


@pytest.mark.parametrize("path", PATHS)
async def test_tokens_are_sent_as_they_come(path: str) -> None:
    engine = ScriptedRemoteEngine("Hello world", automatic=False)
    async with serving(engine) as service:
        reader, writer = await service.send(path, body(path))
        await engine.wait_for(lambda: len(engine.submitted) == 2)
        engine.step()
        engine.step()
        async with asyncio.timeout(60):
            status, _ = await read_head(reader)
            first = await read_chunk(reader)
        assert status == 200
        assert b"Hello" in first
        assert b"world" not in first
        # For chat, role and first token travel together.
        assert first.count(b"data: ") == (2 if "chat" in path else 1)
        engine.step()
        async with asyncio.timeout(60):
            assert b" world" in await read_chunk(reader)
        engine.step()
        async with asyncio.timeout(60):
            last = await read_chunk(reader)
            # The reason and the end share one write.
            assert b'"finish_reason":"stop"' in last
            assert last.endswith(b"data: [DONE]\n\n")
            assert await read_chunk(reader) == b""
        writer.close()
    assert engine.contexts == {}


@pytest.mark.parametrize("path", PATHS)
async def test_keep_alive_before_and_between_tokens(path: str) -> None:
    engine = ScriptedRemoteEngine(automatic=False)
    async with serving(engine, keep_alive_s=0.02) as service:
        reader, writer = await service.send(path, body(path))
        async with asyncio.timeout(60):
            status, _ = await read_head(reader)
            assert status == 200
            assert await read_chunk(reader) == b": keep-alive\n\n"
            engine.step()
            engine.step()
            raw = b""
            while b"Hello" not in raw:
                raw += await read_chunk(reader)
            while not raw.endswith(b": keep-alive\n\n"):
                raw += await read_chunk(reader)
            engine.automatic = True
            engine.step()
            while chunk := await read_chunk(reader):
                raw += chunk
        writer.close()
    found = events(raw.replace(b": keep-alive\n\n", b""))
    assert found[-1] == "[DONE]"
    if "chat" in path:
        assert found[0]["choices"][0]["delta"]["role"] == "assistant"


@pytest.mark.parametrize("path", PATHS)
async def test_keep_alives_come_after_a_silence_each(path: str) -> None:
    engine = ScriptedRemoteEngine(automatic=False)
    pause_s = 0.04
    async with serving(engine, keep_alive_s=pause_s) as service:
        begun = time.perf_counter()
        reader, writer = await service.send(path, body(path))
        async with asyncio.timeout(60):
            await read_head(reader)
            for _ in range(5):
                assert await read_chunk(reader) == b": keep-alive\n\n"
        # However busy the machine is, none can be early.
        assert time.perf_counter() - begun > 4 * pause_s
        writer.close()
        await engine.settle()


@pytest.mark.parametrize("path", PATHS)
async def test_the_client_ignores_keep_alives(path: str) -> None:
    engine = ScriptedRemoteEngine(automatic=False)
    async with serving(engine, keep_alive_s=0.01) as service, service.client() as client:
        stream = await client.completions.create(model="m", prompt="Hi", stream=True)
        engine.automatic = True
        engine.step()
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hello world"


@pytest.mark.parametrize("path", PATHS)
async def test_failure_in_mid_stream(
    service: Service, engine: ScriptedRemoteEngine, path: str
) -> None:
    words = engine.text("Hello", end=False)
    engine.script = lambda prompt, sampling: [*words, Failed(0, "numerical_error", "secret path")]
    status, _, raw = await service.post(path, body(path))
    assert status == 200
    found = events(raw)
    assert found[-1] == "[DONE]"
    error = found[-2]["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == "numerical_error"
    assert b"secret" not in raw
    async with service.client() as client:
        stream = await client.completions.create(model="m", prompt="Hi", stream=True)
        assert (await anext(aiter(stream))).choices[0].text == "Hello"
        with pytest.raises(openai.APIError) as caught:
            await anext(aiter(stream))
    assert caught.value.code == "numerical_error"


@pytest.mark.parametrize("path", PATHS)
async def test_a_fault_of_our_own_in_mid_stream(
    service: Service, engine: ScriptedRemoteEngine, path: str
) -> None:
    advance = engine._advance
    steps = iter([False, True, False, False])

    def broken(run: Any) -> Any:
        event = advance(run)
        if next(steps):
            # An engine that forgets what it was asked for.
            object.__setattr__(event, "logprobs", [])
        return event

    engine._advance = broken  # type: ignore[method-assign]
    status, headers, raw = await service.post(path, body(path, logprobs="chat" in path or 1))
    assert status == 200
    found = events(raw)
    assert found[-1] == "[DONE]"
    assert found[-2]["error"]["code"] == "server_error"
    assert headers[b"x-request-id"].decode() in found[-2]["error"]["message"]
    assert b"Traceback" not in raw


@pytest.mark.parametrize("path", PATHS)
async def test_deadline_in_mid_stream(path: str) -> None:
    engine = ScriptedRemoteEngine(automatic=False)
    async with serving(engine, call_timeout_s=0.2) as service:
        reader, writer = await service.send(path, body(path))
        await engine.wait_for(lambda: len(engine.submitted) == 2)
        engine.step()
        engine.step()
        raw = b""
        async with asyncio.timeout(60):
            await read_head(reader)
            while chunk := await read_chunk(reader):
                raw += chunk
        writer.close()
    found = events(raw)
    assert found[-2]["error"]["code"] == "timeout"
    assert engine.contexts == {}


async def test_a_slow_reader_holds_no_contexts() -> None:
    engine = ScriptedRemoteEngine(
        lambda prompt, sampling: [65] * 100_000, max_context_tokens=200_000, tokens_per_step=50
    )
    async with serving(engine) as service:
        many = [f"p{i}" for i in range(8)]
        content = json.dumps(
            {"model": "m", "prompt": many, "stream": True, "max_tokens": 5000, "logprobs": 5}
        )
        reader, writer = await service.send(PATHS[0], content.encode())
        await read_head(reader)
        # Nothing more is read: the answer is far larger than all buffers, then the reader leaves.
        await engine.wait_for(lambda: not engine._runs)
        writer.transport.abort()
        await engine.wait_for(lambda: not engine.contexts)
    assert service.gate.running == 0
