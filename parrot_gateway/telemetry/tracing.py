"""Traces of calls and engine steps for OpenTelemetry, in the names of its GenAI conventions.

Each call gets a span, made from its record at its end. While the call runs, only two things happen:
an upstream is told the trace, and bytes of sampled calls are held if content is wanted. Facts that
only the linker knows (an inferred session, the calls whose answers a prompt contains) are requested
after the call, and only for sampled calls. https://opentelemetry.io/docs/specs/semconv/gen-ai/
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode
from parrot_engine.protocol import BlockChanges, EngineStats

from parrot_gateway.backends.own.remote import RemoteEngine
from parrot_gateway.settings.model import TelemetrySettings
from parrot_gateway.telemetry.call_record import CallRecord
from parrot_gateway.telemetry.content.content import CallContent, ReadContent
from parrot_gateway.telemetry.operations import PROVIDER
from parrot_gateway.telemetry.span_fields import (
    CallFacts,
    Value,
    call_attributes,
    call_events,
    content_attributes,
    span_name,
    step_attributes,
    unix_ns,
)
from parrot_gateway.telemetry.span_writer import SpanWriter, span_context
from parrot_gateway.telemetry.trace_context import (
    CallTrace,
    is_sampled,
    session_span_id,
    session_trace_id,
)

logger = logging.getLogger(__name__)

#: Maximum ended calls that wait for the linker's facts; more are not exported.
MAX_PENDING = 2048
#: Maximum bytes of their content; further spans are exported without content.
MAX_PENDING_BYTES = 64 * 1024 * 1024
#: Maximum calls that later spans can link to, and sessions whose span is not written yet.
MAX_REMEMBERED = 20_000


@dataclass(slots=True)
class _Session:
    """The span of a session, written when no more calls come."""

    name: str
    id: str
    span_id: int
    tenant: str
    is_inferred: bool
    begin_ns: int
    end_ns: int
    calls: int
    #: `time.monotonic()` of its last call.
    used: float


class _Pending(NamedTuple):
    """An ended call without a span."""

    record: CallRecord
    trace: CallTrace
    content: CallContent | None


class CallTracer:
    """Makes spans of ended calls and of their sessions.

    Args:
        settings: share of the traces to export.
        facts_of: returns further facts about a call; called after its end, one call at a time.
        writer: takes the spans.
    """

    def __init__(
        self,
        settings: TelemetrySettings,
        facts_of: Callable[[CallRecord], Awaitable[CallFacts]],
        writer: SpanWriter,
    ) -> None:
        self._settings = settings
        self._facts_of = facts_of
        self._writer = writer
        self._pending: deque[_Pending] = deque()
        self._pending_bytes = 0
        self._has_pending = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None
        self._spans: OrderedDict[tuple[str, str], SpanContext] = OrderedDict()
        #: By trace id, last used at the end.
        self._sessions: OrderedDict[int, _Session] = OrderedDict()
        #: By trace id, the number of spans written for a session, which keeps their ids distinct.
        self._parts: OrderedDict[int, int] = OrderedDict()
        #: Sampled calls that were not exported, and calls exported without their content.
        self._dropped = self._left_out = 0

    def start(self) -> None:
        """Start exporting."""
        self._worker = asyncio.create_task(self._work(), name="tracing")

    async def close(self) -> None:
        """Export ended calls within a few seconds, and stop."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
            self._worker = None
        while self._pending:
            record, trace, content = self._take()
            facts = CallFacts(record.session, record.session)
            read = None
            if content is not None:
                read = content.read_now(self._settings.max_content_characters)
            self._write_call(record, trace, facts, read)
        self._write_sessions(idle_s=0.0)
        if self._dropped:
            logger.warning(
                "%d sampled calls were not exported: too many had ended at once", self._dropped
            )
        if self._left_out:
            logger.warning(
                "%d sampled calls were exported without their content: too much had ended at once",
                self._left_out,
            )
        await self._writer.close()

    def ended(self, record: CallRecord) -> None:
        """Make the span of an ended call soon; a sink of `CallRecords`."""
        trace = record.trace
        if trace is None:
            ratio = self._settings.traces_sample_ratio
            # Metrics name the trace too.
            trace = record.trace = CallTrace.choose(record.tenant, record.session, ratio)
        if not trace.sampled:
            return
        if len(self._pending) >= MAX_PENDING:
            self._dropped += 1
            return
        content = record.content if self._settings.traces_content else None
        if content is not None:
            if self._pending_bytes + content.size_bytes > MAX_PENDING_BYTES:
                self._left_out += 1
                content = None
            else:
                self._pending_bytes += content.size_bytes
        self._pending.append(_Pending(record, trace, content))
        self._has_pending.set()

    def _take(self) -> _Pending:
        pending = self._pending.popleft()
        if pending.content is not None:
            self._pending_bytes -= pending.content.size_bytes
        return pending

    async def _work(self) -> None:
        idle_s = self._settings.traces_session_idle_s
        while True:
            try:
                async with asyncio.timeout(idle_s / 2 if self._sessions else None):
                    await self._has_pending.wait()
            except TimeoutError:
                self._write_sessions(idle_s)
                continue
            record, trace, content = self._take()
            if not self._pending:
                self._has_pending.clear()
            try:
                facts = await self._facts_of(record)
                read = None
                if content is not None:
                    read = await content.read(self._settings.max_content_characters)
                self._write_call(record, trace, facts, read)
                self._write_sessions(idle_s)
            except Exception:
                logger.exception("no span could be made of call %s", record.call_id)

    def _write_call(
        self, record: CallRecord, trace: CallTrace, facts: CallFacts, content: ReadContent | None
    ) -> None:
        """Make the span of a call; its links lead to the calls whose answers it reads."""
        session = facts.session or record.session
        session_trace = session_trace_id(record.tenant, session) if session else 0
        if session:
            trace.move(session_trace)
        trace.has_span = True
        in_session = trace.trace_id == session_trace
        session_id = session_span_id(session_trace, self._parts.get(session_trace, 0))
        parent_id = trace.parent_id or (session_id if in_session else 0)
        links = [
            Link(source, {"parrot.link.kind": each.kind, "parrot.link.confidence": each.confidence})
            for each in facts.sources
            if (source := self._spans.get((record.tenant, each.call))) is not None
        ]
        if session and not in_session and not trace.parent_id:
            root = span_context(session_trace, session_id)
            links.append(Link(root, {"parrot.link.kind": "session"}))
        attributes = call_attributes(record, session, facts)
        if content is not None:
            attributes |= content_attributes(content)
        span = self._writer.begin(
            span_name(record),
            trace.trace_id,
            trace.span_id,
            unix_ns(record, record.started),
            parent_id=parent_id,
            kind=SpanKind.SERVER,
            links=links,
            attributes=attributes,
        )
        for event, at, told in call_events(record, facts):
            span.add_event(event, told, unix_ns(record, at))
        if record.error_code is not None:
            span.set_status(Status(StatusCode.ERROR, record.error_message))
        end_ns = unix_ns(record, record.ended or time.perf_counter())
        span.end(end_ns)
        self._remember(record, span.get_span_context())
        if session and not trace.parent_id:
            self._extend_session(session_trace, session_id, record, facts, end_ns)

    def _remember(self, record: CallRecord, context: SpanContext) -> None:
        self._spans[record.tenant, record.call_id] = context
        if len(self._spans) > MAX_REMEMBERED:
            self._spans.popitem(last=False)

    def _extend_session(
        self, trace_id: int, span_id: int, record: CallRecord, facts: CallFacts, end_ns: int
    ) -> None:
        begin_ns = unix_ns(record, record.started)
        session = self._sessions.get(trace_id)
        if session is None:
            id_ = facts.session or record.session or ""
            session = self._sessions[trace_id] = _Session(
                facts.session_name or id_, id_, span_id, record.tenant, facts.is_inferred, begin_ns,
                end_ns, 0, 0.0,
            )  # fmt: skip
        session.begin_ns, session.end_ns = (
            min(session.begin_ns, begin_ns),
            max(session.end_ns, end_ns),
        )
        session.calls += 1
        session.used = time.monotonic()
        self._sessions.move_to_end(trace_id)

    def _write_sessions(self, idle_s: float) -> None:
        """Make the spans of sessions that have been idle for this long, and of those beyond the
        limit.
        """
        now = time.monotonic()
        while self._sessions:
            trace_id, session = next(iter(self._sessions.items()))
            if now - session.used < idle_s and len(self._sessions) <= MAX_REMEMBERED:
                return
            del self._sessions[trace_id]
            self._parts[trace_id] = self._parts.get(trace_id, 0) + 1
            if len(self._parts) > MAX_REMEMBERED:
                self._parts.popitem(last=False)
            attributes: dict[str, Value] = {
                "gen_ai.operation.name": "invoke_workflow",
                "gen_ai.provider.name": PROVIDER,
                "gen_ai.conversation.id": session.id,
                "parrot.tenant": session.tenant,
                "parrot.session.inferred": session.is_inferred,
                "parrot.session.calls": session.calls,
            }
            self._writer.begin(
                f"invoke_workflow {session.name}",
                trace_id,
                session.span_id,
                session.begin_ns,
                attributes=attributes,
            ).end(session.end_ns)


class _Heartbeat(NamedTuple):
    stats: EngineStats
    at_ns: int


class StepTracer:
    """Makes spans of engines' steps as an `EngineObserver`; idle engines get none.

    Args:
        writer: takes the spans; each is a separate trace.
        ratio: share of the intervals between heartbeats that get a span.
    """

    def __init__(self, writer: SpanWriter, ratio: float) -> None:
        self._writer = writer
        self._ratio = ratio
        self._last: WeakKeyDictionary[RemoteEngine, _Heartbeat] = WeakKeyDictionary()

    def stats_changed(self, engine: RemoteEngine) -> None:
        now = _Heartbeat(engine.stats, time.time_ns())
        last = self._last.get(engine)
        self._last[engine] = now
        trace_id = random.getrandbits(128) or 1
        if (
            last is None
            or now.stats.steps <= last.stats.steps
            or not is_sampled(trace_id, self._ratio)
        ):
            return
        span = self._writer.begin(
            f"steps {engine.name}",
            trace_id,
            random.getrandbits(64) or 1,
            last.at_ns,
            attributes=step_attributes(engine.name, engine.info, last.stats, now.stats),
        )
        span.end(now.at_ns)

    def blocks_changed(self, engine: RemoteEngine, changes: BlockChanges) -> None:
        """Blocks are not traced."""
