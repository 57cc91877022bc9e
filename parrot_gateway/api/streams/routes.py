"""`/v1/streams/{id}`: reading on in a stream whose connection was lost, and ending its call."""

from __future__ import annotations

from dataclasses import dataclass

from parrot_gateway.api.streams.follow import answer_with_events
from parrot_gateway.api.streams.stream import STREAM_HEADER, Stream, Streams
from parrot_gateway.exceptions import CallCancelledError, invalid_value
from parrot_gateway.http.exchange import Exchange
from parrot_gateway.http.route_table import Query, route

LAST_EVENT_ID = b"last-event-id"


@dataclass(frozen=True)
class StreamRoutes:
    streams: Streams

    @route("GET", "/v1/streams/{stream_id}")
    async def read(self, exchange: Exchange, stream_id: str) -> None:
        """Go on reading a stream whose connection was lost."""
        query = Query(exchange, "starting_after")
        stream = self.streams.find(exchange.tenant, stream_id)
        log, position = stream.log, _position(exchange, query, stream)
        if log.is_closed and position >= log.end:
            # NOTE: tells an `EventSource` that it need not come back.
            await exchange.start_stream(204, [], b"", is_whole=True)
            return
        log.read(position)
        with stream.reading():
            await answer_with_events(
                exchange,
                log,
                position,
                self.streams.keep_alive_s,
                headers=[(STREAM_HEADER, stream.id.encode())],
                failure=stream.failure,
            )

    @route("DELETE", "/v1/streams/{stream_id}")
    async def delete(self, exchange: Exchange, stream_id: str) -> None:
        """Cancel the call of a stream, if it still runs, and forget the stream."""
        stream = self.streams.find(exchange.tenant, stream_id)
        stream.cancel(CallCancelledError("The call was cancelled: its stream was deleted."))
        await exchange.respond_json({"id": stream.id, "object": "stream", "deleted": True})


def _position(exchange: Exchange, query: Query, stream: Stream) -> int:
    """Return the position from which the client reads on.

    Raises:
        InvalidRequestError: the stream has not sent as much.
    """
    # The header first: an `EventSource` sends it to the address that it was given.
    name, text = "Last-Event-ID", exchange.headers.get(LAST_EVENT_ID, b"").decode("latin-1")
    if not text:
        name, text = "starting_after", query.text("starting_after") or "0"
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise invalid_value(name, "expected the number of an event.")
    if int(text) > stream.log.end:
        raise invalid_value(name, f"this stream has sent {stream.log.end} events so far.")
    return int(text)
