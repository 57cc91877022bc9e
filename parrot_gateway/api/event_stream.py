"""Runs a generation and answers with it: whole, or as server-sent events.

What an API writes is its `Answer`. A stream has only events and comments, each closed by a blank
line. The status line waits for the first event, so that a call which fails before it gets a proper
status; after a long silence it goes out with a comment instead. What ends a stream leaves in one
write with whatever precedes it, also when the stream fails.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import msgspec

from parrot_gateway.backends.own.generate import CollectedPrompt, Generation, collect
from parrot_gateway.backends.own.placement import Placer
from parrot_gateway.calls.generation_request import GenerationRequest, Update
from parrot_gateway.calls.observer import GenerationObserver
from parrot_gateway.calls.usage import Usage
from parrot_gateway.exceptions import GatewayError
from parrot_gateway.http.exchange import EVENT_STREAM, Exchange
from parrot_gateway.telemetry.call_record import CallObserver

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


class StreamedAnswer(Protocol):
    """Writes the answer of one call as events; a class for each API."""

    def opening(self) -> bytes:
        """The events before the first update; they leave with the first that is sent."""
        ...

    def events(self, update: Update) -> bytes:
        """One update as events; empty when there is nothing to show."""
        ...

    def closing(self, usage: Usage) -> bytes:
        """The events after the last update, with what ends the stream."""
        ...

    def failure(self, error: GatewayError) -> bytes:
        """The events that report a failure in mid-stream, with what ends the stream."""
        ...


class Answer(StreamedAnswer, Protocol):
    """The same, and whole."""

    def whole(self, collected: Sequence[CollectedPrompt], usage: Usage) -> bytes:
        """The JSON of an answer that is not streamed."""
        ...


def data_event(value: Any) -> bytes:
    """Plain data as one event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def failure_events(error: GatewayError) -> bytes:
    """A failure in mid-stream, as OpenAI's clients read it."""
    return data_event({"error": error.to_dict()}) + DONE


class EventStream:
    """One stream of events over an exchange.

    Args:
        exchange: not responded to yet.
        keep_alive_s: silence after which a comment is due.
        opening: events that precede the first one sent.
        failure: writes the end of a stream that fails.
    """

    def __init__(
        self,
        exchange: Exchange,
        keep_alive_s: float,
        opening: bytes = b"",
        failure: Callable[[GatewayError], bytes] = failure_events,
    ) -> None:
        self._exchange = exchange
        self._keep_alive_s = keep_alive_s
        self._opening = opening
        self._failure = failure
        #: `time.perf_counter()` at which a comment is due.
        self.quiet_until = time.perf_counter() + keep_alive_s
        exchange.on_failure(self.fail)

    @property
    def is_silent(self) -> bool:
        """Return whether a comment is due."""
        return time.perf_counter() >= self.quiet_until

    def send(self, events: bytes) -> Awaitable[None]:
        """The sending of events, to be awaited."""
        if self._opening:
            events, self._opening = self._opening + events, b""
        return self._write(events)

    def keep_alive(self) -> Awaitable[None]:
        """The sending of a comment, which clients ignore and proxies count as life."""
        return self._write(KEEP_ALIVE)

    async def finish(self, events: bytes) -> None:
        last = self._opening + events
        if self._exchange.responded:
            await self._exchange.end_stream(last)
        else:
            await self._exchange.respond(200, last, EVENT_STREAM)

    async def fail(self, error: GatewayError) -> None:
        """End a stream whose status line is out with an error in band."""
        self._exchange.record.fail(error)
        await self._exchange.end_stream(self._failure(error))

    def _write(self, data: bytes) -> Awaitable[None]:
        self.quiet_until = time.perf_counter() + self._keep_alive_s
        if self._exchange.responded:
            return self._exchange.write(data)
        return self._exchange.start_stream(200, EVENT_STREAM, data)


def answer_call(
    exchange: Exchange,
    placer: Placer,
    request: GenerationRequest,
    answer: Answer,
    *,
    stream: bool,
    deadline: float,
    keep_alive_s: float,
    observers: Sequence[GenerationObserver] = (),
) -> Awaitable[None]:
    """Run a generation and answer the exchange with it, once awaited.

    Args:
        exchange: not responded to yet, or begun with comments as a stream.
        deadline, observers: see `Generation`.
        keep_alive_s: see `EventStream`.

    Raises:
        GatewayError: it failed before anything was sent; later failures go in band.
    """
    record = exchange.record
    record.streamed = stream
    generation = Generation(placer, request, deadline, [CallObserver(record), *observers])
    if stream:
        return stream_call(exchange, generation, answer, keep_alive_s)
    return _whole_call(exchange, generation, answer, len(request.prompts), request.best_of)


async def _whole_call(
    exchange: Exchange, generation: Generation, answer: Answer, prompts: int, best_of: int
) -> None:
    with generation:
        collected = await collect(generation, prompts, best_of)
    await exchange.respond(200, answer.whole(collected, generation.state.usage))


async def stream_call(
    exchange: Exchange, generation: Generation, answer: StreamedAnswer, keep_alive_s: float
) -> None:
    """Run a generation that was not entered, and answer the exchange with a stream.

    Raises:
        GatewayError: it failed before anything was sent; later failures go in band.
    """
    stream = EventStream(exchange, keep_alive_s, answer.opening(), answer.failure)
    try:
        last = b""
        with generation:
            while not generation.state.done:
                update = await generation.next(stream.quiet_until)
                if update is None:
                    await stream.keep_alive()
                    continue
                last = answer.events(update)
                if last and not generation.state.done:
                    await stream.send(last)
        # NOTE: outside of `with`, so that a client slow to read holds no blocks of the engine.
        await stream.finish(last + answer.closing(generation.state.usage))
    except GatewayError as error:
        if not exchange.responded:
            raise
        await stream.fail(error)
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
