"""Exports spans with predetermined ids, times and sampling through OpenTelemetry's SDK."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    TraceFlags,
    set_span_in_context,
)

from parrot_gateway import __version__
from parrot_gateway.telemetry.span_fields import Value

logger = logging.getLogger(__name__)

#: Maximum spans that wait for the receiver, and spans of one request: OpenTelemetry's defaults.
_MAX_QUEUED, _MAX_AT_ONCE = 2048, 512
#: Limits of both in bytes. Receivers refuse long requests: OpenTelemetry's collector those over 20
#: MiB.
_MAX_QUEUED_BYTES, _MAX_REQUEST_BYTES = 128 * 1024 * 1024, 8 * 1024 * 1024
#: Longest wait for unexported spans at the end.
_CLOSE_TIMEOUT_S = 5.0


class _GivenIds(IdGenerator):
    """Gives spans their predetermined ids."""

    def __init__(self) -> None:
        self.trace_id = 0
        self.span_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id

    def generate_span_id(self) -> int:
        return self.span_id


class _QuietExporter(SpanExporter):
    """Logs once when a receiver takes no spans, and once when it does again.

    Exporters log each of several tries per batch. Used in the processor's thread; other threads
    read `lost`.

    Attributes:
        lost: number of spans that were not taken.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._reason = ""
        self._fails = False
        self.lost = 0
        self._log = logging.getLogger(type(exporter).__module__)
        self._log.addFilter(self._note)

    def _note(self, record: logging.LogRecord) -> bool:
        # The first message has the reason; later ones say that the exporter gave up.
        self._reason = self._reason or record.getMessage()
        return False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export spans, or count them as lost."""
        self._reason = ""
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            self.lost += len(spans)
            if not self._fails:
                logger.warning("spans are not exported: %s", self._reason or "no reason is given")
        elif self._fails:
            logger.info("spans are exported again; %d were lost", self.lost)
        self._fails = result is not SpanExportResult.SUCCESS
        return result

    def shutdown(self) -> None:
        """Stop exporting, and end a pause before the next try."""
        self._exporter.shutdown()
        self._log.removeFilter(self._note)


def span_context(trace_id: int, span_id: int) -> SpanContext:
    """Return the context of a span that this or another process exports."""
    return SpanContext(
        trace_id, span_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED)
    )


class SpanWriter:
    """Begins spans; ended ones are exported in a separate thread.

    Args:
        service_name: name of the resource that all spans belong to.
        exporter: takes the spans.
        span_bytes: approximate maximum size of a span.
    """

    def __init__(self, service_name: str, exporter: SpanExporter, span_bytes: int = 1024) -> None:
        self._ids = _GivenIds()
        queued = min(_MAX_QUEUED, max(16, _MAX_QUEUED_BYTES // span_bytes))
        at_once = min(_MAX_AT_ONCE, max(1, _MAX_REQUEST_BYTES // span_bytes), queued)
        self._exporter = _QuietExporter(exporter)
        self._processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=queued,
            max_export_batch_size=at_once,
            export_timeout_millis=10_000,
        )
        resource = Resource.create({"service.name": service_name, "service.version": __version__})
        # NOTE: sampling is decided before there is a span; the SDK exports every span it gets.
        provider = TracerProvider(
            sampler=ALWAYS_ON, resource=resource, id_generator=self._ids, shutdown_on_exit=False
        )
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("parrot_gateway", __version__)

    def begin(
        self,
        name: str,
        trace_id: int,
        span_id: int,
        begin_ns: int,
        *,
        parent_id: int = 0,
        kind: SpanKind = SpanKind.INTERNAL,
        links: Sequence[Link] = (),
        attributes: Mapping[str, Value] | None = None,
    ) -> Span:
        """Begin a span; the caller ends it.

        Args:
            begin_ns: Unix time in nanoseconds.
            parent_id: id of its parent in the same trace; 0 if it has none.
        """
        self._ids.trace_id, self._ids.span_id = trace_id, span_id
        context = Context()
        if parent_id:
            parent = NonRecordingSpan(span_context(trace_id, parent_id))
            context = set_span_in_context(parent, context)
        return self._tracer.start_span(
            name, context, kind=kind, attributes=attributes, links=links, start_time=begin_ns
        )

    async def close(self) -> None:
        """Export ended spans within a few seconds, and stop."""
        loop, closed = asyncio.get_running_loop(), asyncio.Event()

        def shut_down() -> None:
            self._processor.shutdown()  # type: ignore[no-untyped-call]
            with suppress(RuntimeError):
                # The loop may be gone if this took too long.
                loop.call_soon_threadsafe(closed.set)

        # NOTE: not a thread of the loop's executor, because closing that waits for all its threads.
        threading.Thread(target=shut_down, name="last-spans", daemon=True).start()
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await closed.wait()
        except TimeoutError:
            self._exporter.shutdown()
            logger.warning("the last spans were not exported: their receiver does not answer")
        if self._exporter.lost:
            logger.warning("%d spans were not exported", self._exporter.lost)
