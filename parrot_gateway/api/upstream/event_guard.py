"""Reads each event of an upstream's stream before it passes, so that another server can go on.

Pure. An event that reports an error or cannot be read is held back, with all behind it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

from parrot_gateway.api.upstream.event_tail import DONE, EventTail
from parrot_gateway.backends.upstreams.answer import UpstreamAnswerReader
from parrot_gateway.backends.upstreams.continuation import PartialAnswer
from parrot_gateway.calls.observer import GenerationObserver, Observers
from parrot_gateway.exceptions import AnswerError

_EVENT = re.compile(rb".+?(?:\n\n|\n\r\n|\r\r)", re.DOTALL)


class RestWriter(GenerationObserver):
    """Writes the answer of a server that goes on as events of the stream that broke off."""

    def take(self) -> bytes:
        """The events since this was called last."""
        raise NotImplementedError


#: Makes the writer for the first event with a choice, if there was one; the call's id; and the
#: names of the servers that have answered so far, to which it adds.
RestWriters: TypeAlias = Callable[[bytes | None, str, list[str]], RestWriter]


class EventGuard:
    """Follows one stream of a chat or a completion.

    Args:
        events: of the stream.
        partial: gets what passes, and so do the observers.
        observers: of the answer.
    """

    def __init__(
        self, events: EventTail, partial: PartialAnswer, observers: GenerationObserver
    ) -> None:
        self.events = events
        self.reader = UpstreamAnswerReader(Observers([partial, observers]))
        self.reader.start(200, b"text/event-stream")
        #: The first event with a choice, in whose envelope the rest is written.
        self.sample: bytes | None = None
        #: What is wrong with the stream, and the bytes from there on.
        self.fault: AnswerError | None = None
        self.held = b""
        #: `[DONE]` has passed.
        self.is_done = False
        self._partial = partial

    def feed(self, chunk: bytes) -> bytes:
        """Take bytes; returns whole events to pass on, those before a `fault`."""
        ready, passed = self.events.feed(chunk), 0
        for event in _EVENT.finditer(ready):
            count = self._partial.num_deltas
            try:
                self.reader.feed(event[0])
            except AnswerError as fault:
                self.fault, self.held = fault, ready[passed:]
                return ready[:passed]
            passed = event.end()
            if self.sample is None and self._partial.num_deltas > count:
                self.sample = event[0]
            self.is_done = self.is_done or DONE.search(event[0]) is not None
        return ready

    def ends_well(self) -> bool:
        """Return whether a stream that is over has come to its end; its last event may lack a
        blank line."""
        rest = self.events.rest
        if rest and self.events.has_end(rest):
            with suppress(AnswerError):
                self.reader.feed(rest + b"\n")
                return True
        return self.events.is_complete
