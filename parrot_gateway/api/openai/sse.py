"""Server-sent events as OpenAI's clients read them.

Only `data:` lines and comments, each closed by a blank line. The status line waits for the first
event, so that a call which fails before it gets a proper status; after a long silence it goes out
with a comment instead. A stream ends with `[DONE]` in one write with whatever precedes it, also
when it fails.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec

from parrot_gateway.exceptions import GatewayError
from parrot_gateway.generation.generate import Generation
from parrot_gateway.generation.request import Update
from parrot_gateway.http.exchange import EVENT_STREAM, Exchange

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


class EventStream:
    """One stream of events over an exchange.

    Args:
        exchange: not responded to yet.
        keep_alive_s: silence after which a comment is due.
        opening: events that precede the first one sent.
    """

    #: What ends a stream.
    END = DONE

    def __init__(self, exchange: Exchange, keep_alive_s: float, opening: bytes = b"") -> None:
        self._exchange = exchange
        self._keep_alive_s = keep_alive_s
        self._opening = opening
        #: `time.perf_counter()` at which a comment is due.
        self.quiet_until = time.perf_counter() + keep_alive_s
        exchange.fail_in_band = self.fail

    async def send(self, events: bytes) -> None:
        """Send whole events."""
        if self._opening:
            events, self._opening = self._opening + events, b""
        await self._write(events)

    async def keep_alive(self) -> None:
        """Send a comment, which clients ignore and proxies count as life."""
        await self._write(KEEP_ALIVE)

    async def finish(self, events: bytes) -> None:
        """Send the last events and end the stream."""
        last = self._opening + events + self.END
        if self._exchange.responded:
            await self._exchange.end_stream(last)
        else:
            await self._exchange.respond(200, last, EVENT_STREAM)

    async def fail(self, error: GatewayError) -> None:
        """End a stream whose status line is out with an error in band."""
        await self._exchange.end_stream(self.failure(error) + self.END)

    def failure(self, error: GatewayError) -> bytes:
        """The events that report a failure in mid-stream."""
        return b"data: " + msgspec.json.encode({"error": error.to_dict()}) + b"\n\n"

    async def _write(self, data: bytes) -> None:
        self.quiet_until = time.perf_counter() + self._keep_alive_s
        if self._exchange.responded:
            await self._exchange.write(data)
        else:
            await self._exchange.start_stream(200, EVENT_STREAM, data)


async def stream_generation(
    exchange: Exchange,
    generation: Generation,
    *,
    keep_alive_s: float,
    opening: bytes,
    encode: Callable[[Update], bytes],
    closing: Callable[[], bytes],
) -> None:
    """Run a generation and answer with its events, up to `[DONE]`.

    Args:
        keep_alive_s, opening: see `EventStream`.
        others: see `run_stream`.

    Raises:
        GatewayError: it failed before anything was sent; later failures go in band.
    """
    stream = EventStream(exchange, keep_alive_s, opening)
    await run_stream(exchange, stream, generation, encode=encode, closing=closing)


async def run_stream(
    exchange: Exchange,
    stream: EventStream,
    generation: Generation,
    *,
    encode: Callable[[Update], bytes],
    closing: Callable[[], bytes],
) -> None:
    """Run a generation and answer with its events on `stream`.

    Args:
        exchange: not responded to yet.
        stream: of that exchange.
        generation: not entered yet.
        encode: an update as events; empty when there is nothing to show.
        closing: the events after the last update.

    Raises:
        GatewayError: it failed before anything was sent; later failures go in band.
    """
    try:
        last = b""
        with generation:
            while not generation.state.done:
                update = await generation.next(stream.quiet_until)
                if update is None:
                    await stream.keep_alive()
                    continue
                last = encode(update)
                if last and not generation.state.done:
                    await stream.send(last)
        # NOTE: outside of `with`, so that a client slow to read holds no blocks of the engine.
        await stream.finish(last + closing())
    except GatewayError as error:
        if not exchange.responded:
            raise
        logger.warning("%s: failed in mid-stream: %s", exchange.request_id, error.message)
        await stream.fail(error)
    except asyncio.CancelledError:
        raise
    except Exception:
        if not exchange.responded:
            raise
        logger.exception("%s: failed in mid-stream", exchange.request_id)
        await stream.fail(
            GatewayError(
                "The gateway failed to finish this answer. The operator's log has the details "
                f"under {exchange.request_id}."
            )
        )
