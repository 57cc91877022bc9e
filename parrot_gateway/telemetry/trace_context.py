"""Chooses the trace of a call and samples it: W3C Trace Context, without an exporter.

A client's trace is continued, and its choice to sample it holds. Other calls of a declared session
share a trace whose id is made of the session's, so that processes need not agree on anything.
https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

import hashlib
import random
import re
from dataclasses import dataclass
from typing import TypeAlias

Headers: TypeAlias = list[tuple[bytes, bytes]]

TRACEPARENT = b"traceparent"
_FORMAT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1
#: Sampling looks at these bits, as OpenTelemetry's `TraceIdRatioBased` does.
_SAMPLING_BITS = 64


def session_trace_id(tenant: str, session: str) -> int:
    """The id of the trace that all calls of a session share."""
    digest = hashlib.sha256(f"{tenant}\0{session}".encode()).digest()
    return int.from_bytes(digest[:16]) or 1


def session_span_id(trace_id: int, part: int = 0) -> int:
    """The id of the span of a whole session: the parent of its calls' spans.

    Args:
        part: how often the session has paused for so long that its span was written.
    """
    text = trace_id.to_bytes(16) + (b"%d" % part if part else b"")
    return int.from_bytes(hashlib.sha256(text).digest()[:8]) or 1


def is_sampled(trace_id: int, ratio: float) -> bool:
    """True if a trace is among the share `ratio` that is exported."""
    return trace_id % (1 << _SAMPLING_BITS) < ratio * (1 << _SAMPLING_BITS)


@dataclass(slots=True)
class CallTrace:
    """The place of one call in a trace.

    Attributes:
        trace_id, span_id: of the call's span; 0 where nobody is told of it.
        parent_id: id of the client's span; 0 without one.
        sampled: whether the span is exported.
        sent_on: an upstream has been told these ids.
        has_span: the span is made; its ids are final.
    """

    trace_id: int
    span_id: int
    parent_id: int = 0
    sampled: bool = True
    sent_on: bool = False
    has_span: bool = False

    @classmethod
    def of_client(cls, traceparent: bytes) -> CallTrace | None:
        """The trace that a client sent in this header; None if the header is malformed."""
        found = _FORMAT.fullmatch(traceparent.strip())
        if found is None or found[1] == b"ff" or (found[1] == b"00" and found[5]):
            return None
        trace_id, parent_id = int(found[2], 16), int(found[3], 16)
        if not (trace_id and parent_id):
            return None
        return cls(trace_id, _new_span_id(), parent_id, bool(int(found[4], 16) & _SAMPLED))

    @classmethod
    def choose(cls, tenant: str, session: str | None, ratio: float) -> CallTrace:
        """Choose the session's trace, or one for the call alone, of which a share is exported."""
        trace_id = session_trace_id(tenant, session) if session else random.getrandbits(128) or 1
        return cls(trace_id, _new_span_id()) if is_sampled(trace_id, ratio) else _UNSAMPLED

    def move(self, trace_id: int) -> None:
        """Join a trace that is known only now; not once an upstream has been told another."""
        if not (self.parent_id or self.sent_on):
            self.trace_id = trace_id

    def headers(self, headers: Headers) -> Headers:
        """Headers of a request, with this call's span as the parent of what the upstream does.

        Of a trace that its client does not export its own go on unchanged. Of one that is not
        exported here they say so, so that an upstream does not begin one in the middle.
        """
        if self.sampled:
            self.sent_on = True
            own = b"00-%032x-%016x-01" % (self.trace_id, self.span_id)
        elif self.parent_id:
            return headers
        else:
            own = b"00-%032x-%016x-00" % (random.getrandbits(128) or 1, _new_span_id())
        return [(name, value) for name, value in headers if name != TRACEPARENT] + [
            (TRACEPARENT, own)
        ]


_UNSAMPLED = CallTrace(0, 0, sampled=False)


def _new_span_id() -> int:
    return random.getrandbits(64) or 1
