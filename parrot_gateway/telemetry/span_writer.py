"""Spans whose ids, times and sampling are known beforehand, exported by OpenTelemetry's SDK."""

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

#: Spans that wait for their receiver, and those of one request to it: OpenTelemetry's defaults.
_MAX_QUEUED, _MAX_AT_ONCE = 2048, 512
#: What either may come to. Receivers refuse long requests: OpenTelemetry's collector more than 20
#: MiB.
_MAX_QUEUED_BYTES, _MAX_REQUEST_BYTES = 128 * 1024 * 1024, 8 * 1024 * 1024
#: How long the end waits for what has not been exported.
_CLOSE_TIMEOUT_S = 5.0


class _GivenIds(IdGenerator):
    """Gives spans the ids that were chosen for them."""

    def __init__(self) -> None:
        self.trace_id = 0
        self.span_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id

    def generate_span_id(self) -> int:
        return self.span_id


class _QuietExporter(SpanExporter):
    """Logs once that a receiver takes no spans, and once that it does again.

    Exporters log each try, of which there are several for every batch. Used in the thread of the
    processor; `lost` is read by others.

    Attributes:
        lost: spans that were not taken.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._reason = ""
        self._fails = False
        self.lost = 0
        self._log = logging.getLogger(type(exporter).__module__)
        self._log.addFilter(self._note)

    def _note(self, record: logging.LogRecord) -> bool:
        # The first says why, later ones that it was given up.
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
        """Export no more; a try that waits for the next one ends."""
        self._exporter.shutdown()
        self._log.removeFilter(self._note)


def span_context(trace_id: int, span_id: int) -> SpanContext:
    """The context of a span that this process or another one exports."""
    return SpanContext(
        trace_id, span_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED)
    )


class SpanWriter:
    """Begins spans, which are exported in a thread of its own once they have ended.

    Args:
        service_name: of the resource that all of them belong to.
        exporter: takes the spans.
        span_bytes: what a span comes to at most, about.
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
        # NOTE: sampling is decided before there is a span; the SDK exports all that it gets.
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
        """A span that the caller ends.

        Args:
            begin_ns: Unix time in nanoseconds.
            parent_id: id of its parent in the same trace; 0 without one.
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
        """Export what has ended, within a few seconds, and stop."""
        loop, closed = asyncio.get_running_loop(), asyncio.Event()

        def shut_down() -> None:
            self._processor.shutdown()  # type: ignore[no-untyped-call]
            with suppress(RuntimeError):
                # The loop may be gone, where this took too long.
                loop.call_soon_threadsafe(closed.set)

        # NOTE: not a thread of the loop's, whose end waits for all of those.
        threading.Thread(target=shut_down, name="last-spans", daemon=True).start()
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await closed.wait()
        except TimeoutError:
            self._exporter.shutdown()
            logger.warning("the last spans were not exported: their receiver does not answer")
        if self._exporter.lost:
            logger.warning("%d spans were not exported", self._exporter.lost)
