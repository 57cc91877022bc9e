"""Name, attributes and events of a call's span, independent of any exporter.

Names beginning with `gen_ai.`, `http.` and `error.` are OpenTelemetry's; those with `parrot.` are
ours. docs/observability.md lists each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import msgspec
from parrot_engine.protocol import EngineInfo, EngineStats

from parrot_gateway.telemetry.call_record import CallRecord
from parrot_gateway.telemetry.content.content import ReadContent
from parrot_gateway.telemetry.operations import PROVIDER, operation_of

Value: TypeAlias = str | int | float | bool | Sequence[str]


class Source(NamedTuple):
    """An edge of the application's graph that ends at a call."""

    call: str
    #: "input" for a declared edge; otherwise the link's kind: "continues", "output", "tool",
    #: "spawned".
    kind: str
    #: From 0 to 1; 1 for a declared edge.
    confidence: float


class CallFacts(NamedTuple):
    """Facts about an ended call that its record does not have."""

    session: str | None = None
    session_name: str | None = None
    is_inferred: bool = False
    sources: Sequence[Source] = ()
    #: Reason for its time and place, in a sentence.
    explanation: str | None = None


def span_name(record: CallRecord) -> str:
    """Return the operation and the model."""
    operation = operation_of(record.path)
    return operation if record.model is None else f"{operation} {record.model}"


def unix_ns(record: CallRecord, at: float) -> int:
    """Convert one of the record's times, a `time.perf_counter()`, to Unix nanoseconds."""
    return round((record.started_at + at - record.started) * 1e9)


def call_attributes(record: CallRecord, session: str | None, facts: CallFacts) -> dict[str, Value]:
    """Return the known attributes of a call, by name."""
    first = record.first_token
    found: dict[str, Value | None] = {
        "gen_ai.operation.name": operation_of(record.path),
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.conversation.id": session,
        "gen_ai.request.model": record.model,
        "gen_ai.response.model": record.served_model,
        "gen_ai.request.stream": record.streamed,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        "gen_ai.usage.output_tokens": record.output_tokens,
        "gen_ai.response.finish_reasons": record.finish_reason and [record.finish_reason],
        "gen_ai.response.time_to_first_chunk": first and round(first - record.started, 6),
        "http.request.method": "POST",
        "http.route": record.path,
        "http.response.status_code": record.status,
        "error.type": record.error_code,
        "parrot.call.id": record.call_id,
        "parrot.request.id": record.request_id,
        "parrot.tenant": record.tenant,
        "parrot.batch.id": record.batch,
        "parrot.engine": record.engine,
        "parrot.lost_engines": list(record.lost_engines) or None,
        "parrot.deferred": record.deferred or None,
        "parrot.client_left": record.client_left or None,
        "parrot.session.inferred": facts.is_inferred if session else None,
    }
    return {name: value for name, value in found.items() if value is not None}


def content_attributes(content: ReadContent) -> dict[str, Value]:
    """Return a call's prompt and answer as JSON, because span attributes cannot be structures."""
    found: dict[str, Value] = {
        name: msgspec.json.encode(value).decode("utf-8", "replace")
        for name, value in (
            ("gen_ai.system_instructions", content.system_instructions),
            ("gen_ai.input.messages", content.input_messages),
            ("gen_ai.output.messages", content.output_messages),
        )
        if value
    }
    if content.cut_characters:
        found["parrot.content.cut_characters"] = content.cut_characters
    return found


def call_events(
    record: CallRecord, facts: CallFacts
) -> Iterator[tuple[str, float, dict[str, Value]]]:
    """Yield the events of a call: name, time (`time.perf_counter()`), attributes."""
    if record.ready is not None:
        yield "parrot.inputs_ready", record.ready, {}
    if record.submitted is not None:
        yield "parrot.queued", record.submitted, {}
    if record.placed is not None:
        reasons = {
            "parrot.placement.reason": record.reason,
            "parrot.placement.explanation": facts.explanation or record.explanation,
            "parrot.queued_s": record.queued_s,
        }
        told: dict[str, Value] = {
            name: value for name, value in reasons.items() if value is not None and value != ""
        }
        yield "parrot.placed", record.placed, told
    if record.first_token is not None:
        yield "parrot.first_token", record.first_token, {}


def step_attributes(
    engine: str, info: EngineInfo, before: EngineStats, now: EngineStats
) -> dict[str, Value]:
    """Return the attributes of an engine's work between two heartbeats."""
    steps = now.steps - before.steps
    return {
        "parrot.engine": engine,
        "gen_ai.response.model": info.model,
        "parrot.steps.count": steps,
        "parrot.steps.mean_ms": round((now.busy_s - before.busy_s) * 1000 / steps, 3),
        "parrot.steps.filled_tokens": now.filled_tokens - before.filled_tokens,
        "parrot.steps.cached_tokens": now.cached_tokens - before.cached_tokens,
        "parrot.steps.generated_tokens": now.generated_tokens - before.generated_tokens,
        "parrot.steps.read_once_tokens": now.read_once_tokens - before.read_once_tokens,
        "parrot.steps.preemptions": now.preemptions - before.preemptions,
        "parrot.engine.running": now.running,
        "parrot.engine.waiting": now.waiting,
        "parrot.engine.kv_used_blocks": info.num_blocks - now.free_blocks,
    }
