"""Answers that outlive their connections: each is written to a log that clients read.

`Streams.adopt` stands between a call and the connection on which it was asked. The call goes on as
any other: it answers its exchange, waits where its answer is read slowly, and is cancelled by what
it takes for a disconnect. That comes once nobody has read for `streams.resume_s`. The first client
is a reader like those that come later.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from parrot_gateway.api.semantic.fields import RESUME_HEADER, read_fields
from parrot_gateway.api.streams.follow import follow
from parrot_gateway.api.streams.numbered_events import EventNumberer
from parrot_gateway.calls.event_log import EventLog
from parrot_gateway.calls.requests.call import CallRequest
from parrot_gateway.exceptions import (
    CallCancelledError,
    GatewayError,
    OverloadedError,
    StreamNotFoundError,
    invalid_value,
)
from parrot_gateway.http.exchange import Exchange, Headers, Message, Send
from parrot_gateway.settings.model import StreamSettings

logger = logging.getLogger(__name__)

STREAM_HEADER = b"x-parrot-stream"

#: Readers of one stream at once.
MAX_READERS = 8
#: Kept of a stream that had to make room for others, for those who read it.
_EVICTED_BYTES = 64 * 1024


class Connection:
    """The connection on which a call was asked, as `follow` writes to it."""

    __slots__ = ("_send",)

    def __init__(self, send: Send) -> None:
        self._send = send

    async def write(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end_stream(self, data: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": False})


async def _nowhere(message: Message) -> None:
    """Send nothing."""


class Stream:
    """The answer of one call. Its exchange sends to `take`, and is notified by this (see
    `DisconnectNotifier`) when nobody wants the answer any more.

    Attributes:
        id: names it for readers; nobody can guess it.
        log: its events.
        counted_bytes: what `Streams` has counted of them.
    """

    def __init__(self, exchange: Exchange, streams: Streams) -> None:
        self.id = "stream_" + os.urandom(16).hex()
        self.tenant = exchange.tenant
        self.log = EventLog(streams.settings.max_stream_bytes)
        self.counted_bytes = 0
        self._streams = streams
        #: Makes the body of an error as the route of the call has it.
        self._error_body = exchange.error_body
        self._numberer = EventNumberer()
        self._send, self._client = exchange.redirect(self.take, self)
        #: Writes to the first client, once the answer has begun; no more than a task for it.
        self._writing: asyncio.Task[None] | None = None
        #: The answer is no stream of events, and passes as it is.
        self._is_plain = False
        self._readers = 0
        self._timer: asyncio.TimerHandle | None = None
        self._is_evicted = False
        self._is_abandoned = False
        self._on_abandoned: Callable[[], None] | None = None
        if self._client is not None:
            self._client.notify_disconnect(self._client_left)

    # -- towards the call -------------------------------------------------------------------

    def notify_disconnect(self, callback: Callable[[], None] | None) -> None:
        """See `DisconnectNotifier`."""
        self._on_abandoned = callback
        if self._is_abandoned and callback is not None:
            asyncio.get_running_loop().call_soon(self._notify_abandoned)

    def _notify_abandoned(self) -> None:
        if self._on_abandoned is not None:
            self._on_abandoned()

    async def take(self, message: Message) -> None:
        """Take what the call's exchange sends. Waits while too much is unread and, with the last
        bytes, until the first client has read all or left."""
        if message["type"] == "http.response.start":
            await self._begin(message)
        elif self._is_plain:
            await self._send(message)
        else:
            await self._take_events(message["body"], is_last=not message["more_body"])

    async def _begin(self, start: Message) -> None:
        headers: Headers = start["headers"]
        kind = next((text for name, text in headers if name == b"content-type"), b"")
        self._is_plain = start["status"] != 200 or not kind.startswith(b"text/event-stream")
        if self._is_plain or self._is_abandoned:
            await self._send(start)
            return
        headers = [item for item in headers if item[0] != b"content-length"]
        headers.append((STREAM_HEADER, self.id.encode()))
        self._streams.keep(self)
        self._enter()
        # NOTE: the task begins behind the call's first events, and sends them with the head.
        begun = self._serve_first({**start, "headers": headers})
        self._writing = asyncio.create_task(begun, name=self.id)
        self._writing.add_done_callback(self._first_served)

    async def _take_events(self, data: bytes, *, is_last: bool) -> None:
        log = self.log
        if not log.is_closed:
            for event in self._numberer.feed(data):
                log.append(event)
            if is_last:
                if rest := self._numberer.rest():
                    log.append(rest)
                log.close()
            self._streams.grown(self)
        if not is_last:
            await log.wait_for_room()
        elif self._writing is not None:
            await asyncio.wait([self._writing])

    def call_ended(self) -> None:
        """The call is over, whether it has sent the end of its answer or not."""
        if self._client is not None:
            self._client.notify_disconnect(None)
        # Streams outlive their connections, some by far.
        self._client, self._send = None, _nowhere
        if not self.log.is_closed:
            self.cancel(GatewayError("The call ended without an answer."))

    # -- towards readers --------------------------------------------------------------------

    @contextmanager
    def reading(self) -> Iterator[None]:
        """While somebody reads.

        Raises:
            OverloadedError: too many do.
        """
        if self._readers >= MAX_READERS:
            raise OverloadedError(
                f"{MAX_READERS} clients read this stream already.", code="too_many_readers"
            )
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def _enter(self) -> None:
        self._readers += 1
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _leave(self) -> None:
        self._readers -= 1
        if self._readers or self._is_abandoned:
            return
        if self._is_evicted:
            self.cancel()
            return
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._streams.settings.resume_s, self.cancel)

    def failure(self, error: GatewayError) -> bytes:
        """The event that ends the stream of one reader, or of all."""
        return b"event: error\ndata: %b\n\n" % self._error_body(error)

    def cancel(self, error: GatewayError | None = None) -> None:
        """Cancel the call, if it still runs, and forget the stream.

        Args:
            error: ends the streams of those who read it.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._is_abandoned = True
        if not self.log.is_closed:
            gone = error or CallCancelledError("The call was cancelled: nobody read its stream.")
            self.log.append(self.failure(gone))
            self.log.close()
            self._notify_abandoned()
        self._streams.forget(self)

    def evict(self) -> None:
        """Make room for others: the call goes on for those who read it now."""
        self._is_evicted = True
        self.log.limit(_EVICTED_BYTES)
        self._streams.count(self)
        if not self._readers:
            self.cancel()

    @property
    def is_read(self) -> bool:
        """Return whether anybody reads it."""
        return self._readers > 0

    async def _serve_first(self, start: Message) -> None:
        """Write to the connection on which the call was asked."""
        connection = Connection(self._send)
        try:
            await self._send(start)
            await follow(connection, self.log, 0, self._streams.keep_alive_s)
        except GatewayError as error:
            await connection.end_stream(self.failure(error))

    def _first_served(self, writing: asyncio.Task[None]) -> None:
        self._leave()
        if not writing.cancelled() and (error := writing.exception()) is not None:
            logger.error("%s: could not be written", self.id, exc_info=error)

    def _client_left(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
        else:
            # The client cannot know the name of the stream.
            self.cancel()


class StreamStatistics(NamedTuple):
    kept: int
    #: Of those, whose calls still run though nobody reads them.
    unread: int
    size_bytes: int


class Streams:
    """The streams that are kept.

    Args:
        settings: how many, how much of them, and how long.
        keep_alive_s: silence after which readers get a comment.
    """

    def __init__(self, settings: StreamSettings, keep_alive_s: float) -> None:
        self.settings = settings
        self.keep_alive_s = keep_alive_s
        #: By id, oldest first.
        self._kept: dict[str, Stream] = {}
        #: Also of those that had to make room, while somebody reads them.
        self._size_bytes = 0

    def adopt(self, exchange: Exchange, request: CallRequest) -> None:
        """Keep the answer of a call, if its request asks for it and the answer is a stream.

        Args:
            exchange: its body has been read, and nothing was sent.
            request: that body.

        Raises:
            InvalidRequestError: it asks for no stream.
        """
        if RESUME_HEADER not in exchange.headers and b'"resume"' not in request.body:
            return
        if not read_fields(exchange.scope["headers"], request.known_fields).resume:
            return
        if not request.head.stream:
            raise invalid_value("resume", "only streams can be resumed: add 'stream': true.")
        stream = Stream(exchange, self)
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(lambda _: stream.call_ended())

    def find(self, tenant: str, stream_id: str) -> Stream:
        """The tenant's stream of that id.

        Raises:
            StreamNotFoundError: there is none.
        """
        found = self._kept.get(stream_id)
        if found is None or found.tenant != tenant:
            raise StreamNotFoundError(stream_id)
        return found

    def keep(self, stream: Stream) -> None:
        while len(self._kept) >= self.settings.max_kept:
            self._evict()
        self._kept[stream.id] = stream

    def grown(self, stream: Stream) -> None:
        """A stream has got more events: others make room, or it does itself."""
        self.count(stream)
        while self._kept and self._size_bytes > self.settings.max_bytes:
            self._evict()

    def count(self, stream: Stream) -> None:
        """Count what is kept of a stream anew."""
        self._size_bytes += stream.log.size_bytes - stream.counted_bytes
        stream.counted_bytes = stream.log.size_bytes

    def forget(self, stream: Stream) -> None:
        self._kept.pop(stream.id, None)
        self._size_bytes -= stream.counted_bytes
        stream.counted_bytes = 0

    def _evict(self) -> None:
        """Drop a stream of the tenant that has most."""
        counts = Counter(stream.tenant for stream in self._kept.values())
        ((tenant, _),) = counts.most_common(1)
        streams = [stream for stream in self._kept.values() if stream.tenant == tenant]
        ended = (stream for stream in streams if stream.log.is_closed)
        unread = (stream for stream in streams if not stream.is_read)
        evicted = next(ended, next(unread, streams[0]))
        del self._kept[evicted.id]
        evicted.evict()

    def statistics(self) -> StreamStatistics:
        unread = sum(not (each.log.is_closed or each.is_read) for each in self._kept.values())
        return StreamStatistics(len(self._kept), unread, self._size_bytes)

    def close(self) -> None:
        """Forget all; calls that still run are cancelled."""
        for stream in list(self._kept.values()):
            stream.cancel()
