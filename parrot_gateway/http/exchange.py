"""One HTTP exchange on raw ASGI, under the hot paths.

Knows headers, bodies, streams and disconnects. Knows nothing of models or JSON shapes. The
management routes use FastAPI instead; both share the errors and the headers made here.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from parrot_gateway.exceptions import GatewayError, RequestTooLargeError

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Headers: TypeAlias = list[tuple[bytes, bytes]]

JSON: tuple[bytes, bytes] = (b"content-type", b"application/json")
EVENT_STREAM: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # NOTE: proxies such as nginx must not buffer the stream.
    (b"x-accel-buffering", b"no"),
]


def new_request_id() -> str:
    """An id for an answer, by which the operator finds it in the log."""
    return "req_" + secrets.token_hex(16)


class ClientDisconnected(Exception):
    """The client disconnected before the answer was complete."""


class Exchange:
    """One request and its answer.

    Attributes:
        request_id: ours, in `x-request-id` of every answer, also of errors.
        started: `time.perf_counter()` at the first line of our code.
    """

    __slots__ = ("_add_headers", "_receive", "_send", "_watcher", "completed", "disconnected",
                 "error_body", "fail_in_band", "request_id", "responded", "scope",
                 "started")  # fmt: skip

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.started = time.perf_counter()
        self.scope = scope
        self._receive = receive
        self._send = send
        self.request_id = new_request_id()
        #: True once the status line is out: from then on errors go in band.
        self.responded = False
        #: True once the last byte of the answer was handed over.
        self.completed = False
        #: Ends an answer that has begun with an error in it, where its format has a way to.
        self.fail_in_band: Callable[[GatewayError], Awaitable[None]] | None = None
        self.disconnected = False
        #: How an error is written, where a route has a form of its own.
        self.error_body: Callable[[GatewayError], bytes] = GatewayError.body
        self._add_headers: Callable[[Headers], None] | None = None
        self._watcher: asyncio.Task[None] | None = None

    @property
    def method(self) -> str:
        """`GET`, `POST`, …"""
        return str(self.scope["method"])

    @property
    def path(self) -> str:
        """The decoded path, without the query."""
        return str(self.scope["path"])

    def header(self, name: bytes) -> bytes | None:
        """The first header of this lower-case name."""
        for key, value in self.scope["headers"]:
            if key == name:
                return bytes(value)
        return None

    async def body(self, limit: int) -> bytes:
        """The whole request body.

        Raises:
            RequestTooLargeError: more than `limit` bytes, announced or sent.
            ClientDisconnected: the client left before it was complete.
        """
        announced = self.header(b"content-length")
        if announced is not None and announced.isdigit() and int(announced) > limit:
            raise _too_large(limit)
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        chunk: bytes = message.get("body", b"")
        if not message.get("more_body", False):
            if len(chunk) > limit:
                raise _too_large(limit)
            return chunk
        chunks, size = [chunk], len(chunk)
        while message.get("more_body", False):
            if size > limit:
                raise _too_large(limit)
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            chunk = message.get("body", b"")
            chunks.append(chunk)
            size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        return b"".join(chunks)

    def cancel_on_disconnect(self, task: asyncio.Task[Any]) -> None:
        """Cancel `task` the moment the client goes away. Call after the body has been read.

        `finish` ends the watch; `disconnected` tells a cancellation by this from any other. A
        second watch takes the place of the first.
        """
        self.finish()

        async def watch() -> None:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            self.disconnected = True
            task.cancel()

        self._watcher = asyncio.create_task(watch(), name="disconnect-watch")

    def on_headers(self, add: Callable[[Headers], None]) -> None:
        """Let `add` extend the headers of the answer, errors included, just before it begins."""
        self._add_headers = add

    def standard_headers(self) -> Headers:
        """What every answer carries and the OpenAI client reads."""
        elapsed_ms = (time.perf_counter() - self.started) * 1000
        return [
            (b"x-request-id", self.request_id.encode()),
            (b"openai-processing-ms", b"%d" % elapsed_ms),
            (b"openai-version", b"2020-10-01"),
        ]

    async def respond(self, status: int, body: bytes, headers: Headers | None = None) -> None:
        """Send a whole answer; JSON unless `headers` name another content type."""
        headers = list(headers or ())
        if not any(name == b"content-type" for name, _ in headers):
            headers.append(JSON)
        headers.append((b"content-length", str(len(body)).encode()))
        if self._add_headers is not None:
            self._add_headers(headers)
        headers += self.standard_headers()
        self.responded = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
        self.completed = True

    async def respond_error(self, error: GatewayError) -> None:
        """Send `error` in OpenAI's shape, or the route's own."""
        await self.respond(error.status, self.error_body(error), error.headers())

    async def start_stream(
        self, status: int, headers: Headers, first: bytes, *, is_whole: bool = False
    ) -> None:
        """Send the status line, headers and first bytes of a stream.

        With `is_whole` these bytes are all, and the end of the stream leaves in the same write.
        """
        self.responded = True
        headers = list(headers)
        if self._add_headers is not None:
            self._add_headers(headers)
        headers += self.standard_headers()
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await (self.end_stream if is_whole else self.write)(first)

    async def write(self, data: bytes) -> None:
        """Send further bytes of a stream; waits while the client is slow to read."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end_stream(self, data: bytes = b"") -> None:
        """Send the last bytes of a stream."""
        await self._send({"type": "http.response.body", "body": data, "more_body": False})
        self.completed = True

    def finish(self) -> None:
        """End the watch for a disconnect. Safe to call twice."""
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None


def _too_large(limit: int) -> RequestTooLargeError:
    return RequestTooLargeError(
        f"The request body is larger than this server's limit of {limit} bytes "
        "(setting server.max_body_bytes)."
    )
