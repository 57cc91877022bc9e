"""What passes between the handler of an attended call and its client.

Adds the headers that tell of the session and the call, reads the text into the output variable, and
knows that comments may have gone out while the call still waited: from then on there is only one
way left to tell of a failure, in band.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from parrot_gateway.api.openai.sse import DONE, KEEP_ALIVE
from parrot_gateway.api.semantic.answer_text import MAX_HELD_BYTES, AnswerReader
from parrot_gateway.engines.usage import usage_of_body
from parrot_gateway.exceptions import GatewayError
from parrot_gateway.http.exchange import EVENT_STREAM, Exchange, Headers, Message, Send
from parrot_gateway.semantic.execution.job import Job

logger = logging.getLogger(__name__)


class ResponseObserver:
    """Sits between an exchange and its client.

    Args:
        exchange: not answered yet.
        job: the call.
        headers: those that are known before the call runs.
        clock: the time for the job.
    """

    def __init__(
        self, exchange: Exchange, job: Job, headers: Headers, clock: Callable[[], float]
    ) -> None:
        self.reader = AnswerReader()
        #: Why the text does not become a value, while the client gets its answer all the same.
        self.refusal: GatewayError | None = None
        self._exchange = exchange
        self._job = job
        self._headers = headers
        self._clock = clock
        self._reads = job.output is not None or job.context is not None
        #: How long the call waited for its inputs; what it waited for an engine is added.
        self.waited_s = 0.0
        #: Comments went out before the handler began.
        self._began = False
        #: The handler's head, held until the first byte of the body or swallowed.
        self._head: Message | None = None
        self._status = 0
        #: Collects an answer that comes as no stream, after a stream was begun.
        self._collected: bytearray | None = None
        self._send: Send
        exchange.intercept(self._wrap)

    def _wrap(self, send: Send) -> Send:
        self._send = send
        return self._pass

    async def keep_alive(self) -> None:
        """Send a comment while the call waits; the first one begins the stream."""
        if not self._began:
            self._began = True
            head = [*EVENT_STREAM, *self._headers, *self._exchange.standard_headers()]
            await self._send({"type": "http.response.start", "status": 200, "headers": head})
        await self._send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})

    async def _pass(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start(message)
            return
        body: bytes = message.get("body", b"")
        more: bool = message.get("more_body", False)
        if self._reads and self._status < 400:
            self._read(body)
        if self._collected is not None:
            self._collected += body[: MAX_HELD_BYTES - len(self._collected)]
            if not more:
                await self._send({"type": "http.response.body", "body": self._in_band()})
            return
        head, self._head = self._head, None
        if head is not None:
            if not more:
                self._note_usage(head, body)
            await self._send(head)
        await self._send(message)

    def _start(self, message: Message) -> None:
        headers: Headers = list(message["headers"])
        content_type = next((v for n, v in headers if n == b"content-type"), b"")
        self._status = message["status"]
        upstream = next((v for n, v in headers if n == b"x-parrot-engine"), None)
        self._job.call.engine = (
            self._exchange.engine if upstream is None else upstream.decode("latin-1")
        )
        self._job.call.placement = self._exchange.placement
        self.reader.start(self._status, content_type)
        if self._began:
            if not (self._status < 400 and content_type.startswith(b"text/event-stream")):
                self._collected = bytearray()
            return
        engine = self._exchange.engine
        if engine is not None:
            headers.append((b"x-parrot-engine", engine.encode()))
        waited_ms = (self.waited_s + self._exchange.queued_s) * 1000
        headers.append((b"x-parrot-queue-ms", b"%d" % waited_ms))
        self._head = {**message, "headers": [*headers, *self._headers]}

    def _note_usage(self, head: Message, body: bytes) -> None:
        """A whole answer tells how much of its prompt was found in the cache."""
        usage = usage_of_body(body) if self._status < 400 else None
        if usage is not None:
            head["headers"].append((b"x-parrot-cached-tokens", b"%d" % usage.cached_tokens))

    def _read(self, body: bytes) -> None:
        if self.refusal is not None:
            return
        try:
            self._job.append(self.reader.feed(body), self._clock())
        except GatewayError as error:
            self.refusal = error

    def finish(self) -> None:
        """The answer is over; its last text goes into the variable.

        Raises:
            GatewayError: there is no value.
        """
        if self.refusal is not None:
            raise self.refusal
        if self._reads:
            self._job.append(self.reader.end(), self._clock())
        if self.reader.usage is not None:
            self._job.call.tokens = self.reader.usage.completion_tokens

    def _in_band(self) -> bytes:
        """A whole answer as the end of a stream that has begun."""
        collected = bytes(self._collected or b"")
        try:
            fields = msgspec.json.decode(collected, type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            fields = {}
        if "error" not in fields:
            error = GatewayError("The model's server did not answer with a stream.")
            return b"data: " + error.body() + b"\n\n" + DONE
        return b"data: " + msgspec.json.encode({"error": fields["error"]}) + b"\n\n" + DONE
