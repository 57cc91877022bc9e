"""Which trace a call belongs to, and whether it is exported: W3C Trace Context, no exporter.

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


def session_span_id(trace_id: int) -> int:
    """The id of the span of a whole session: the parent of its calls' spans."""
    return int.from_bytes(hashlib.sha256(trace_id.to_bytes(16)).digest()[:8]) or 1


def is_sampled(trace_id: int, ratio: float) -> bool:
    """Whether a trace is among the share `ratio` that is exported."""
    return trace_id % (1 << _SAMPLING_BITS) < ratio * (1 << _SAMPLING_BITS)


@dataclass(slots=True)
class CallTrace:
    """The place of one call in a trace.

    Attributes:
        ratio: share of the traces that are exported; a client's choice is kept.
        span_id: of the call's span.
        trace_id: 0 until it is decided.
        parent_id: id of the client's span; 0 without one.
        sampled: whether the span is exported; nothing before the trace is decided.
        sent_on: an upstream has been told these ids.
    """

    ratio: float
    span_id: int
    trace_id: int = 0
    parent_id: int = 0
    sampled: bool = False
    sent_on: bool = False

    @classmethod
    def begin(cls, ratio: float, traceparent: bytes | None = None) -> CallTrace:
        """Of a call whose client sent this header; one that is malformed counts as none."""
        trace = cls(ratio, random.getrandbits(64) or 1)
        found = None if traceparent is None else _FORMAT.fullmatch(traceparent.strip())
        if found is None or found[1] == b"ff" or (found[1] == b"00" and found[5]):
            return trace
        trace_id, parent_id = int(found[2], 16), int(found[3], 16)
        if trace_id and parent_id:
            trace.trace_id, trace.parent_id = trace_id, parent_id
            trace.sampled = bool(int(found[4], 16) & _SAMPLED)
        return trace

    def decide(self, tenant: str, session: str | None) -> None:
        """Choose the trace, unless that has been done: the session's, or one of its own."""
        if self.trace_id:
            return
        if session:
            self.trace_id = session_trace_id(tenant, session)
        else:
            self.trace_id = random.getrandbits(128) or 1
        self.sampled = is_sampled(self.trace_id, self.ratio)

    def move(self, trace_id: int) -> None:
        """Join a trace that is known only now; not once an upstream has been told another."""
        if not (self.parent_id or self.sent_on):
            self.trace_id = trace_id

    def headers(self, headers: Headers) -> Headers:
        """Headers of a request, with this call's span as the parent of what the upstream does.

        Of a trace that is not exported the client's own go on unchanged.
        """
        if not self.sampled:
            return headers
        self.sent_on = True
        own = b"00-%032x-%016x-01" % (self.trace_id, self.span_id)
        return [(name, value) for name, value in headers if name != TRACEPARENT] + [
            (TRACEPARENT, own)
        ]
