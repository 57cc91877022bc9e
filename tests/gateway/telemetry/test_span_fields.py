"""Names, attributes and events of spans, made of records."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from parrot_engine.protocol import EngineStats

from parrot_gateway.telemetry.call_record import CallRecord
from parrot_gateway.telemetry.content.content import ReadContent
from parrot_gateway.telemetry.operations import operation_of
from parrot_gateway.telemetry.span_fields import (
    CallFacts,
    call_attributes,
    call_events,
    content_attributes,
    span_name,
    step_attributes,
    unix_ns,
)

RECORD = CallRecord(
    "req_1", "call_1", 10.0, path="/v1/messages", tenant="acme", session="mine", batch="batch_1",
    model="alias", served_model="model", engine="engine", reason="prefix",
    explanation="prefix of 3", started_at=1000.0, ready=12.0, submitted=13.0, placed=14.0,
    first_token=15.5, ended=20.0, queued_s=1.0, prompt_tokens=7, cached_tokens=5, output_tokens=3,
    status=200, error_code="broke", finish_reason="length", streamed=True, deferred=True,
    client_left=True, lost_engines=("first", "second"),
)  # fmt: skip
#: It was refused: nothing is known of it.
REFUSED = CallRecord("req_2", "call_2", 10.0, "/v1/other", started_at=1000.0, status=400)


def test_a_span_has_every_attribute_that_is_known() -> None:
    told = call_attributes(RECORD, "sess_1", CallFacts(is_inferred=True))
    assert told == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "parrot_gateway",
        "gen_ai.conversation.id": "sess_1",
        "gen_ai.request.model": "alias",
        "gen_ai.response.model": "model",
        "gen_ai.request.stream": True,
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.cache_read.input_tokens": 5,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.response.finish_reasons": ["length"],
        # From its arrival, not from that of its inputs.
        "gen_ai.response.time_to_first_chunk": 5.5,
        "http.request.method": "POST",
        "http.route": "/v1/messages",
        "http.response.status_code": 200,
        "error.type": "broke",
        "parrot.call.id": "call_1",
        "parrot.request.id": "req_1",
        "parrot.tenant": "acme",
        "parrot.batch.id": "batch_1",
        "parrot.engine": "engine",
        "parrot.lost_engines": ["first", "second"],
        "parrot.deferred": True,
        "parrot.client_left": True,
        "parrot.session.inferred": True,
    }
    assert call_attributes(REFUSED, None, CallFacts(is_inferred=True)) == {
        "gen_ai.operation.name": "other",
        "gen_ai.provider.name": "parrot_gateway",
        "gen_ai.request.stream": False,
        "http.request.method": "POST",
        "http.route": "/v1/other",
        "http.response.status_code": 400,
        "parrot.call.id": "call_2",
        "parrot.request.id": "req_2",
        "parrot.tenant": "default",
    }
    assert (span_name(RECORD), span_name(REFUSED)) == ("chat alias", "other")


def test_events_are_the_steps_that_a_call_took() -> None:
    placed: dict[str, Any] = {
        "parrot.placement.reason": "prefix",
        "parrot.placement.explanation": "prefix of 3",
        "parrot.queued_s": 1.0,
    }
    events = [
        ("parrot.inputs_ready", 12.0, {}),
        ("parrot.queued", 13.0, {}),
        ("parrot.placed", 14.0, placed),
        ("parrot.first_token", 15.5, {}),
    ]
    assert list(call_events(RECORD, CallFacts())) == events
    placed["parrot.placement.explanation"] = "In a sentence."
    assert list(call_events(RECORD, CallFacts(explanation="In a sentence."))) == events
    assert list(call_events(REFUSED, CallFacts())) == []
    untold = CallRecord("req", "call", 1.0, placed=2.0, explanation="", queued_s=0.0)
    assert list(call_events(untold, CallFacts())) == [
        ("parrot.placed", 2.0, {"parrot.queued_s": 0.0})
    ]
    assert unix_ns(RECORD, 15.5) == 1_005_500_000_000


@pytest.mark.parametrize(
    ("operation", "paths"),
    [
        ("chat", "/v1/chat/completions /v1/messages /v1/responses /v1/responses/compact"),
        ("text_completion", "/v1/completions /v1/semantic_call"),
        ("embeddings", "/v1/embeddings"),
        ("rerank", "/v1/rerank /v2/rerank /rerank"),
        ("score", "/v1/score /score"),
        ("other", "/v1/audio/speech /v1/* score"),
    ],
)
def test_operations_have_the_names_of_the_conventions(operation: str, paths: str) -> None:
    assert {operation_of(path) for path in paths.split()} == {operation}


def test_contents_are_json_and_left_out_where_there_is_none() -> None:
    (system, asked, said) = ([{"content": each}] for each in ("Kind.", "Hm?", "Yes."))
    told = content_attributes(ReadContent("/", "{}", system, asked, said, 9))
    assert told.pop("parrot.content.cut_characters") == 9
    assert {name: msgspec.json.decode(str(value)) for name, value in told.items()} == {
        "gen_ai.system_instructions": system,
        "gen_ai.input.messages": asked,
        "gen_ai.output.messages": said,
    }
    assert content_attributes(ReadContent("/", "{}", [], [], [])) == {}


def test_steps_are_those_between_two_heartbeats() -> None:
    info = replace(ScriptedRemoteEngine().info, num_blocks=12)
    before = EngineStats(
        running=1, waiting=9, free_blocks=99, steps=2, filled_tokens=100, cached_tokens=20,
        generated_tokens=10, preemptions=3, busy_s=1.0, read_once_tokens=50,
    )  # fmt: skip
    now = EngineStats(
        running=3, waiting=4, free_blocks=5, steps=6, filled_tokens=130, cached_tokens=26,
        generated_tokens=18, preemptions=5, busy_s=1.5, read_once_tokens=57,
    )  # fmt: skip
    assert step_attributes("e", info, before, now) == {
        "parrot.engine": "e",
        "gen_ai.response.model": "m",
        "parrot.steps.count": 4,
        "parrot.steps.mean_ms": 125.0,
        "parrot.steps.filled_tokens": 30,
        "parrot.steps.cached_tokens": 6,
        "parrot.steps.generated_tokens": 8,
        "parrot.steps.read_once_tokens": 7,
        "parrot.steps.preemptions": 2,
        "parrot.engine.running": 3,
        "parrot.engine.waiting": 4,
        "parrot.engine.kv_used_blocks": 7,
    }
