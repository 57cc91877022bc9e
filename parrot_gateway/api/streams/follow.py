"""Writes the events of a log to a client, from any of them on, as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from parrot_gateway.api.event_stream import KEEP_ALIVE, failure_events
from parrot_gateway.calls.event_log import EventLog
from parrot_gateway.exceptions import GatewayError
from parrot_gateway.http.exchange import EVENT_STREAM, Exchange, Headers


class Reader(Protocol):
    """A client whose answer has begun; an `Exchange` is one."""

    def write(self, data: bytes) -> Awaitable[None]:
        """The sending of further bytes, to be awaited: the client may read slowly."""
        ...

    def end_stream(self, data: bytes = b"") -> Awaitable[None]:
        """The sending of the last bytes."""
        ...


async def follow(reader: Reader, log: EventLog, position: int, keep_alive_s: float) -> None:
    """Send the events from number `position` on, up to the last one; comments bridge silence.

    Raises:
        EventsGoneError: the next event is no longer kept, because other readers were faster.
    """
    while True:
        events, position = log.read(position)
        if log.is_closed and position >= log.end:
            await reader.end_stream(events)
            log.note_read(position)
            return
        if events:
            await reader.write(events)
            log.note_read(position)
        try:
            async with asyncio.timeout(keep_alive_s):
                await log.wait(position)
        except TimeoutError:
            await reader.write(KEEP_ALIVE)


async def answer_with_events(
    exchange: Exchange,
    log: EventLog,
    position: int,
    keep_alive_s: float,
    *,
    headers: Headers | None = None,
    failure: Callable[[GatewayError], bytes] = failure_events,
) -> None:
    """Answer with the events from number `position` on, up to the last one.

    Args:
        exchange: not responded to yet.
        headers: of the answer, besides those of event streams.
        failure: writes the end of a stream that fails.
    """

    async def fail(error: GatewayError) -> None:
        exchange.record.fail(error)
        await exchange.end_stream(failure(error))

    exchange.on_failure(fail)
    exchange.cancel_on_disconnect()
    # Its end does not wait for that of the stream.
    is_head = exchange.scope["method"] == "HEAD"
    await exchange.start_stream(200, [*EVENT_STREAM, *(headers or ())], b"", is_whole=is_head)
    if not is_head:
        await follow(exchange, log, position, keep_alive_s)
