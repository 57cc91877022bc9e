"""Chooses and samples a call's trace: W3C Trace Context, without an exporter.

A client's trace is continued, and the client's sampling decision holds. Other calls of a declared
session share a trace whose id derives from the session's, so that processes need not coordinate.
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
#: Sampling uses these bits, like OpenTelemetry's `TraceIdRatioBased`.
_SAMPLING_BITS = 64


def session_trace_id(tenant: str, session: str) -> int:
    """Return the id of the trace that all calls of a session share."""
    digest = hashlib.sha256(f"{tenant}\0{session}".encode()).digest()
    return int.from_bytes(digest[:16]) or 1


def session_span_id(trace_id: int, part: int = 0) -> int:
    """Return the id of a whole session's span, the parent of its calls' spans.

    Args:
        part: number of earlier spans written for the session after long pauses.
    """
    text = trace_id.to_bytes(16) + (b"%d" % part if part else b"")
    return int.from_bytes(hashlib.sha256(text).digest()[:8]) or 1


def is_sampled(trace_id: int, ratio: float) -> bool:
    """Return true if a trace is in the exported share `ratio`."""
    return trace_id % (1 << _SAMPLING_BITS) < ratio * (1 << _SAMPLING_BITS)


@dataclass(slots=True)
class CallTrace:
    """The place of one call in a trace.

    Attributes:
        trace_id, span_id: ids of the call's span; 0 if nobody is told of it.
        parent_id: id of the client's span; 0 if there is none.
        sampled: true if the span is exported.
        sent_on: true once an upstream has been told these ids.
        has_span: true once the span is made and its ids are final.
    """

    trace_id: int
    span_id: int
    parent_id: int = 0
    sampled: bool = True
    sent_on: bool = False
    has_span: bool = False

    @classmethod
    def of_client(cls, traceparent: bytes) -> CallTrace | None:
        """Parse the trace that a client sent in this header; None if the header is malformed."""
        found = _FORMAT.fullmatch(traceparent.strip())
        if found is None or found[1] == b"ff" or (found[1] == b"00" and found[5]):
            return None
        trace_id, parent_id = int(found[2], 16), int(found[3], 16)
        if not (trace_id and parent_id):
            return None
        return cls(trace_id, _new_span_id(), parent_id, bool(int(found[4], 16) & _SAMPLED))

    @classmethod
    def choose(cls, tenant: str, session: str | None, ratio: float) -> CallTrace:
        """Choose the session's trace, or one for the call alone; a share of them is sampled."""
        trace_id = session_trace_id(tenant, session) if session else random.getrandbits(128) or 1
        return cls(trace_id, _new_span_id()) if is_sampled(trace_id, ratio) else _UNSAMPLED

    def move(self, trace_id: int) -> None:
        """Join a trace that became known late, unless an upstream has been told another."""
        if not (self.parent_id or self.sent_on):
            self.trace_id = trace_id

    def headers(self, headers: Headers) -> Headers:
        """Return a request's headers, with this call's span as the parent of the upstream's work.

        Headers of a trace that its client does not export pass unchanged. For a trace that is not
        exported here, the headers say so, so that an upstream does not begin one halfway.
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
