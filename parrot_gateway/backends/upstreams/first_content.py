"""Finds the first content of an event stream: until then another server or backend can answer.

Pure. Roles, comments and events that only announce what comes are no content.
"""

from __future__ import annotations

import re
from typing import Any, Literal, TypeAlias

import msgspec

from parrot_gateway.backends.upstreams.reported_error import reported_error
from parrot_gateway.exceptions import AnswerError

State: TypeAlias = Literal["waiting", "content", "failed"]

#: A stream that begins with more than this is passed on.
MAX_HELD_BYTES = 64 * 1024
#: Whether the answer to a request of a path is looked into.
_ROUTES = re.compile(r"/v1/(?:chat/completions|completions|responses|messages)")
#: Events of responses and of messages that announce something.
_ANNOUNCING = frozenset(
    {
        "response.created", "response.queued", "response.in_progress",
        "response.output_item.added", "response.content_part.added",
        "message_start", "content_block_start", "ping",
    }
)  # fmt: skip


class _Choice(msgspec.Struct):
    delta: dict[str, Any] | None = None
    text: Any = None
    finish_reason: Any = None


class _Event(msgspec.Struct):
    type: Any = None
    choices: list[_Choice] | None = None


_decoder = msgspec.json.Decoder(_Event)


def is_looked_into(path: str | bytes) -> bool:
    """Return whether streams of a route are understood here."""
    return _ROUTES.fullmatch(path if isinstance(path, str) else path.decode("latin-1")) is not None


class FirstContent:
    """Follows the beginning of one stream."""

    __slots__ = ("_rest", "comments", "error", "state")

    def __init__(self) -> None:
        self.state: State = "waiting"
        #: Of a stream that has failed.
        self.error: AnswerError | None = None
        #: Comments so far, by which a server shows that it is at work.
        self.comments = 0
        self._rest = b""

    def feed(self, data: bytes) -> State:
        """Take bytes; returns the state with them."""
        *lines, self._rest = (self._rest + data).replace(b"\r", b"\n").split(b"\n")
        for line in lines:
            if self.state != "waiting":
                break
            if line.startswith(b"data:"):
                self._event(line[5:].strip())
            elif line.startswith(b":"):
                self.comments += 1
        if len(self._rest) > MAX_HELD_BYTES:
            self.state = "content"
        return self.state

    def _event(self, data: bytes) -> None:
        if not data:
            return
        if data == b"[DONE]":
            self._fail(AnswerError("the stream ended before it had any content"))
            return
        if (error := reported_error(data)) is not None:
            self._fail(error)
            return
        try:
            event = _decoder.decode(data)
        except msgspec.ValidationError:
            # Of another shape; what it means is for the client to say.
            self.state = "content"
            return
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self._fail(AnswerError("the stream holds an event that is no JSON"))
            return
        if event.choices is None:
            is_content = event.type is not None and event.type not in _ANNOUNCING
        else:
            is_content = any(_has_content(choice) for choice in event.choices)
        if is_content:
            self.state = "content"

    def _fail(self, error: AnswerError) -> None:
        self.state, self.error = "failed", error


def _has_content(choice: _Choice) -> bool:
    if choice.text or choice.finish_reason is not None:
        return True
    return any(value for name, value in (choice.delta or {}).items() if name != "role")
