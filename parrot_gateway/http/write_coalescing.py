"""HTTP/1.1 connections that write once a turn of the event loop.

uvicorn writes the head of an answer and each piece of its body by themselves. Clients that delay
their ACKs then see the first token up to 40 ms late, and a step of many candidates costs a system
call for each. Here everything written within one turn of the loop leaves in one piece.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from parrot_gateway.exceptions import InvalidRequestError
from parrot_gateway.http.exchange import new_request_id
from parrot_gateway.http.timeouts import Patience

logger = logging.getLogger(__name__)

#: Bytes of a request's line and headers; more than any client sends.
MAX_HEAD_BYTES = 256 * 1024

#: Bytes that are not held back any longer, so that the transport's flow control sees them.
MAX_HELD_BYTES = 64 * 1024

_Data = bytes | bytearray | memoryview


class CorkedTransport(asyncio.Transport):
    """Passes everything on to another transport, but collects what is written.

    Args:
        transport: the connection.
        loop: runs it.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._held: list[_Data] = []
        self._held_bytes = 0
        self._scheduled = False
        #: Told when the connection was closed and the client has not taken everything.
        self.on_lingering: Callable[[], None] = lambda: None

    def write(self, data: _Data) -> None:
        """Write at the end of this turn of the loop, or at once when there is much."""
        self._held.append(data)
        self._held_bytes += len(data)
        if self._held_bytes >= MAX_HELD_BYTES:
            self._flush()
        elif not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush_scheduled)

    def writelines(self, list_of_data: Iterable[_Data]) -> None:
        """Write all, in order."""
        self.write(b"".join(list_of_data))

    def _flush_scheduled(self) -> None:
        self._scheduled = False
        self._flush()

    def _flush(self) -> None:
        if not self._held:
            return
        data = self._held[0] if len(self._held) == 1 else b"".join(self._held)
        self._held = []
        self._held_bytes = 0
        if not self._transport.is_closing():
            self._transport.write(data)

    def write_eof(self) -> None:
        """Close the writing end after what has been written."""
        self._flush()
        self._transport.write_eof()

    def can_write_eof(self) -> bool:
        """Whether `write_eof` works."""
        return self._transport.can_write_eof()

    def close(self) -> None:
        """Close after what has been written."""
        self._flush()
        self._transport.close()
        if self._transport.get_write_buffer_size():
            self.on_lingering()

    def abort(self) -> None:
        """Close at once."""
        self._held = []
        self._held_bytes = 0
        self._transport.abort()

    def is_closing(self) -> bool:
        """Whether it is closed or about to be."""
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Facts about the connection."""
        return self._transport.get_extra_info(name, default)

    def is_reading(self) -> bool:
        """Whether data is being received."""
        return self._transport.is_reading()

    def pause_reading(self) -> None:
        """Receive nothing for now."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Receive again."""
        self._transport.resume_reading()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """When the protocol is asked to pause, and to go on."""
        self._transport.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        """Bytes not sent yet."""
        return self._held_bytes + self._transport.get_write_buffer_size()

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """See `set_write_buffer_limits`."""
        return self._transport.get_write_buffer_limits()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Hand the connection to another protocol, such as WebSocket."""
        self._transport.set_protocol(protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Whose connection it is."""
        return self._transport.get_protocol()


class CorkedHttpProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 on corked connections; pass it to `uvicorn.Config` as `http`, or what
    `patient_protocol` gives.

    Also bounds what uvicorn does not (the size of a request's head, of trailers and of chunk
    extensions; the time that a client takes to send a request or to read an answer), and refuses
    malformed requests in OpenAI's shape.
    """

    #: How long clients may keep the gateway waiting; see `Patience`.
    client_timeout_s = 60.0

    #: Bytes received since the parser last had something to hand on.
    _unparsed = 0
    #: A request has begun, and its end has not come.
    _in_request = False
    _in_body = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol.connection_made`."""
        corked = CorkedTransport(transport, self.loop)
        super().connection_made(corked)
        self._patience = Patience(
            self.loop,
            self.client_timeout_s,
            is_held_up=self._holds_up,
            unsent_bytes=corked.get_write_buffer_size,
            on_late_request=self._refuse_late,
            on_late_reader=self._give_up_reader,
        )
        corked.on_lingering = self._patience.await_reader
        self._patience.await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol.connection_lost`."""
        self._patience.close()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol.data_received`."""
        self._unparsed += len(data)
        super().data_received(data)
        if self._unparsed > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(
                431, f"The request's head is larger than {MAX_HEAD_BYTES} bytes.", "head_too_large"
            )
        if self._in_request or self._unparsed:
            self._patience.await_request()
        else:
            self._patience.end_request()

    def pause_writing(self) -> None:
        """See `asyncio.Protocol.pause_writing`."""
        super().pause_writing()
        self._patience.await_reader()

    def resume_writing(self) -> None:
        """See `asyncio.Protocol.resume_writing`."""
        super().resume_writing()
        if not self.transport.is_closing():
            self._patience.end_reader()

    def handle_websocket_upgrade(self) -> None:
        """See `HttpToolsProtocol`: from now on the connection is another protocol's."""
        self._in_request = self._in_body = False
        self._unparsed = 0
        self._patience.close()
        super().handle_websocket_upgrade()

    def on_message_begin(self) -> None:
        """See `HttpToolsProtocol`."""
        self._unparsed = 0
        self._in_request = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """See `HttpToolsProtocol`."""
        self._unparsed = 0
        self._in_body = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """See `HttpToolsProtocol`."""
        self._unparsed = 0
        self._patience.note_body(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        """See `HttpToolsProtocol`."""
        self._unparsed = 0
        self._in_request = self._in_body = False
        super().on_message_complete()

    def _holds_up(self) -> bool:
        """Whether a request is not read further, or another one before it is still answered."""
        is_answering = self.cycle is not None and not self.cycle.response_complete
        return self.flow.read_paused or (is_answering and not self._in_body)

    def _refuse_late(self) -> None:
        is_answered = self._in_body and self.cycle.response_complete
        if is_answered or not self._in_request or self.transport.is_closing():
            # Nobody waits for an answer.
            self.transport.close()
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
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = InvalidRequestError(message, code=code).body()
            head = (
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
                f"x-request-id: {new_request_id()}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(STATUS_LINE[status] + head.encode() + body)
        self.transport.close()


def patient_protocol(client_timeout_s: float) -> type[CorkedHttpProtocol]:
    """`CorkedHttpProtocol` with another limit for slow clients."""
    return type("Protocol", (CorkedHttpProtocol,), {"client_timeout_s": client_timeout_s})
