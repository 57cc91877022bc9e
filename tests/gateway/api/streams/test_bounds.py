"""Bounds of all streams, with clients that do not read at all."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from harness.waiting import until

from parrot_gateway.api.streams.stream import Streams
from parrot_gateway.calls.requests.call import CallRequest
from parrot_gateway.exceptions import StreamNotFoundError
from parrot_gateway.http.exchange import DISCONNECT_EXTENSION, EVENT_STREAM, Exchange
from parrot_gateway.settings.model import StreamSettings

EVENT = b"data: " + b"x" * 992 + b"\n\n"


class SlowClient:
    """A connection that takes the head of an answer, and no more before it is told to."""

    def __init__(self, streams: Streams, events: int, event: bytes = EVENT) -> None:
        self.reads = asyncio.Event()
        self.got = b""
        self.written = 0
        self._left: Any = None
        scope = {
            "method": "POST",
            "path": "/v1/completions",
            "headers": [(b"x-parrot-resume", b"true")],
            "extensions": {DISCONNECT_EXTENSION: self},
        }
        self.exchange = Exchange(scope, self._receive, self._send)
        self.name = ""
        #: The call ends without the end of its answer.
        self.breaks = False
        self._event = event
        self.call = asyncio.create_task(self._call(streams, events))

    def notify_disconnect(self, callback: Any) -> None:
        self._left = callback

    def leave(self) -> None:
        self._left()

    async def _receive(self) -> Any:
        raise AssertionError

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.name = dict(message["headers"])[b"x-parrot-stream"].decode()
            return
        await self.reads.wait()
        self.got += message["body"]

    async def _call(self, streams: Streams, events: int) -> None:
        body = json.dumps({"model": "m", "prompt": "x", "stream": True}).encode()
        streams.adopt(self.exchange, CallRequest("completions", body))
        self.exchange.cancel_on_disconnect()
        await self.exchange.start_stream(200, EVENT_STREAM, b"")
        for number in range(events):
            await self.exchange.write(self._event)
            self.written = number + 1
        if self.breaks:
            raise RuntimeError("a fault of ours")
        await self.exchange.end_stream()


async def settle() -> None:
    for _ in range(200):
        await asyncio.sleep(0)


async def test_clients_that_do_not_read_hold_little() -> None:
    limits = StreamSettings(max_bytes=2_000_000, max_stream_bytes=500_000)
    streams = Streams(limits, 60.0)
    clients = [SlowClient(streams, 1000) for _ in range(16)]
    await settle()
    # Each is held back at half of its bound, and all together at theirs.
    assert max(client.written for client in clients) <= 251
    assert streams.statistics().kept < 16
    await settle()
    assert streams.statistics().size_bytes <= 2_000_000 + 16 * 65_000
    for client in clients:
        client.reads.set()
    await asyncio.gather(*(client.call for client in clients))
    # Those that had to make room have got everything all the same.
    for client in clients:
        assert client.got.count(EVENT[:-1]) == 1000
        assert client.got.endswith(b"\nid: 1000\n\n")
    left = streams.statistics()
    assert left.size_bytes <= 2_000_000
    assert left.size_bytes == sum(
        streams.find("default", client.name).log.size_bytes
        for client in clients
        if _is_kept(streams, client.name)
    )
    streams.close()
    assert streams.statistics() == (0, 0, 0)


def _is_kept(streams: Streams, name: str) -> bool:
    try:
        streams.find("default", name)
    except StreamNotFoundError:
        return False
    return True


async def test_one_that_leaves_after_making_room_is_cancelled() -> None:
    streams = Streams(StreamSettings(max_kept=1), 60.0)
    first, second = SlowClient(streams, 100_000), SlowClient(streams, 10)
    await settle()
    assert not _is_kept(streams, first.name)
    assert not first.call.done()
    first.leave()
    await until(first.call.done)
    assert first.call.cancelled()
    assert first.exchange.disconnected
    second.reads.set()
    await second.call
    assert streams.statistics().kept == 1
    streams.close()


async def test_very_many_streams_make_room_at_once() -> None:
    """One event takes all the room: no deeper calls, however many have to go."""
    streams = Streams(StreamSettings(max_kept=3000, max_bytes=3_100_000), 60.0)
    small = [SlowClient(streams, 1) for _ in range(2900)]
    await settle()
    assert streams.statistics().kept == 2900
    large = SlowClient(streams, 1, b"data: " + b"x" * 3_000_000 + b"\n\n")
    await settle()
    assert streams.statistics().kept < 300
    for client in (large, *small):
        client.reads.set()
    await asyncio.gather(large.call, *(client.call for client in small))
    assert streams.statistics().size_bytes <= 3_100_000
    streams.close()


async def test_a_call_that_ends_without_its_answer() -> None:
    streams = Streams(StreamSettings(), 60.0)
    client = SlowClient(streams, 2)
    client.breaks = True
    await until(client.call.done)
    assert isinstance(client.call.exception(), RuntimeError)
    assert not _is_kept(streams, client.name)
    client.reads.set()
    await until(lambda: b"server_error" in client.got)
    assert client.got.count(EVENT[:-1]) == 2
    assert streams.statistics() == (0, 0, 0)


async def test_who_comes_back_stops_the_clock() -> None:
    streams = Streams(StreamSettings(resume_s=0.3), 60.0)
    first, second = SlowClient(streams, 100_000), SlowClient(streams, 100_000)
    await settle()
    stream = streams.find("default", first.name)
    first.leave()
    await until(lambda: not stream.is_read)
    with stream.reading():
        # The other's time begins later, and ends.
        second.leave()
        await until(second.call.done)
        assert not _is_kept(streams, second.name)
        assert _is_kept(streams, first.name)
        assert not first.call.done()
    await until(first.call.done)


async def test_one_that_leaves_before_its_call_watches_for_that() -> None:
    streams = Streams(StreamSettings(), 60.0)
    scope: dict[str, Any] = {
        "method": "POST",
        "path": "/v1/completions",
        "headers": [(b"x-parrot-resume", b"true")],
        "extensions": {DISCONNECT_EXTENSION: (notifier := Notifier())},
    }
    exchange = Exchange(scope, _nothing, _nothing)
    reached = asyncio.Event()

    async def call() -> None:
        streams.adopt(exchange, CallRequest("completions", b'{"model": "m", "stream": true}'))
        reached.set()
        await settle()
        exchange.cancel_on_disconnect()
        await asyncio.Event().wait()

    task = asyncio.create_task(call())
    await reached.wait()
    notifier.callback()
    await until(task.done)
    assert task.cancelled()
    assert exchange.disconnected


class Notifier:
    callback: Any = None

    def notify_disconnect(self, callback: Any) -> None:
        self.callback = callback


async def _nothing(*_: Any) -> Any:
    """Take whatever comes."""
