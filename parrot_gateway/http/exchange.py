"""One HTTP exchange on raw ASGI, under the hot paths.

Knows headers, bodies, streams and disconnects. Knows nothing of models or JSON shapes. The
management routes use FastAPI instead; both share the errors and the headers made here.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any, Protocol, TypeAlias

import msgspec

from parrot_gateway.calls.metadata import ORDINARY_CALL
from parrot_gateway.exceptions import GatewayError
from parrot_gateway.http.content_encoding import body_too_large, decompress, is_gzip
from parrot_gateway.telemetry.call_record import CallRecord, CallRecords

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Headers: TypeAlias = list[tuple[bytes, bytes]]
Copy: TypeAlias = Callable[[bytes, bool], None]

JSON: tuple[bytes, bytes] = (b"content-type", b"application/json")
EVENT_STREAM: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # NOTE: proxies such as nginx must not buffer the stream.
    (b"x-accel-buffering", b"no"),
]


#: Key in `scope["extensions"]` of the connection's `DisconnectNotifier`. Without one, as for a line
#: of a batch, nobody disconnects.
DISCONNECT_EXTENSION = "parrot.disconnect"


class DisconnectNotifier(Protocol):
    """Notifies of a client's disconnect without a task that waits for it."""

    def notify_disconnect(self, callback: Callable[[], None] | None) -> None:
        """Call `callback` once the connection is lost, also if it is already; None calls none."""


def new_request_id() -> str:
    """An id for an answer, by which the operator finds it in the log."""
    return "req_" + os.urandom(16).hex()


def call_id_of_request(request_id: str) -> str:
    """The id of the call of a request that has no other; any other id as it is."""
    # The request's own digits: random ones cost more.
    return "call_" + request_id[-24:] if request_id.startswith("req_") else request_id


def _body_of(error: GatewayError) -> bytes:
    return error.body()


class ClientDisconnected(Exception):
    """The client disconnected before the answer was complete."""


class Exchange:
    """One request and its answer.

    Attributes:
        method: `GET`, `POST`, …; `GET` for `HEAD` too, of whose answer the server sends the head.
        path: decoded, without the query.
        headers: by lower-case name; the first of a name counts.
        tenant: of the caller, once its key has been checked.
        record: of the call that it makes, if it makes one: model, status and errors are there.
        metadata: of the call that it makes, as far as that is known without its body.
        request_id: ours, in `x-request-id` of every answer, also of errors.
        started: `time.perf_counter()` at the first line of our code.
    """

    __slots__ = (
        "_add_headers",
        "_copies",
        "_end_with",
        "_notifier",
        "_receive",
        "_send",
        "_watched",
        "completed",
        "disconnected",
        "error_body",
        "headers",
        "metadata",
        "method",
        "path",
        "record",
        "request_id",
        "responded",
        "scope",
        "started",
    )  # fmt: skip

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.started = time.perf_counter()
        self.scope = scope
        self.method: str = "GET" if scope["method"] == "HEAD" else scope["method"]
        self.path: str = scope["path"]
        self.headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))
        self.metadata = ORDINARY_CALL
        self.request_id = request_id = new_request_id()
        self.record = CallRecord(request_id, call_id_of_request(request_id), self.started)
        #: True once the status line is out: from then on errors go in band.
        self.responded = False
        #: True once the last byte of the answer was handed over.
        self.completed = False
        self.disconnected = False
        self._receive = receive
        self._send = send
        self._end_with: Callable[[GatewayError], Awaitable[None]] | None = None
        #: Makes the body of an error, in the form of the route.
        self.error_body: Callable[[GatewayError], bytes] = _body_of
        self._add_headers: Callable[[Headers], None] | None = None
        self._copies: tuple[Copy, ...] = ()
        extensions = scope.get("extensions")
        self._notifier: DisconnectNotifier | None = (
            extensions.get(DISCONNECT_EXTENSION) if extensions else None
        )
        self._watched: asyncio.Task[Any] | None = None

    @property
    def tenant(self) -> str:
        return self.record.tenant

    @tenant.setter
    def tenant(self, tenant: str) -> None:
        self.record.tenant = tenant

    async def body(self, limit: int) -> bytes:
        """The whole request body, decompressed; its `Content-Encoding` is then gone.

        Raises:
            RequestTooLargeError: more than `limit` bytes, announced, sent or decompressed.
            UnsupportedMediaTypeError: it is compressed, but not with gzip.
            ClientDisconnected: the client left before it was complete.
        """
        encoding = self.headers.get(b"content-encoding")
        compressed = encoding is not None and is_gzip(encoding)
        body = await self._raw_body(limit)
        if encoding is not None:
            if compressed and body:
                body = await asyncio.to_thread(decompress, body, limit)
            self.scope["headers"] = [
                item for item in self.scope["headers"] if item[0] != b"content-encoding"
            ]
        if self.record.content is not None:
            self.record.content.asked(self.path, body)
        return body

    async def _raw_body(self, limit: int) -> bytes:
        announced = self.headers.get(b"content-length")
        if announced is not None and announced.isdigit() and int(announced) > limit:
            raise body_too_large(limit)
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        chunk: bytes = message.get("body", b"")
        if not message.get("more_body", False):
            if len(chunk) > limit:
                raise body_too_large(limit)
            return chunk
        chunks, size = [chunk], len(chunk)
        while message.get("more_body", False):
            if size > limit:
                raise body_too_large(limit)
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            chunk = message.get("body", b"")
            chunks.append(chunk)
            size += len(chunk)
        if size > limit:
            raise body_too_large(limit)
        return b"".join(chunks)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The request body as it comes, of any length.

        Raises:
            ClientDisconnected: the client left before it was complete.
        """
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            yield message.get("body", b"")
            if not message.get("more_body", False):
                return

    def redirect(
        self, send: Send, notifier: DisconnectNotifier
    ) -> tuple[Send, DisconnectNotifier | None]:
        """Let the answer go elsewhere, and `notifier` say when nobody wants it any more. Call it
        after the body has been read, and before anything is sent.

        Returns:
            the client's connection: where the answer would have gone, and what notifies of the
            client's disconnect.
        """
        connection = self._send, self._notifier
        self._send, self._notifier = send, notifier
        return connection

    def cancel_on_disconnect(self) -> None:
        """Cancel the current task the moment the client goes away. Call after the body has been
        read.

        `finish` ends the watch; `disconnected` distinguishes a cancellation by this from any other.
        A second watch takes the place of the first.
        """
        if self._watched is not None:
            self.finish()
        self._watched = asyncio.current_task()
        if self._notifier is not None:
            self._notifier.notify_disconnect(self._disconnect)

    def _disconnect(self) -> None:
        if self._watched is not None:
            self.disconnected = True
            self._watched.cancel()

    def on_headers(self, add: Callable[[Headers], None]) -> None:
        """Let `add` extend the headers of the answer, errors included, just before it begins."""
        earlier = self._add_headers

        def add_all(headers: Headers) -> None:
            if earlier is not None:
                earlier(headers)
            add(headers)

        self._add_headers = add_all

    def begin_call(self, calls: CallRecords, path: str) -> None:
        """The request is a call, whose record is begun; see `CallRecords.begin`."""
        calls.begin(self.record, path, self.headers)
        if self.record.content is not None:
            self.copy_answer(self.record.take_answer)

    def copy_answer(self, take: Copy) -> None:
        """Let `take` have the bytes of the answer, each piece before it is sent; the second
        argument marks the last one, which never comes when the answer breaks off."""
        self._copies += (take,)

    def stop_copying(self, take: Copy) -> None:
        """Let `take` have no more of the answer."""
        self._copies = tuple(each for each in self._copies if each != take)

    def _copy(self, data: bytes, is_last: bool) -> None:
        for take in self._copies:
            take(data, is_last)

    def on_error(self, write: Callable[[GatewayError], bytes]) -> None:
        """Let `write` make the body of an error, for a route with a form of its own."""
        self.error_body = write

    def on_failure(self, end: Callable[[GatewayError], Awaitable[None]]) -> None:
        """Let `end` finish an answer that has begun with an error in band."""
        self._end_with = end

    def standard_headers(self) -> Headers:
        """The headers of every answer, which the OpenAI client reads."""
        elapsed_ms = (time.perf_counter() - self.started) * 1000
        return [
            (b"x-request-id", self.request_id.encode()),
            (b"openai-processing-ms", b"%d" % elapsed_ms),
            (b"openai-version", b"2020-10-01"),
        ]

    def _name_servers(self, headers: Headers) -> None:
        """Name the servers that could not answer, and the one that did."""
        record = self.record
        headers.append((b"x-parrot-tried", ", ".join(record.tried).encode("latin-1", "replace")))
        if record.engine is not None and all(name != b"x-parrot-engine" for name, _ in headers):
            headers.append((b"x-parrot-engine", record.engine.encode("latin-1", "replace")))

    async def respond(self, status: int, body: bytes, headers: Headers | None = None) -> None:
        """Send a whole answer; JSON unless `headers` name another content type."""
        headers = list(headers or ())
        for name, _ in headers:
            if name == b"content-type":
                break
        else:
            headers.append(JSON)
        headers.append((b"content-length", b"%d" % len(body)))
        if self._add_headers is not None:
            self._add_headers(headers)
        if self.record.tried:
            self._name_servers(headers)
        headers += self.standard_headers()
        self.responded = True
        self.record.status = status
        if self._copies:
            self._copy(body, True)
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
        self.completed = True

    async def respond_json(self, value: Any, status: int = 200) -> None:
        """Send a whole answer of plain data."""
        await self.respond(status, msgspec.json.encode(value))

    async def respond_error(self, error: GatewayError) -> None:
        """Send `error` in OpenAI's shape, or the route's own."""
        self.record.fail(error)
        await self.respond(error.status, self.error_body(error), error.headers())

    async def fail_in_band(self, error: GatewayError) -> bool:
        """End an answer that has begun with an error in it; False where its format has no way."""
        if self._end_with is None:
            return False
        self.record.fail(error)
        await self._end_with(error)
        return True

    async def start_stream(
        self, status: int, headers: Headers, first: bytes, *, is_whole: bool = False
    ) -> None:
        """Send the status line, headers and first bytes of a stream.

        With `is_whole` these bytes are all, and the end of the stream leaves in the same write.
        """
        self.responded = True
        self.record.status = status
        headers = list(headers)
        if self._add_headers is not None:
            self._add_headers(headers)
        if self.record.tried:
            self._name_servers(headers)
        headers += self.standard_headers()
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await (self.end_stream if is_whole else self.write)(first)

    def write(self, data: bytes) -> Awaitable[None]:
        """The sending of further bytes of a stream, to be awaited: the client may read slowly."""
        if self._copies:
            self._copy(data, False)
        return self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end_stream(self, data: bytes = b"") -> None:
        """Send the last bytes of a stream."""
        if self._copies:
            self._copy(data, True)
        await self._send({"type": "http.response.body", "body": data, "more_body": False})
        self.completed = True

    def release(self) -> None:
        """Drop the callbacks, once nothing more is sent.

        Most of them hold the exchange. Without this, request and answer (some 20 kB of a stream)
        wait for the garbage collector.
        """
        self._end_with, self._add_headers, self._copies = None, None, ()
        self.error_body = _body_of

    def finish(self) -> None:
        """End the watch for a disconnect. Safe to call twice."""
        if self._watched is None:
            return
        self._watched = None
        if self._notifier is not None:
            self._notifier.notify_disconnect(None)
