"""A scripted upstream, an `Upstream` before it and a server that relays, in the test's loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import aiohttp
import msgspec
from yarl import URL

from harness.gateway.serving import listening
from harness.scripted_upstream import ScriptedUpstream
from harness.waiting import until
from parrot_gateway.api.upstream.envelope import model_of
from parrot_gateway.api.upstream.passthrough import ForwardedCall, forward, forward_any
from parrot_gateway.backends.upstreams.answer import upstream_body
from parrot_gateway.backends.upstreams.client import Upstream
from parrot_gateway.calls.metadata import ORDINARY_CALL
from parrot_gateway.calls.requests.call import CallHead, CallRequest
from parrot_gateway.exceptions import GatewayError
from parrot_gateway.http.dispatch import CallGate, Dispatcher, KeyCheck
from parrot_gateway.http.exchange import Exchange
from parrot_gateway.http.web_pages import WebPageGuard
from parrot_gateway.routing.fleet.fleet import UpstreamFleet
from parrot_gateway.settings.model import UpstreamSettings
from parrot_gateway.telemetry.call_record import CallRecords

DEADLINE_S = 60.0

Started = TypeVar("Started", Upstream, UpstreamFleet)


class Relay:
    """Handles of a test: the fake, the upstream client, the gateway's URL and an HTTP client."""

    #: Of the gateway, once it is served.
    port: int
    url: str
    http: aiohttp.ClientSession

    def __init__(self, fake: ScriptedUpstream, upstream: Upstream) -> None:
        self.fake = fake
        self.upstream = upstream
        #: Errors of calls that another backend was to answer.
        self.fallbacks: list[GatewayError] = []
        self.aliases: dict[str, str] = {}
        self.timeout_s: float | None = 60.0
        self.use_fallback = False

    async def post(
        self, path: str, body: bytes | dict[str, Any], script: str = "", **headers: str
    ) -> Answer:
        """One request through the gateway."""
        return await self._send(self.url, path, body, script, headers)

    async def post_direct(
        self, path: str, body: bytes | dict[str, Any], script: str = "", **headers: str
    ) -> Answer:
        """The same request, straight to the fake."""
        return await self._send(self.fake.base_url, path, body, script, headers)

    async def _send(
        self,
        url: str,
        path: str,
        body: bytes | dict[str, Any],
        script: str,
        headers: dict[str, str],
    ) -> Answer:
        raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        sent = {"content-type": "application/json", "x-fake": script, **named}
        async with asyncio.timeout(DEADLINE_S):
            async with self.http.post(
                URL(url + path, encoded=True), data=raw, headers=sent
            ) as response:
                return Answer(response, await response.read())

    async def open(self, path: str, body: dict[str, Any], script: str) -> asyncio.StreamWriter:
        """Send a request on a bare connection and do not wait; closing it is a disconnect."""
        _, writer = await self.open_both(path, body, script)
        return writer

    async def open_both(
        self, path: str, body: dict[str, Any], script: str
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return the reader, too."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        raw = msgspec.json.encode(body)
        writer.write(
            f"POST /v1{path} HTTP/1.1\r\nhost: x\r\nx-fake: {script}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n".encode()
            + raw
        )
        await writer.drain()
        return reader, writer


class Answer:
    """Status, headers and body bytes."""

    def __init__(self, response: aiohttp.ClientResponse, body: bytes) -> None:
        self.status = response.status
        self.headers = response.headers
        self.body = body

    @property
    def json(self) -> Any:
        """The body, decoded."""
        return msgspec.json.decode(self.body)


class _Head(msgspec.Struct):
    model: str = "fake"
    stream: bool = False


@asynccontextmanager
async def started(upstream: Started) -> AsyncIterator[Started]:
    await upstream.start()
    try:
        yield upstream
    finally:
        await upstream.close()


@asynccontextmanager
async def relaying(**settings: Any) -> AsyncIterator[Relay]:
    """Everything, started; `settings` are those of the upstream."""
    chosen = {"models": "*", "backoff_s": 0.001, "max_backoff_s": 0.5, **settings}
    gateway_has_key = chosen.pop("gateway_has_key", True)
    with ScriptedUpstream() as fake:
        given = UpstreamSettings(**{"name": "fake", "url": fake.base_url, **chosen})
        async with (
            started(Upstream(given, gateway_has_key=gateway_has_key)) as upstream,
            _served(fake, upstream) as relay,
        ):
            yield relay


@asynccontextmanager
async def _served(fake: ScriptedUpstream, upstream: Upstream) -> AsyncIterator[Relay]:
    relay = Relay(fake, upstream)

    async def call(exchange: Exchange) -> None:
        body = await exchange.body(1 << 26)
        head = msgspec.json.decode(body, type=_Head)
        model = relay.aliases.get(head.model, head.model)
        request = CallRequest("chat", body, head=CallHead(head.model, head.stream))
        forwarded = ForwardedCall(
            exchange,
            upstream,
            upstream_body(request, upstream, model, ORDINARY_CALL),
            relay.timeout_s,
            "failures" if relay.use_fallback else "nothing",
        )
        failure = await forward(forwarded)
        if failure is not None:
            relay.fallbacks.append(failure.error)
            await exchange.respond(200, b'{"by": "fallback"}')

    async def any_route(exchange: Exchange) -> None:
        body = await exchange.body(1 << 26)
        name = model_of(exchange, body)
        model = None if name is None else relay.aliases.get(name, name)
        forwarded = ForwardedCall(exchange, upstream, body)
        await forward_any(forwarded, model=model, requested_model=name)

    async def quiet(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError(f"not expected here: {scope}")

    dispatcher = Dispatcher(
        hot={"/v1/chat/completions": call, "/v1/completions": call},
        tables=[],
        passthrough=any_route,
        management=quiet,
        is_management=lambda path: False,
        keys=KeyCheck(None),
        guard=WebPageGuard(),
        gate=CallGate(1000),
        calls=CallRecords(),
    )
    async with listening(dispatcher) as port:
        relay.port, relay.url = port, f"http://127.0.0.1:{port}/v1"
        async with aiohttp.ClientSession(auto_decompress=False) as relay.http:
            yield relay
        # Whatever happened, nothing may be left in flight.
        await until(lambda: upstream.slots.held == 0 and upstream.slots.waiting == 0)
