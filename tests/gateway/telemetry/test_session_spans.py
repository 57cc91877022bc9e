"""Spans of sessions that pause, without a gateway."""

from __future__ import annotations

import time
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="pip install 'parrot-gateway[tracing]'")

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Span
from serving import until

from parrot_gateway.settings.model import TelemetrySettings
from parrot_gateway.telemetry.call_record import CallRecord
from parrot_gateway.telemetry.span_fields import CallFacts
from parrot_gateway.telemetry.span_writer import SpanWriter
from parrot_gateway.telemetry.tracing import CallTracer


class CountingWriter(SpanWriter):
    """Counts the spans of sessions, which are exported later."""

    sessions = 0

    def begin(self, name: str, *args: Any, **kwargs: Any) -> Span:
        self.sessions += name == "invoke_workflow tale"
        return super().begin(name, *args, **kwargs)


def call(name: str) -> CallRecord:
    now = time.perf_counter()
    return CallRecord(
        name, name, now - 1.0, path="/v1/completions", session="s", started_at=time.time() - 1.0,
        status=200, ended=now,
    )  # fmt: skip


async def test_a_session_that_goes_on_after_a_pause_gets_another_span() -> None:
    async def facts(record: CallRecord) -> CallFacts:
        return CallFacts(record.session, "tale")

    exporter = InMemorySpanExporter()
    writer = CountingWriter("gateway", exporter)
    tracer = CallTracer(TelemetrySettings(traces_session_idle_s=0.01), facts, writer)
    tracer.start()
    for part in range(2):
        tracer.ended(call(f"call_{part}"))
        await until(lambda part=part: writer.sessions > part)
    await tracer.close()
    spans = {span.context.span_id: span for span in exporter.get_finished_spans()}
    assert len(spans) == 4
    calls = [span for span in spans.values() if span.parent is not None]
    assert len({span.parent.span_id for span in calls if span.parent}) == 2
    assert {spans[span.parent.span_id].name for span in calls if span.parent} == {
        "invoke_workflow tale"
    }
    assert len({span.context.trace_id for span in spans.values()}) == 1
