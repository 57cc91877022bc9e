"""Runs deferred calls through the very handlers that answer clients.

Each gets an exchange of its own without a connection: the rendered body goes in, and a cancellation
is all it takes to end the work on an engine. An engine of our own hands its text over as it is;
what an upstream sends is read for its text.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from parrot_gateway.api.semantic.answer_text import AnswerReader
from parrot_gateway.engines.catalog import EngineTarget
from parrot_gateway.exceptions import GatewayError
from parrot_gateway.generation.request import Usage
from parrot_gateway.generation.requests.validation import decode
from parrot_gateway.http.exchange import ClientDisconnected, Exchange, Headers, Message, Scope
from parrot_gateway.semantic.execution.call_metadata import metadata_of
from parrot_gateway.semantic.execution.job import Job

if TYPE_CHECKING:
    from parrot_gateway.server.gateway import Gateway

#: Answers a call whose body was read: exchange, body.
Answerer: TypeAlias = Callable[[Exchange, bytes], Awaitable[None]]

#: Of the client's headers: those that speak of its connection or its patience, not of the call.
_NOT_THE_CALLS = frozenset(
    {
        b"content-length",
        b"transfer-encoding",
        b"connection",
        b"accept",
        b"accept-encoding",
        b"x-stainless-read-timeout",
        b"x-stainless-timeout",
        b"x-stainless-retry-count",
    }
)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _Choices(msgspec.Struct):
    best_of: int | None = None


_choices_decoder = msgspec.json.Decoder(_Choices)


class InternalRunner:
    """Answers deferred calls.

    Args:
        gateway: for what is known of models.
        answerers: by route.
    """

    def __init__(self, gateway: Gateway, answerers: dict[str, Answerer]) -> None:
        self._gateway = gateway
        self._answerers = answerers

    async def run(self, job: Job, body: bytes) -> None:
        """See `CallRunner.run`."""
        service = self._gateway.semantic
        wire = _Wire(job, service.clock)
        headers = job.spec.origin if isinstance(job.spec.origin, list) else []
        exchange = Exchange(_scope(job.spec.path, headers), wire.receive, wire.send)
        exchange.metadata = metadata_of(job, service.objectives, job.session.tenant)
        exchange.reader = wire
        try:
            if not isinstance(self._gateway.resolve(job.call.model), EngineTarget):
                body = _as_stream(body)
            await self._answerers[job.spec.path](exchange, body)
            if exchange.responded:
                job.append(wire.answer.end(), service.clock())
        except GatewayError:
            if wire.error is not None:
                raise wire.error from None
            raise
        finally:
            exchange.finish()
            job.call.engine = exchange.engine or wire.engine
            job.call.placement = exchange.placement
            if wire.num_tokens is not None:
                job.call.tokens = wire.num_tokens


def _as_stream(body: bytes) -> bytes:
    """The body of a call whose text is to come as an upstream writes it.

    Raises:
        InvalidRequestError: its `best_of` is no integer.
    """
    head = decode(body, _choices_decoder)
    if head.best_of is not None and head.best_of > 1:
        # Which candidate is best is only known in the end.
        return body
    fields = _FIELDS.decode(body)
    fields["stream"] = msgspec.Raw(b"true")
    # Not every upstream knows these options.
    fields.pop("stream_options", None)
    return msgspec.json.encode(fields)


class _Wire:
    """The other end of an exchange without a connection."""

    def __init__(self, job: Job, clock: Callable[[], float]) -> None:
        #: What was sent, where something was.
        self.answer = AnswerReader()
        #: What the text's reader or owner did not accept.
        self.error: GatewayError | None = None
        self.engine: str | None = None
        self._job = job
        self._clock = clock
        self._handed_over: Usage | None = None

    @property
    def num_tokens(self) -> int | None:
        """Tokens that were generated, where the answer told it."""
        usage = self._handed_over or self.answer.usage
        return None if usage is None else usage.completion_tokens

    def write(self, text: str) -> None:
        """See `TextReader.write`."""
        self._job.append(text, self._clock())

    def end(self, usage: Usage) -> None:
        """See `TextReader.end`."""
        self._handed_over = usage

    async def receive(self) -> Message:
        """The body is known, and nobody hangs up: nothing is to be received."""
        raise ClientDisconnected

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = dict(message["headers"])
            self.answer.start(message["status"], headers.get(b"content-type", b""))
            engine = headers.get(b"x-parrot-engine")
            self.engine = None if engine is None else engine.decode("latin-1")
            return
        try:
            self._job.append(self.answer.feed(message.get("body", b"")), self._clock())
        except GatewayError as error:
            self.error = self.error or error
            raise


def _scope(path: str, headers: Headers) -> Scope:
    kept = [(name, value) for name, value in headers if name not in _NOT_THE_CALLS]
    return {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": kept,
    }
