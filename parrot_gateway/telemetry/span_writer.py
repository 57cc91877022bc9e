"""Spans whose ids, times and sampling are known beforehand, exported by OpenTelemetry's SDK."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
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


def span_context(trace_id: int, span_id: int) -> SpanContext:
    """Of a span that is exported, here or by somebody else."""
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
        self._processor = BatchSpanProcessor(
            exporter,
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
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await asyncio.to_thread(self._processor.shutdown)
        except TimeoutError:
            logger.warning("some spans were not exported: their receiver does not answer")
