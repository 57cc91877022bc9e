"""Serves handlers on a real socket inside the test's event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import openai
import uvicorn

from parrot_gateway.api.auth import KeyCheck
from parrot_gateway.api.chat import handle_chat
from parrot_gateway.api.completions import handle_completions
from parrot_gateway.api.dispatch import Dispatcher
from parrot_gateway.api.http import Exchange
from parrot_gateway.api.tokenize import handle_detokenize, handle_tokenize
from parrot_gateway.core.gate import CallGate
from parrot_gateway.core.generation import GenerationEngine
from parrot_gateway.settings import ServerSettings


class Service:
    """A served engine and ways to talk to it."""

    def __init__(self, port: int, gate: CallGate) -> None:
        self.port = port
        self.gate = gate
        self.root = f"http://127.0.0.1:{port}"

    def client(self) -> openai.AsyncOpenAI:
        """The real client, which never tries twice."""
        return openai.AsyncOpenAI(base_url=f"{self.root}/v1", api_key="none", max_retries=0)

    def sync_client(self) -> openai.OpenAI:
        """The same, to be used from a thread."""
        return openai.OpenAI(base_url=f"{self.root}/v1", api_key="none", max_retries=0)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A bare connection."""
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def send(
        self, path: str, body: bytes
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A request on a connection of its own; the answer is not waited for."""
        reader, writer = await self.connect()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        return reader, writer

    async def post(self, path: str, body: Any) -> tuple[int, dict[bytes, bytes], bytes]:
        """Status, headers and de-chunked body of one request."""
        raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
        reader, writer = await self.send(path, raw)
        try:
            async with asyncio.timeout(20):
                return await read_answer(reader)
        finally:
            writer.close()


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[bytes, bytes]]:
    """Status and headers."""
    lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
    headers = dict(line.lower().split(b": ", 1) for line in lines[1:] if line)
    return int(lines[0].split()[1]), headers


async def read_chunk(reader: asyncio.StreamReader) -> bytes:
    """One HTTP chunk; empty at the end."""
    size = int((await reader.readline()).strip(), 16)
    data = await reader.readexactly(size)
    await reader.readexactly(2)
    return data


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, dict[bytes, bytes], bytes]:
    """A whole answer."""
    status, headers = await read_head(reader)
    if b"content-length" in headers:
        return status, headers, await reader.readexactly(int(headers[b"content-length"]))
    parts = []
    while chunk := await read_chunk(reader):
        parts.append(chunk)
    return status, headers, b"".join(parts)


async def until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Until something is true that nothing announces."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


class _Model(msgspec.Struct):
    model: str | None = None


@asynccontextmanager
async def serving(
    engine: GenerationEngine, *, call_timeout_s: float = 30.0, keep_alive_s: float = 15.0
) -> AsyncIterator[Service]:
    """Serve one engine until the end of the block."""
    server = ServerSettings(call_timeout_s=call_timeout_s, keep_alive_s=keep_alive_s)
    peek = msgspec.json.Decoder(_Model)

    def model_of(body: bytes) -> str:
        try:
            return peek.decode(body).model or "scripted"
        except (ValueError, RecursionError):
            return "scripted"

    async def completions(exchange: Exchange) -> None:
        body = await exchange.body(1 << 26)
        await handle_completions(exchange, engine, model_of(body), body, server)

    async def chat(exchange: Exchange) -> None:
        body = await exchange.body(1 << 26)
        await handle_chat(exchange, engine, model_of(body), body, server)

    async def tokenize(exchange: Exchange) -> None:
        await handle_tokenize(exchange, engine, await exchange.body(1 << 26))

    async def detokenize(exchange: Exchange) -> None:
        await handle_detokenize(exchange, engine, await exchange.body(1 << 26))

    async def nothing_else(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError(scope["path"])

    gate = CallGate(1000)
    dispatcher = Dispatcher(
        hot={
            "/v1/completions": completions,
            "/v1/chat/completions": chat,
            "/tokenize": tokenize,
            "/detokenize": detokenize,
        },
        passthrough=None,
        quiet=nothing_else,
        quiet_v1=lambda path: False,
        keys=KeyCheck(None),
        gate=gate,
    )
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(
        dispatcher,  # type: ignore[arg-type]
        log_config=None,
        access_log=False,
        http="httptools",
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=2,
    )
    # Its main loop, which waits for signals, is not needed: starting and stopping takes no time.
    config.load()
    uvicorn_server = uvicorn.Server(config)
    uvicorn_server.lifespan = config.lifespan_class(config)
    await uvicorn_server.startup(sockets=[listener])
    try:
        yield Service(listener.getsockname()[1], gate)
    finally:
        await uvicorn_server.shutdown(sockets=[listener])
