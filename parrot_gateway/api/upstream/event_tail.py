"""An upstream's event stream on its way to the client: whole events, never a silent end.

Pure: bytes in, bytes out. What is passed on is byte for byte what came in. Events are not parsed;
only three things are looked for: where an event ends, whether the answer came to its end, and the
usage in the last bytes.

An event is passed on once its last byte is there (no client can use a part of one), so that when
the upstream breaks off an error event can follow instead of half a JSON text.
"""

from __future__ import annotations

import re
from typing import Literal, TypeAlias

import msgspec

from parrot_gateway.backends.upstreams.reported_error import reported_error
from parrot_gateway.calls.usage import TAIL_BYTES, Usage, usage_of_tail
from parrot_gateway.exceptions import AnswerError, GatewayError

#: How a route's stream ends and reports errors; `other` streams may end at any point.
Dialect: TypeAlias = Literal["chat", "responses", "messages", "other"]

#: An event longer than this is passed on in pieces.
MAX_HELD_BYTES = 1024 * 1024

_BOUNDARIES = (b"\n\n", b"\n\r\n", b"\r\r")
#: The event that ends a chat's stream.
DONE = re.compile(rb"(?:\A|[\r\n])data: ?\[DONE\]")
_DONE_LAST = re.compile(rb"(?:\A|[\r\n])data: ?\[DONE\](?:\n\n|\n\r\n|\r\n\r\n|\r\r)\Z")
#: More than `data: [DONE]` with line breaks around it takes.
_DONE_BYTES = 32
_END_MARKS: dict[Dialect, re.Pattern[bytes]] = {
    # The quotes of JSON inside a text are escaped, so generated text cannot match.
    "chat": re.compile(rb'"finish_reason"\s*:\s*"|"error"\s*:\s*[{"]'),
    "responses": re.compile(
        rb'"type"\s*:\s*"(?:response\.(?:completed|failed|incomplete|cancelled)|error)"'
    ),
    "messages": re.compile(rb'"type"\s*:\s*"(?:message_stop|error)"'),
}
_SEQUENCE_NUMBER = re.compile(rb'"sequence_number"\s*:\s*(\d{1,15})(?!\d)')


def dialect_of(path: str) -> Dialect:
    if path.endswith("/completions"):
        return "chat"
    if path.endswith("/responses"):
        return "responses"
    if path.endswith("/messages"):
        return "messages"
    return "other"


class EventTail:
    """Follows one stream.

    Args:
        dialect: of the route.
    """

    __slots__ = ("_dialect", "_ended", "_held", "_mid_event", "_seen", "done")

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._held = b""
        self._seen = bytearray()
        self._ended = False
        #: The client has got a part of an event (one too long to hold).
        self._mid_event = False
        #: The last event passed on was `[DONE]`: nothing but the end should follow.
        self.done = False

    def feed(self, chunk: bytes) -> bytes:
        """Take bytes from the upstream; returns those to pass on now (maybe none)."""
        self.done = False
        if self._held:
            chunk = self._held + chunk
            self._held = b""
        if chunk.endswith(_BOUNDARIES):
            self._mid_event = False
        else:
            end = _last_boundary(chunk)
            if len(chunk) - end > MAX_HELD_BYTES:
                self._mid_event = True
            else:
                self._held = chunk[end:]
                chunk = chunk[:end]
                if chunk:
                    self._mid_event = False
        if chunk:
            self._remember(chunk)
        return chunk

    @property
    def rest(self) -> bytes:
        """The beginning of an event whose end has not come."""
        return self._held

    def end(self, error: GatewayError) -> bytes:
        """The upstream ended its stream in good order; returns the last bytes for the client.

        `error` is reported when the answer had not come to its end: clients take a plain end for
        a success.
        """
        rest, self._held = self._held, b""
        if rest:
            self._remember(rest)
            self._mid_event = True
        if self.is_complete:
            return rest
        closing = b"\n\n" if self._mid_event else b""
        return rest + closing + self.error_events(error)

    def fail(self, error: GatewayError) -> bytes:
        """The upstream broke off; returns what ends the client's stream.

        A held part of an event is dropped: it would be broken JSON to the client.
        """
        self._held = b""
        if self._ended:
            return b""
        return (b"\n\n" if self._mid_event else b"") + self.error_events(error)

    @property
    def is_mid_event(self) -> bool:
        """Return whether the client has got a part of an event whose end it has not."""
        return self._mid_event

    def usage(self) -> Usage | None:
        """The usage that the stream reported last, if it did."""
        return usage_of_tail(bytes(self._seen))

    def error(self) -> AnswerError | None:
        """The error that the upstream reported in the stream, if it did."""
        return reported_error(bytes(self._seen))

    def _remember(self, chunk: bytes) -> None:
        seen = self._seen
        seen += chunk
        if len(seen) > 2 * TAIL_BYTES:
            if self._dialect == "responses" and not self._ended:
                # The last event repeats the whole answer, its type before it.
                self._ended = bool(_END_MARKS["responses"].search(seen))
            del seen[:-TAIL_BYTES]
        # NOTE: only the last bytes of a chunk, which is all that a stream in good order needs, and
        # a third of the cost of passing a chunk on less. `_is_ended` looks for the others.
        if not self._ended and b"[DONE]" in chunk[-_DONE_BYTES:]:
            self._ended = self.done = bool(_DONE_LAST.search(chunk[-_DONE_BYTES:]))
            self.done = self.done and not self._held

    @property
    def is_complete(self) -> bool:
        """Return whether the answer came to its end."""
        return self._ended or self.has_end(self._seen)

    def has_end(self, text: bytes | bytearray) -> bool:
        """Return whether an answer comes to its end within a part of its stream."""
        mark = _END_MARKS.get(self._dialect)
        return mark is None or bool(mark.search(text)) or bool(DONE.search(text))

    def error_events(self, error: GatewayError) -> bytes:
        """The events that end a stream with an error."""
        if self._dialect == "responses":
            numbers = _SEQUENCE_NUMBER.findall(self._seen)
            body = {"type": "error", "code": error.code, "message": error.message,
                    "param": error.param,
                    "sequence_number": int(numbers[-1]) + 1 if numbers else 0}  # fmt: skip
            return b"event: error\ndata: " + msgspec.json.encode(body) + b"\n\n"
        if self._dialect == "messages":
            flat = {"type": "error", "error": {"type": "api_error", "message": error.message}}
            return b"event: error\ndata: " + msgspec.json.encode(flat) + b"\n\n"
        return b"data: " + error.body() + b"\n\ndata: [DONE]\n\n"


def _last_boundary(chunk: bytes) -> int:
    """Where the last whole event ends; 0 when none does."""
    ends = (chunk.rfind(mark) + len(mark) for mark in _BOUNDARIES if mark in chunk)
    return max(ends, default=0)
