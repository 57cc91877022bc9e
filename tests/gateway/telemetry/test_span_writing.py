"""How spans are written, without a gateway: sessions that pause, receivers that fail."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from harness.waiting import until

pytest.importorskip("opentelemetry.sdk", reason="pip install 'parrot-gateway[tracing]'")

from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.serving import serving
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Span, SpanKind, StatusCode
from parrot_engine.protocol import EngineStats

from parrot_gateway.settings.model import TelemetrySettings
from parrot_gateway.telemetry import span_writer, tracing
from parrot_gateway.telemetry.call_record import CallRecord
from parrot_gateway.telemetry.content.content import CallContent
from parrot_gateway.telemetry.span_fields import CallFacts, Source
from parrot_gateway.telemetry.span_writer import SpanWriter
from parrot_gateway.telemetry.trace_context import CallTrace, session_span_id, session_trace_id
from parrot_gateway.telemetry.tracing import CallTracer, StepTracer


class CountingWriter(SpanWriter):
    """Counts spans, which are exported later."""

    sessions = calls = 0

    def begin(self, name: str, *args: Any, **kwargs: Any) -> Span:
        self.sessions += name == "invoke_workflow tale"
        self.calls += name == "text_completion"
        return super().begin(name, *args, **kwargs)


def call(name: str) -> CallRecord:
    now = time.perf_counter()
    return CallRecord(
        name, name, now - 1.0, path="/v1/completions", session="s", started_at=time.time() - 1.0,
        status=200, ended=now,
    )  # fmt: skip


async def test_a_session_that_goes_on_after_a_pause_gets_another_span() -> None:
    exporter = InMemorySpanExporter()
    writer = CountingWriter("gateway", exporter)
    tracer = CallTracer(TelemetrySettings(traces_session_idle_s=0.01), facts_of, writer)
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


async def facts_of(record: CallRecord) -> CallFacts:
    return CallFacts(record.session, "tale")


async def test_sessions_beyond_the_bound_get_their_span_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracing, "MAX_REMEMBERED", 2)
    writer = CountingWriter("gateway", InMemorySpanExporter())
    tracer = CallTracer(TelemetrySettings(traces_session_idle_s=3600), facts_of, writer)
    tracer.start()
    for number in range(4):
        ended = call(f"call_{number}")
        ended.session = f"session_{number}"
        tracer.ended(ended)
    await until(lambda: writer.sessions == 2)
    await tracer.close()
    assert writer.sessions == 4


async def test_a_session_lasts_from_its_first_begin_to_its_last_end() -> None:
    exporter = InMemorySpanExporter()
    tracer = CallTracer(TelemetrySettings(), facts_of, SpanWriter("gateway", exporter))
    long, short = call("long"), call("short")
    assert long.ended is not None
    short.started += 0.25
    short.started_at = long.started_at + short.started - long.started
    short.ended = long.ended - 0.25
    # The one that ended last is written first.
    for each in (long, short):
        tracer.ended(each)
    await tracer.close()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    session = spans["invoke_workflow s"]
    assert session.start_time is not None
    assert session.end_time is not None
    assert abs(session.start_time / 1e9 - long.started_at) < 1e-6
    length_s = (session.end_time - session.start_time) / 1e9
    assert abs(length_s - (long.ended - long.started)) < 1e-6


SESSION = session_trace_id("default", "told")


@pytest.mark.parametrize(
    ("declared", "told", "trace", "placed", "kinds"),
    [
        # Of a declared session, of one that is known only now, and of none.
        ("told", None, CallTrace(SESSION, 7), (SESSION, session_span_id(SESSION)), []),
        (None, "told", CallTrace(5, 7), (SESSION, session_span_id(SESSION)), []),
        (None, None, CallTrace(5, 7), (5, None), []),
        # An upstream was told another trace.
        (None, "told", CallTrace(5, 7, sent_on=True), (5, None), ["session"]),
        # The client's trace stays.
        ("told", "told", CallTrace(5, 7, parent_id=9), (5, 9), []),
    ],
)
async def test_where_the_span_of_a_call_stands(
    declared: str | None, told: str | None, trace: CallTrace,
    placed: tuple[int, int | None], kinds: list[str],
) -> None:  # fmt: skip
    async def facts(record: CallRecord) -> CallFacts:
        if record.call_id == "broken":
            raise ValueError("the linking process is gone")
        return CallFacts(told, told and f"The tale of {told}", is_inferred=declared is None)

    exporter = InMemorySpanExporter()
    writer = CountingWriter("gateway", exporter)
    tracer = CallTracer(TelemetrySettings(), facts, writer)
    tracer.start()
    tracer.ended(call("broken"))
    record = call("call_1")
    record.session, record.trace, record.first_token = declared, replace(trace), record.ended
    record.note_failure("broke", "It broke.")
    unsampled = call("unsampled")
    unsampled.trace = CallTrace(5, 8, sampled=False)
    tracer.ended(unsampled)
    tracer.ended(record)
    await until(lambda: writer.calls == 1)
    await tracer.close()
    span, *sessions = exporter.get_finished_spans()
    assert (span.name, span.kind, span.context.span_id) == ("text_completion", SpanKind.SERVER, 7)
    assert (span.context.trace_id, span.parent and span.parent.span_id) == placed
    assert [(link.attributes or {})["parrot.link.kind"] for link in span.links] == kinds
    assert all(link.context.trace_id == SESSION for link in span.links)
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "It broke.")
    assert [event.name for event in span.events] == ["parrot.first_token"]
    assert span.events[0].timestamp == span.end_time
    assert span.resource.attributes["service.name"] == "gateway"
    assert record.trace is not None
    assert record.trace.has_span
    # A session has a span where calls stand below it, or name it.
    assert [(each.name, each.context.trace_id) for each in sessions] == [
        (f"invoke_workflow {f'The tale of {told}' if told else declared}", SESSION)
    ] * bool((declared or told) and not trace.parent_id)
    for each in sessions:
        assert each.parent is None
        assert dict(each.attributes or {}) == {
            "gen_ai.operation.name": "invoke_workflow",
            "gen_ai.provider.name": "parrot_gateway",
            "gen_ai.conversation.id": "told",
            "parrot.tenant": "default",
            "parrot.session.inferred": declared is None,
            "parrot.session.calls": 1,
        }


def test_a_trace_is_chosen_at_the_end_where_none_was_before() -> None:
    for ratio, session in ((1.0, "told"), (1.0, None), (0.0, "told")):
        exporter = InMemorySpanExporter()
        settings = TelemetrySettings(traces_sample_ratio=ratio)
        tracer = CallTracer(settings, facts_of, SpanWriter("gateway", exporter))
        record = call("call_1")
        record.session = session
        tracer.ended(record)
        assert record.trace is not None
        assert record.trace.sampled == (ratio == 1.0)
        assert (record.trace.trace_id == SESSION) == (record.trace.sampled and session == "told")
        asyncio.run(tracer.close())
        names = {span.name for span in exporter.get_finished_spans()}
        assert names == set() if not ratio else names >= {"text_completion"}


async def test_an_idle_session_is_written_while_another_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The one that was used last is written last, however early it began."""
    now = 100.0
    monkeypatch.setattr(tracing, "time", SimpleNamespace(monotonic=lambda: now))
    exporter = InMemorySpanExporter()
    writer = CountingWriter("gateway", exporter)
    tracer = CallTracer(TelemetrySettings(traces_session_idle_s=5.0), facts_of, writer)
    tracer.start()

    async def end(number: int, session: str) -> None:
        record = call(f"call_{number}")
        record.session = session
        tracer.ended(record)
        await until(lambda: writer.calls == number)

    await end(1, "first")
    now = 103.0
    await end(2, "second")
    now = 104.0
    await end(3, "first")
    assert writer.sessions == 0
    now = 108.5
    await end(4, "third")
    await until(lambda: writer.sessions == 1)
    await tracer.close()
    named = [
        (told["gen_ai.conversation.id"], told["parrot.session.calls"])
        for span in exporter.get_finished_spans()
        if "parrot.session.calls" in (told := dict(span.attributes or {}))
    ]
    assert named == [("second", 1), ("first", 2), ("third", 1)]


async def test_engines_that_compute_get_spans_of_their_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moment = 0

    def time_ns() -> int:
        nonlocal moment
        moment += 10
        return moment

    monkeypatch.setattr(tracing, "time", SimpleNamespace(time_ns=time_ns))
    async with serving(ScriptedRemoteEngine()) as service:
        for ratio, counts in ((1.0, [2, 5]), (0.0, [])):
            exporter, moment = InMemorySpanExporter(), 0
            writer = SpanWriter("gateway", exporter)
            tracer = StepTracer(writer, ratio)
            for steps in (3, 5, 5, 10):
                service.remote.note_stats(EngineStats(steps=steps))
                tracer.stats_changed(service.remote)
            await writer.close()
            spans = exporter.get_finished_spans()
            assert [dict(span.attributes or {})["parrot.steps.count"] for span in spans] == counts
            times = [(span.start_time, span.end_time) for span in spans]
            assert times == [(10, 20), (30, 40)][: len(counts)]
            assert {span.name for span in spans} <= {"steps scripted"}
            assert len({span.context.trace_id for span in spans}) == len(counts)


async def test_links_lead_to_calls_that_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    async def reading_the_first(record: CallRecord) -> CallFacts:
        return CallFacts(record.session, "tale", sources=[Source("call_0", "output", 0.9)])

    monkeypatch.setattr(tracing, "MAX_REMEMBERED", 2)
    exporter = InMemorySpanExporter()
    writer = CountingWriter("gateway", exporter)
    tracer = CallTracer(TelemetrySettings(), reading_the_first, writer)
    tracer.start()
    for number in range(4):
        tracer.ended(call(f"call_{number}"))
    await until(lambda: writer.calls == 4)
    await tracer.close()
    linked = {
        span.attributes["parrot.call.id"]: [dict(link.attributes or {}) for link in span.links]
        for span in exporter.get_finished_spans()
        if span.attributes is not None and "parrot.call.id" in span.attributes
    }
    told = {"parrot.link.kind": "output", "parrot.link.confidence": 0.9}
    assert linked == {"call_0": [], "call_1": [told], "call_2": [told], "call_3": []}


async def test_too_much_at_once_is_left_out_and_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracing, "MAX_PENDING", 3)
    monkeypatch.setattr(tracing, "MAX_PENDING_BYTES", 120)
    exporter = InMemorySpanExporter()
    settings = TelemetrySettings(traces_content=True)
    tracer = CallTracer(settings, facts_of, SpanWriter("gateway", exporter))
    for name, length in (("a", 60), ("b", 60), ("c", 20), ("d", 1)):
        ended = call(name)
        ended.content = CallContent()
        body = {"prompt": name * length}
        ended.content.asked("/v1/completions", json.dumps(body).encode())
        tracer.ended(ended)
    await tracer.close()
    prompts = {
        span.attributes["parrot.call.id"]: span.attributes.get("gen_ai.input.messages")
        for span in exporter.get_finished_spans()
        if span.attributes is not None and "parrot.call.id" in span.attributes
    }
    assert [*prompts] == ["a", "b", "c"]
    assert "a" * 60 in str(prompts["a"])
    assert prompts["b"] is None
    assert "c" * 20 in str(prompts["c"])
    assert caplog.messages == [
        "1 sampled calls were not exported: too many had ended at once",
        "1 sampled calls were exported without their content: too much had ended at once",
    ]


class ScriptedExporter(SpanExporter):
    """Takes spans or not, as a receiver would, and logs each try, as exporters do.

    Args:
        takes: of each batch; the last one repeats.
        gate: waited for in each.
    """

    def __init__(self, takes: list[bool], gate: threading.Event | None = None) -> None:
        self.takes, self.gate = takes, gate

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self.gate is not None:
            self.gate.wait(20.0)
        taken = self.takes.pop(0) if len(self.takes) > 1 else self.takes[0]
        if not taken:
            for text in ("it is not there", "given up"):
                logging.getLogger(__name__).error(text)
        return SpanExportResult.SUCCESS if taken else SpanExportResult.FAILURE

    def shutdown(self) -> None:
        """Nothing is open."""


async def test_a_receiver_that_fails_is_in_the_log_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    # A batch a span.
    writer = SpanWriter("gateway", ScriptedExporter([False, False, True]), 8 * 1024 * 1024)
    for _ in range(4):
        writer.begin("one", 1, 1, 1).end(2)
    await writer.close()
    assert caplog.messages == [
        "spans are not exported: it is not there",
        "spans are exported again; 2 were lost",
        "2 spans were not exported",
    ]


async def test_the_end_does_not_wait_for_a_receiver(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(span_writer, "_CLOSE_TIMEOUT_S", 0.01)
    gate = threading.Event()
    writer = SpanWriter("gateway", ScriptedExporter([True], gate))
    writer.begin("one", 1, 1, 1).end(2)
    await writer.close()
    assert caplog.messages == ["the last spans were not exported: their receiver does not answer"]
    gate.set()
