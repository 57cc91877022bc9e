"""HTTP/1.1 connections: uvicorn's, with bounds that it lacks and errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import cast

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from parrot_gateway.exceptions import InvalidRequestError
from parrot_gateway.http.exchange import DISCONNECT_EXTENSION, new_request_id

logger = logging.getLogger(__name__)

#: Bytes of a request's line and headers; more than any client sends.
MAX_HEAD_BYTES = 256 * 1024
#: Requests that may wait behind the one being answered before the connection is read no further.
MAX_PIPELINED = 8
#: Bytes of a response that are not held back any longer, so that flow control sees them.
MAX_HELD_BYTES = 64 * 1024
#: A client's time for its body, and for what it has to read, is counted anew after so many bytes.
BODY_STEP_BYTES = 256 * 1024
READ_STEP_BYTES = 64 * 1024


class _ResponseTransport:
    """The connection as one response uses it.

    What is written in one turn of the event loop leaves in one piece, the head with the first bytes
    of the body: one system call and one packet for both, and the client is not woken while the turn
    goes on. Notifies the response of the client's disconnect (`DisconnectNotifier`).
    """

    __slots__ = ("_disconnected", "_flow", "_held", "_held_bytes", "_loop", "_on_disconnect",
                 "_transport")  # fmt: skip

    def __init__(
        self, transport: asyncio.Transport, flow: FlowControl, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._transport = transport
        self._flow = flow
        self._loop = loop
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._disconnected = False
        self._on_disconnect: Callable[[], None] | None = None

    def notify_disconnect(self, callback: Callable[[], None] | None) -> None:
        self._on_disconnect = callback
        if callback is None:
            return
        # A connection that is not read does not notice its end.
        self._flow.resume_reading()
        if self._disconnected:
            self._loop.call_soon(self.disconnect)

    def disconnect(self) -> None:
        """The connection is lost."""
        self._disconnected = True
        if self._on_disconnect is not None:
            self._on_disconnect()

    def write(self, data: bytes) -> None:
        """Write at the end of this turn, or at once where there is much: flow control sees it."""
        if not self._held:
            self._loop.call_soon(self.flush)
        self._held.append(data)
        self._held_bytes += len(data)
        if self._held_bytes >= MAX_HELD_BYTES:
            self.flush()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        """Close after what has been written."""
        self.flush()
        self._transport.close()

    def flush(self) -> None:
        """Write what is held."""
        if self._held:
            held, self._held, self._held_bytes = self._held, [], 0
            if not self._transport.is_closing():
                self._transport.write(held[0] if len(held) == 1 else b"".join(held))


class ClientTimeouts:
    """Watches one connection. A request that arrives whole starts no timer.

    Args:
        loop: runs the connection.
        limit_s: for a head, for each `BODY_STEP_BYTES` of a body, and for the client to read
            `READ_STEP_BYTES` more of an answer that waits for it.
        is_held_up: whether the gateway itself keeps the request from going on.
        unsent_bytes: of answers.
        on_late_request: called when the rest of a request did not come in time.
        on_late_reader: called when the client did not read in time.
    """

    __slots__ = ("_began", "_is_held_up", "_late_reader", "_late_request", "_limit_s",
                 "_loop", "_received", "_request_timer", "_unsent", "_unsent_before",
                 "_write_timer")  # fmt: skip

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        limit_s: float,
        *,
        is_held_up: Callable[[], bool],
        unsent_bytes: Callable[[], int],
        on_late_request: Callable[[], None],
        on_late_reader: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._limit_s = limit_s
        self._is_held_up = is_held_up
        self._unsent = unsent_bytes
        self._late_request = on_late_request
        self._late_reader = on_late_reader
        self._request_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._began = 0.0
        self._received = 0
        self._unsent_before = 0

    def await_request(self) -> None:
        """A request, or the rest of one, is to come; does nothing when that is known."""
        if self._request_timer is None:
            self._began, self._received = self._loop.time(), 0
            self._request_timer = self._loop.call_later(self._limit_s, self._check_request)

    def note_body(self, num_bytes: int) -> None:
        """More of a body has come."""
        self._received += num_bytes

    def end_request(self) -> None:
        """The request is whole, or no longer needed."""
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def await_reader(self) -> None:
        """More is to be sent than the client takes."""
        if self._write_timer is None:
            self._unsent_before = self._unsent()
            self._write_timer = self._loop.call_later(self._limit_s, self._check_reader)

    def end_reader(self) -> None:
        """It has taken enough; or the connection has ended."""
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def close(self) -> None:
        """The connection has ended."""
        self.end_request()
        self.end_reader()

    def _check_request(self) -> None:
        self._request_timer = None
        now = self._loop.time()
        if self._is_held_up():
            self.await_request()
            return
        limit_s = self._limit_s * (1 + self._received // BODY_STEP_BYTES)
        left_s = self._began + limit_s - now
        if left_s <= 0:
            self._late_request()
            return
        self._request_timer = self._loop.call_later(left_s, self._check_request)

    def _check_reader(self) -> None:
        self._write_timer = None
        unsent = self._unsent()
        if unsent and self._unsent_before - unsent < READ_STEP_BYTES:
            self._late_reader()
        elif unsent:
            self.await_reader()


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol with limits; pass `http_protocol(...)` to `uvicorn.Config`.

    Bounds what uvicorn does not: the size of a request's head, of trailers and of chunk extensions;
    the time that a client takes to send a request or to read an answer. Malformed requests get an
    error in OpenAI's shape.
    """

    #: Seconds that a client may keep the gateway waiting; see `ClientTimeouts`.
    client_timeout_s = 60.0

    #: Bytes received since the parser last had something to hand on.
    _unparsed = 0
    #: A request has begun, and its end has not come.
    _in_request = False
    _in_body = False
    #: The request being answered, or the last one; `cycle` is the newest, which may wait behind it.
    _answering: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timeouts = ClientTimeouts(
            self.loop,
            self.client_timeout_s,
            is_held_up=self._holds_up,
            unsent_bytes=transport.get_write_buffer_size,
            on_late_request=self._refuse_late,
            on_late_reader=self._give_up_reader,
        )
        self._timeouts.await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timeouts.close()
        # NOTE: uvicorn knows of the newest request only.
        for cycle in (self._answering, *(waiting for waiting, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
                cast(_ResponseTransport, cycle.transport).disconnect()
        super().connection_lost(exc)
        # They hold methods of this object: all that a connection has would else wait for the
        # garbage collector.
        del self._timeouts

    def data_received(self, data: bytes) -> None:
        self._unparsed += len(data)
        super().data_received(data)
        if self._unparsed > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(
                431, f"The request's head is larger than {MAX_HEAD_BYTES} bytes.", "head_too_large"
            )
        if self._in_request or self._unparsed:
            self._timeouts.await_request()
        else:
            self._timeouts.end_request()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._timeouts.await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._timeouts.end_reader()

    def handle_websocket_upgrade(self) -> None:
        """See `HttpToolsProtocol`: from now on the connection is another protocol's."""
        self._in_request = self._in_body = False
        self._unparsed = 0
        self._timeouts.close()
        super().handle_websocket_upgrade()

    def on_message_begin(self) -> None:
        self._unparsed = 0
        self._in_request = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._unparsed = 0
        self._in_body = True
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is before:
            return
        transport = _ResponseTransport(self.transport, self.flow, self.loop)
        self.cycle.transport = cast(asyncio.Transport, transport)
        self.scope["extensions"] = {DISCONNECT_EXTENSION: transport}  # type: ignore[dict-item]
        if not self.pipeline:
            self._answering = self.cycle
        elif len(self.pipeline) < MAX_PIPELINED:
            # NOTE: uvicorn stops reading here, and would not notice that the client leaves.
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        self._timeouts.note_body(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed = 0
        self._in_request = self._in_body = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._answering = self.pipeline[-1][0]
        super().on_response_complete()
        self._watch_closing()

    def shutdown(self) -> None:
        self._flush_response()
        super().shutdown()
        self._watch_closing()

    def _watch_closing(self) -> None:
        """Give the client of a closing connection a limited time to read the rest."""
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            self._timeouts.await_reader()

    def _holds_up(self) -> bool:
        """Tell if a request is not read further, or another before it is still being answered."""
        answering = self._answering
        if self.flow.read_paused or answering is None or answering.response_complete:
            return self.flow.read_paused
        return not self._in_body or answering is not self.cycle

    def _refuse_late(self) -> None:
        is_answered = self._in_body and self.cycle.response_complete
        if is_answered or not self._in_request or self.transport.is_closing():
            # Nobody waits for an answer.
            self._close()
            return
        self._refuse(
            408,
            f"The rest of the request did not come within {self.client_timeout_s:g} s "
            "(setting server.client_timeout_s).",
            "request_timeout",
        )

    def _give_up_reader(self) -> None:
        logger.debug("a client did not read its answer; its connection is cut")
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP."""
        self._refuse(400, msg, "malformed_http")

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answer with an error, unless another answer is under way, and close the connection."""
        answering = self._answering
        if answering is None or answering.response_complete or not answering.response_started:
            body = InvalidRequestError(message, code=code).body()
            head = (
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
                f"x-request-id: {new_request_id()}\r\nconnection: close\r\n\r\n"
            )
            self._flush_response()
            self.transport.write(STATUS_LINE[status] + head.encode() + body)
        self._close()

    def _flush_response(self) -> None:
        if self._answering is not None:
            cast(_ResponseTransport, self._answering.transport).flush()

    def _close(self) -> None:
        self._flush_response()
        self.transport.close()
        self._watch_closing()


def http_protocol(client_timeout_s: float) -> type[HttpProtocol]:
    """The protocol class with a limit of its own for slow clients, in seconds."""
    return type("Protocol", (HttpProtocol,), {"client_timeout_s": client_timeout_s})
