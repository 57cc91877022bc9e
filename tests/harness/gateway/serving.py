"""Serves the whole gateway on a real socket, inside the test's event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import openai
import uvicorn
from parrot_engine.link.wire import (
    Events,
    Register,
    Submit,
    decode_from_engine,
    decode_from_gateway,
    encode,
)
from parrot_engine.protocol import Event

from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.waiting import until
from parrot_gateway.backends.own.remote import RemoteEngine
from parrot_gateway.http.connection import HttpProtocol
from parrot_gateway.server.app import create_app
from parrot_gateway.server.gateway import Gateway
from parrot_gateway.settings.model import (
    BatchSettings,
    LinkingSettings,
    ModelSettings,
    SchedulerSettings,
    ServerSettings,
    SessionSettings,
    Settings,
    StreamSettings,
    TelemetrySettings,
    UISettings,
    UpstreamSettings,
)

#: The messages of a short chat.
HI = [{"role": "user", "content": "Hi"}]


class Service:
    """A served engine and ways to talk to it."""

    def __init__(self, port: int, gateway: Gateway, remotes: list[RemoteEngine]) -> None:
        self.port = port
        self.gateway = gateway
        self.gate = gateway.gate
        self.remotes = remotes
        self.remote = remotes[0]
        self.root = f"http://127.0.0.1:{port}"

    def client(self) -> openai.AsyncOpenAI:
        """The real client, which never tries twice."""
        return openai.AsyncOpenAI(base_url=f"{self.root}/v1", api_key="none", max_retries=0)

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

    async def answer(self, path: str, body: Any, status: int = 200) -> dict[str, Any]:
        """The JSON that answers a request; its status must be this."""
        given, _, answer = await self.post(path, body)
        assert given == status, answer
        decoded: dict[str, Any] = msgspec.json.decode(answer)
        return decoded

    async def complete(self, **body: Any) -> dict[str, Any]:
        """The answer to a completion."""
        return await self.answer("/v1/completions", {"model": "m", **body})

    async def chat(self, status: int = 200, **body: Any) -> dict[str, Any]:
        """The answer to a chat, or its refusal with this status."""
        return await self.answer(
            "/v1/chat/completions", {"model": "m", "messages": HI, **body}, status
        )

    async def respond(self, **body: Any) -> dict[str, Any]:
        """The answer to a response's request."""
        return await self.answer("/v1/responses", {"model": "m", "input": "Hi", **body})

    async def message(self, **body: Any) -> dict[str, Any]:
        """The answer to a message's request."""
        whole = {"model": "m", "messages": HI, "max_tokens": 16, **body}
        return await self.answer("/v1/messages", whole)

    async def ask(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and JSON of one request."""
        status, _, answer = await self.post(path, body)
        return status, msgspec.json.decode(answer)

    async def post(self, path: str, body: Any) -> tuple[int, dict[bytes, bytes], bytes]:
        """Status, headers and de-chunked body of one request."""
        raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
        reader, writer = await self.send(path, raw)
        try:
            async with asyncio.timeout(60):
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


@asynccontextmanager
async def listening(app: Any, **options: Any) -> AsyncIterator[int]:
    """The port at which an application is served, until the end of the block."""
    listener = socket.create_server(("127.0.0.1", 0))
    given = {"http": HttpProtocol, "lifespan": "off", "server_header": False, **options}
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        # As in `serve`: uvicorn's 5 s pass while a busy machine imports what a first call needs.
        timeout_keep_alive=75,
        timeout_graceful_shutdown=2,
        **given,
    )
    # Its main loop, which waits for signals, is not needed: starting and stopping takes no time.
    config.load()
    http = uvicorn.Server(config)
    http.lifespan = config.lifespan_class(config)
    await http.startup(sockets=[listener])
    try:
        yield listener.getsockname()[1]
    finally:
        await http.shutdown(sockets=[listener])


@asynccontextmanager
async def linked(engine: ScriptedRemoteEngine, gateway: Gateway) -> AsyncIterator[RemoteEngine]:
    """Join `engine`: every primitive and event passes through the wire format."""
    registration = Register("scripted", engine.info, engine.tokenizer.assets)
    remote = gateway.registry.add(registration, engine.tokenizer)

    async def pump() -> None:
        while True:
            await remote.has_outgoing.wait()
            while (data := remote.take_outgoing()) is not None:
                message = decode_from_gateway(data)
                assert isinstance(message, Submit)
                engine.submit(message.primitives)

    def deliver(events: list[Event]) -> None:
        message = decode_from_engine(encode(Events(events)))
        assert isinstance(message, Events)
        remote.deliver(message.events)

    engine.deliver = deliver
    task = asyncio.create_task(pump())
    try:
        yield remote
    finally:
        task.cancel()


@asynccontextmanager
async def serving(
    *engines: ScriptedRemoteEngine,
    call_timeout_s: float = 30.0,
    keep_alive_s: float = 15.0,
    server: dict[str, Any] | None = None,
    scheduler: SchedulerSettings | None = None,
    sessions: SessionSettings | None = None,
    batches: BatchSettings | None = None,
    upstreams: Sequence[UpstreamSettings] = (),
    models: Sequence[ModelSettings] = (),
    ui: UISettings | None = None,
    telemetry: TelemetrySettings | None = None,
    streams: StreamSettings | None = None,
) -> AsyncIterator[Service]:
    """The whole gateway with joined engines, until the end of the block. Any model name does.

    `server` are further settings of the section `server`.
    """
    settings = Settings(
        scheduler=scheduler or SchedulerSettings(),
        sessions=sessions or SessionSettings(),
        server=ServerSettings(
            call_timeout_s=call_timeout_s, keep_alive_s=keep_alive_s, **(server or {})
        ),
        batches=batches or BatchSettings(),
        # With batches the lifespan runs, whose linking process takes three times what the rest of
        # a gateway does. Tests that link start it by themselves.
        linking=LinkingSettings(enabled=batches is None),
        upstreams=list(upstreams),
        models=list(models),
        ui=ui or UISettings(),
        telemetry=telemetry or TelemetrySettings(),
        streams=streams or StreamSettings(),
        aliases={"*": engines[0].info.model},
    )
    gateway = Gateway(settings)
    async with AsyncExitStack() as links:
        remotes = [await links.enter_async_context(linked(engine, gateway)) for engine in engines]
        async with listening(
            create_app(gateway), lifespan="off" if batches is None else "on"
        ) as port:
            yield Service(port, gateway, remotes)
        for engine, remote in zip(engines, remotes, strict=True):
            await engine.settle()
            assert remote._channels == {}, "channels were left open"
            assert (remote.running, remote.queued_tokens) == (0, 0)
        await until(lambda: not gateway.scheduling.describe()["tasks"])
