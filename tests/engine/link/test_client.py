"""The engine's end of the link, against a real WebSocket server."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

import pytest
from harness.engine_checks import greedy
from harness.scripted_engine import ScriptedEngine
from harness.waiting import until
from parrot_engine.engine.driver import EngineDriver
from parrot_engine.link import client
from parrot_engine.link.client import EngineLink, LinkRefusedError, Outbox
from parrot_engine.link.wire import (
    Events,
    FromEngine,
    Goodbye,
    Heartbeat,
    Refused,
    Register,
    Registered,
    Submit,
    decode_from_engine,
    encode,
)
from parrot_engine.protocol import Failed, Fill, Filled, FreeContext, Generate, Generated
from parrot_engine.text import TextAssets
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed

WAIT_S = 10.0
KEY = "join-key"
TEXT = TextAssets("{}")


class Peer:
    """One connection, seen from the gateway's side."""

    def __init__(self, websocket: ServerConnection) -> None:
        self.websocket = websocket
        self.closed = asyncio.Event()

    async def receive(self, *kinds: type) -> Any:
        """The next message of one of these kinds."""
        async with asyncio.timeout(WAIT_S):
            while True:
                data = await self.websocket.recv()
                assert isinstance(data, bytes)
                message: FromEngine = decode_from_engine(data)
                if isinstance(message, kinds):
                    return message

    async def send(self, message: Any) -> None:
        await self.websocket.send(encode(message))

    async def register(self, heartbeat_s: float = 0.05) -> Register:
        message = await self.receive(Register)
        await self.send(Registered("eng_1", heartbeat_s))
        return message  # type: ignore[no-any-return]


class Gateway:
    """Accepts connections and hands them to the test."""

    def __init__(self) -> None:
        self.peers: asyncio.Queue[Peer] = asyncio.Queue()
        self.server: Server
        self.refuse: HTTPStatus | None = None
        self.attempts = 0

    @property
    def url(self) -> str:
        host, port = self.server.sockets[0].getsockname()[:2]
        return f"ws://{host}:{port}/v1/engines/join"

    async def peer(self) -> Peer:
        async with asyncio.timeout(WAIT_S):
            return await self.peers.get()

    async def handle(self, websocket: ServerConnection) -> None:
        peer = Peer(websocket)
        await self.peers.put(peer)
        await websocket.wait_closed()

    async def check(self, connection: ServerConnection, request: Any) -> Any:
        self.attempts += 1
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return connection.respond(HTTPStatus.UNAUTHORIZED, "no")
        if self.refuse is not None:
            return connection.respond(self.refuse, "no")
        return None


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    made = Gateway()
    made.server = await serve(
        made.handle, "127.0.0.1", 0, process_request=made.check, compression=None
    )
    yield made
    made.server.close()
    await made.server.wait_closed()


@asynccontextmanager
async def joined(
    gateway: Gateway, engine: ScriptedEngine, **options: Any
) -> AsyncIterator[tuple[EngineLink, EngineDriver, asyncio.Task[None]]]:
    driver = EngineDriver(engine)
    driver.start()
    link = EngineLink(driver, TEXT, url=gateway.url, **{"join_key": KEY, "name": "test", **options})
    running = asyncio.create_task(link.run())
    try:
        yield link, driver, running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await asyncio.to_thread(driver.close, WAIT_S)


async def test_registers_runs_and_reports(gateway: Gateway) -> None:
    async with joined(gateway, ScriptedEngine()) as (_, driver, _running):
        peer = await gateway.peer()
        register = await peer.register()
        assert register == Register("test", driver.info, TEXT)
        await peer.send(Submit([Fill(1, [1, 2]), Generate(1, greedy(3))]))
        events: list[Any] = []
        while not (events and getattr(events[-1], "finish_reason", None)):
            events += (await peer.receive(Events)).events
        assert isinstance(events[0], Filled)
        assert sum(len(e.token_ids) for e in events if isinstance(e, Generated)) == 3
        while (await peer.receive(Heartbeat)).stats.generated_tokens != 3:
            pass


async def test_one_message_per_step(gateway: Gateway) -> None:
    async with joined(gateway, ScriptedEngine()):
        peer = await gateway.peer()
        await peer.register()
        await peer.send(
            Submit([p for n in range(1, 9) for p in (Fill(n, [n]), Generate(n, greedy(4)))])
        )
        sizes = []
        while sum(sizes) < 8 * 5:
            sizes.append(len((await peer.receive(Events)).events))
        # All contexts share each message: a fill and four tokens make five steps.
        assert sizes == [8] * 5


async def test_a_lost_connection_frees_everything_and_joins_again(gateway: Gateway) -> None:
    async with joined(gateway, ScriptedEngine()) as (_, driver, _running):
        peer = await gateway.peer()
        await peer.register()
        await peer.send(Submit([Fill(1, [1]), Fill(2, [1])]))
        await peer.receive(Events)
        peer.websocket.transport.abort()
        again = await gateway.peer()
        await again.register()
        await until(lambda: driver.num_contexts == 0)
        # The same numbers are free: this is a new context 1.
        await again.send(Submit([Fill(1, [5, 6, 7])]))
        assert (await again.receive(Events)).events == [Filled(1, 3, 0)]


@pytest.mark.parametrize(
    "junk", ["text", b"\x00junk", encode(Registered("x", 1.0))], ids=["text", "junk", "wrong"]
)
async def test_a_malformed_message_ends_the_connection(gateway: Gateway, junk: Any) -> None:
    async with joined(gateway, ScriptedEngine()):
        peer = await gateway.peer()
        await peer.register()
        await peer.websocket.send(junk)
        with pytest.raises(ConnectionClosed):
            # Heartbeats may still come before the end.
            await peer.receive(Goodbye)
        await (await gateway.peer()).register()


async def test_an_engine_held_back_by_its_connection_joins_again(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's thread waits for room in the outbox when the connection is lost."""
    made: list[Outbox] = []

    class Stuck(Outbox):
        def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
            super().__init__(loop, max_steps=1)
            made.append(self)

        async def send_all(self, websocket: Any) -> None:
            if len(made) > 1:
                await super().send_all(websocket)
            await asyncio.Event().wait()

    monkeypatch.setattr(client, "Outbox", Stuck)
    engine = ScriptedEngine()
    async with joined(gateway, engine):
        peer = await gateway.peer()
        await peer.register()
        await peer.send(Submit([Fill(1, [1]), Generate(1, greedy(100))]))
        # The events of the first step are unsent, those of the second have no room.
        await until(lambda: engine.stats().steps >= 2)
        peer.websocket.transport.abort()
        again = await gateway.peer()
        await again.register()
        await again.send(Submit([Fill(1, [5, 6, 7])]))
        assert (await again.receive(Events)).events == [Filled(1, 3, 0)]


async def test_pauses_grow_up_to_a_limit_and_begin_anew(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    async def wait(event: asyncio.Event, timeout_s: float) -> None:
        pauses.append(timeout_s)
        await asyncio.sleep(0)

    monkeypatch.setattr(client, "_wait", wait)
    monkeypatch.setattr(client.random, "uniform", lambda low, high: high)
    gateway.refuse = HTTPStatus.SERVICE_UNAVAILABLE
    async with joined(gateway, ScriptedEngine()):
        await until(lambda: len(pauses) >= 9)
        gateway.refuse = None
        peer = await gateway.peer()
        await peer.register()
        await peer.receive(Heartbeat)
        refused = len(pauses)
        peer.websocket.transport.abort()
        await (await gateway.peer()).register()
    assert pauses[:9] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    assert pauses[refused] == 0.1


async def test_a_gateway_that_is_away_is_waited_for(gateway: Gateway) -> None:
    gateway.refuse = HTTPStatus.SERVICE_UNAVAILABLE
    async with joined(gateway, ScriptedEngine()):
        await until(lambda: gateway.attempts >= 2)
        gateway.refuse = None
        await (await gateway.peer()).register()


@pytest.mark.parametrize("code", [1001, 1012])
async def test_a_gateway_that_shuts_down_in_order_is_waited_for_quietly(
    gateway: Gateway, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    caplog.set_level(logging.DEBUG, "parrot_engine.link.client")

    def said(level: int) -> list[str]:
        return [item.getMessage() for item in caplog.records if item.levelno == level]

    async with joined(gateway, ScriptedEngine()):
        peer = await gateway.peer()
        await peer.register()
        await peer.receive(Heartbeat)
        attempts, gateway.refuse = gateway.attempts, HTTPStatus.SERVICE_UNAVAILABLE
        await peer.websocket.close(code)
        await until(lambda: gateway.attempts >= attempts + 2)
        assert said(logging.WARNING) == []
        assert sum("shut down" in line for line in said(logging.INFO)) == 1
        assert said(logging.DEBUG)
        # Once it is back, its loss is news again.
        gateway.refuse = None
        peer = await gateway.peer()
        await peer.register()
        await peer.receive(Heartbeat)
        peer.websocket.transport.abort()
        await until(lambda: bool(said(logging.WARNING)))


@pytest.mark.parametrize("refusal", [HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND, "key", "version"])
async def test_a_final_refusal_is_an_error(gateway: Gateway, refusal: Any) -> None:
    options = {"join_key": "wrong"} if refusal == "key" else {}
    if isinstance(refusal, HTTPStatus):
        gateway.refuse = refusal
    async with joined(gateway, ScriptedEngine(), **options) as (_, _driver, running):
        if refusal == "version":
            peer = await gateway.peer()
            await peer.receive(Register)
            await peer.send(Refused("another version", retry=False))
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(LinkRefusedError) as caught:
                await running
        assert "wrong" not in str(caught.value)


async def test_refused_for_now_tries_again(gateway: Gateway) -> None:
    async with joined(gateway, ScriptedEngine()):
        peer = await gateway.peer()
        await peer.receive(Register)
        await peer.send(Refused("full", retry=True))
        await (await gateway.peer()).register()


async def peer_with_a_context(gateway: Gateway) -> Peer:
    peer = await gateway.peer()
    await peer.register()
    await peer.send(Submit([Fill(1, [1])]))
    await peer.receive(Events)
    return peer


async def test_stop_finishes_what_runs(gateway: Gateway) -> None:
    async with joined(gateway, ScriptedEngine()) as (link, _, running):
        peer = await peer_with_a_context(gateway)
        link.stop()
        assert (await peer.receive(Goodbye)).reason
        await peer.send(Submit([Generate(1, greedy(2))]))
        while (await peer.receive(Events)).events[-1].finish_reason is None:
            pass
        assert not running.done()
        await peer.send(Submit([FreeContext(1)]))
        async with asyncio.timeout(WAIT_S):
            await running


async def test_stopping_twice_does_not_wait(gateway: Gateway) -> None:
    async with joined(gateway, ScriptedEngine()) as (link, _, running):
        peer = await peer_with_a_context(gateway)
        link.stop()
        await peer.receive(Goodbye)
        link.stop()
        async with asyncio.timeout(WAIT_S):
            await running


async def test_stop_while_the_gateway_is_away(gateway: Gateway) -> None:
    gateway.refuse = HTTPStatus.BAD_GATEWAY
    async with joined(gateway, ScriptedEngine()) as (link, _, running):
        await until(lambda: gateway.attempts >= 1)
        link.stop()
        async with asyncio.timeout(WAIT_S):
            await running


async def test_events_that_nobody_takes_hold_the_engine_back() -> None:
    outbox = Outbox(asyncio.get_running_loop(), max_steps=3)
    put = 0
    sent: list[bytes] = []

    class Socket:
        async def send(self, data: bytes) -> None:
            sent.append(data)

    def produce() -> None:
        nonlocal put
        for number in range(10):
            outbox.put([Filled(number, 1, 0)])
            put += 1

    thread = threading.Thread(target=produce)
    thread.start()
    await until(lambda: put == 3)
    sending = asyncio.create_task(outbox.send_all(Socket()))  # type: ignore[arg-type]
    await until(lambda: len(sent) == 10)
    messages = [decode_from_engine(data) for data in sent]
    assert messages == [Events([Filled(number, 1, 0)]) for number in range(10)]
    sending.cancel()
    thread.join(WAIT_S)
    thread = threading.Thread(target=produce)
    thread.start()
    await until(lambda: put == 13)
    # The connection is gone: nobody waits any more, and nothing is kept.
    outbox.close()
    await asyncio.to_thread(thread.join, WAIT_S)
    assert put == 20


async def test_an_engine_that_breaks_down_fails_its_contexts(gateway: Gateway) -> None:
    broken = threading.Event()

    def before_step() -> None:
        if broken.is_set():
            raise RuntimeError("no more")

    async with joined(gateway, ScriptedEngine(before_step=before_step)) as (_, driver, _running):
        peer = await gateway.peer()
        await peer.register()
        await peer.send(Submit([Fill(1, [1])]))
        await peer.receive(Events)
        broken.set()
        await peer.send(Submit([Generate(1, greedy(5))]))
        (failed,) = (await peer.receive(Events)).events
        assert isinstance(failed, Failed)
        assert failed.code == "engine_lost"
        assert driver.crashed
