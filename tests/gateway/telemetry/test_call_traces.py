"""Traces of calls, as a receiver of OTLP over HTTP gets them from a gateway process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
from harness.otlp_receiver import Receiver, Span
from harness.processes import DEMO_MODEL, GatewayProcess
from harness.scripted_upstream import ScriptedUpstream, chat_document, document

pytest.importorskip("opentelemetry.sdk", reason="pip install 'parrot-gateway[tracing]'")

DOCS = Path(__file__).parents[3] / "docs" / "observability.md"
FACTS = (
    "Kakapos graze on rimu fruit, keas dig for grubs below alpine snow, and lorikeets brush the "
    "nectar out of eucalyptus blossoms with tongues like paint brushes."
)
CLIENT_TRACE, CLIENT_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@dataclass
class Seen:
    """Calls that were made, and the spans exported of them."""

    receiver: Receiver
    ids: dict[str, str] = field(default_factory=dict)
    #: `traceparent` of requests to the upstream, by what was called.
    sent_on: dict[str, str | None] = field(default_factory=dict)

    def span(self, name: str) -> Span:
        """The one of a call, by its name here."""
        found = [
            each
            for each in self.receiver.spans
            if each.attributes.get("parrot.request.id") == self.ids[name]
        ]
        assert len(found) == 1, (name, found)
        return found[0]


@pytest.fixture(scope="module")
def seen() -> Iterator[Seen]:
    """Calls of all kinds by the real client; the gateway has ended, and exported what it had."""
    answer = document(chat_document("Once upon a time, in a far country."))
    facts = document(chat_document(FACTS))
    with Receiver() as receiver, ScriptedUpstream() as upstream:
        seen, model, knowing = Seen(receiver), upstream.script(answer), upstream.script(facts)
        config = {
            "models": [{"model": DEMO_MODEL}],
            "upstreams": [{"name": "other", "url": upstream.base_url, "models": [model, knowing]}],
            "telemetry": {"traces_endpoint": receiver.url},
            "engines": {"heartbeat_s": 0.1},
        }
        with GatewayProcess(config=config) as gateway:
            client = openai.OpenAI(base_url=gateway.base_url, api_key="none", max_retries=0)

            def ask(name: str, model: str, *said: str, **more: Any) -> str:
                turns = ["user", "assistant"] * len(said)
                answer = client.chat.completions.with_raw_response.create(
                    model=model,
                    messages=[  # type: ignore[arg-type]
                        {"role": role, "content": text}
                        for role, text in zip(turns, said, strict=False)
                    ],
                    max_tokens=12,
                    **more,
                )
                seen.ids[name] = answer.headers["x-request-id"]
                seen.sent_on[name] = (
                    upstream.received[-1].headers.get("traceparent") if upstream.received else None
                )
                return answer.parse().choices[0].message.content or ""

            first = ask("first", DEMO_MODEL, "Tell me a story of a parrot that reads.")
            ask("second", DEMO_MODEL, "Tell me a story of a parrot that reads.", first, "Go on.")
            ask("stream-free", model, "What is the capital?")
            ask("facts", knowing, "What do parrots eat?")
            ask("quoting", DEMO_MODEL, f"Put this into one line: {FACTS}")
            ask("named", model, "Hello!", extra_headers={"X-Parrot-Session": "tale"})
            parent = f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01"
            ask("continued", model, "Who is there?", extra_headers={"traceparent": parent})
            ask("unsampled", model, "Nobody.", extra_headers={"traceparent": parent[:-1] + "0"})
            ask("malformed", DEMO_MODEL, "Hm.", extra_headers={"traceparent": "00-zz-1"})
            with pytest.raises(openai.BadRequestError) as refused:
                ask("refused", DEMO_MODEL, "Hi", top_p=7)
            seen.ids["refused"] = refused.value.response.headers["x-request-id"]
            deferred = {"session": "graph", "output": "draft", "defer": True}
            body = {"model": DEMO_MODEL, "prompt": "Once", "max_tokens": 4}
            _, headers, _ = gateway.post("/v1/completions", {**body, "parrot": deferred})
            seen.ids["producer"] = headers["x-request-id"]
            reader = {"session": "graph", "inputs": {"draft": "draft"}}
            prompt = "Shorten: {{draft}}"
            _, headers, _ = gateway.post(
                "/v1/completions", {**body, "prompt": prompt, "parrot": reader}
            )
            seen.ids["reader"] = headers["x-request-id"]
            client.close()
        yield seen


def test_a_span_tells_what_a_call_was(seen: Seen) -> None:
    span = seen.span("first")
    told = span.attributes
    assert span.name == f"chat {DEMO_MODEL}"
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.request.model"] == DEMO_MODEL
    assert told["gen_ai.usage.input_tokens"] > 5
    assert 0 < told["gen_ai.usage.output_tokens"] <= 12
    assert told["http.response.status_code"] == 200
    assert told["gen_ai.response.finish_reasons"][0] in ("stop", "length")
    times = [span.begin, *(at for _, at, _ in span.events), span.end]
    assert times == sorted(times)
    assert [name for name, _, _ in span.events] == [
        "parrot.queued", "parrot.placed", "parrot.first_token"
    ]  # fmt: skip
    placed = span.events[1][2]
    assert placed["parrot.placement.reason"]
    assert len(placed["parrot.placement.explanation"].split()) > 4
    assert seen.receiver.resource["service.name"] == "parrot-gateway"
    assert not any("story" in str(each) for each in told.values())


def test_calls_of_an_inferred_session_share_a_trace(seen: Seen) -> None:
    first, second = seen.span("first"), seen.span("second")
    assert first.trace == second.trace
    assert first.parent == second.parent
    assert (first.id, "continues") in second.links
    assert first.attributes["parrot.session.inferred"] is True
    session = next(each for each in seen.receiver.spans if each.id == first.parent)
    assert (session.trace, session.parent) == (first.trace, "")
    assert session.attributes["parrot.session.calls"] == 2
    assert (session.begin, session.end) == (first.begin, second.end)


def test_an_answer_that_another_prompt_holds_is_a_link(seen: Seen) -> None:
    facts, quoting = seen.span("facts"), seen.span("quoting")
    assert (facts.id, "output") in quoting.links
    # The upstream was told a trace of the call's own before the session was known.
    assert (quoting.parent, "session") in facts.links


def test_declared_edges_are_links(seen: Seen) -> None:
    producer, reader = seen.span("producer"), seen.span("reader")
    assert producer.trace == reader.trace
    assert (producer.id, "input") in reader.links
    assert producer.attributes["parrot.deferred"] is True
    assert producer.events[0][0] == "parrot.inputs_ready"
    session = next(each for each in seen.receiver.spans if each.id == reader.parent)
    assert session.name == "invoke_workflow graph"
    assert session.attributes["parrot.session.inferred"] is False


def test_a_client_s_trace_is_continued(seen: Seen) -> None:
    span = seen.span("continued")
    assert (span.trace, span.parent) == (CLIENT_TRACE, CLIENT_SPAN)
    assert seen.sent_on["continued"] == f"00-{CLIENT_TRACE}-{span.id}-01"


def test_what_a_client_does_not_sample_is_not_exported(seen: Seen) -> None:
    ids = [each.attributes.get("parrot.request.id") for each in seen.receiver.spans]
    assert seen.ids["unsampled"] not in ids
    assert seen.sent_on["unsampled"] == f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-00"
    assert seen.ids["malformed"] in ids


def test_upstreams_are_told_the_trace(seen: Seen) -> None:
    for name in ("stream-free", "named"):
        span = seen.span(name)
        assert seen.sent_on[name] == f"00-{span.trace}-{span.id}-01"
        assert span.attributes["parrot.engine"] == "other"
    named = seen.span("named")
    session = next(each for each in seen.receiver.spans if each.id == named.parent)
    assert session.name == "invoke_workflow tale"
    # What was told before the session was known stays; the session is a link.
    assert [kind for _, kind in seen.span("stream-free").links] == ["session"]


def test_parents_and_links_are_exported(seen: Seen) -> None:
    spans = {each.id: each for each in seen.receiver.spans}
    assert len(spans) == len(seen.receiver.spans)
    linked = [id_ for each in spans.values() for id_, _ in each.links]
    assert linked
    assert set(linked) <= set(spans)
    for each in spans.values():
        if each.parent not in ("", CLIENT_SPAN):
            parent = spans[each.parent]
            assert parent.trace == each.trace
            assert parent.begin <= each.begin <= each.end <= parent.end


def test_an_error_is_the_client_s(seen: Seen) -> None:
    span = seen.span("refused")
    assert "top_p" in span.error
    assert span.attributes["error.type"]
    assert span.attributes["http.response.status_code"] == 400


def test_steps_of_engines_are_sampled(seen: Seen) -> None:
    steps = [each for each in seen.receiver.spans if each.name == "steps parrot-demo-0"]
    assert sum(each.attributes["parrot.steps.generated_tokens"] for each in steps) > 10
    for each in steps:
        told = each.attributes
        assert told["parrot.steps.count"] >= 1
        assert told["parrot.steps.mean_ms"] * told["parrot.steps.count"] > 0
        assert each.begin < each.end


def test_the_document_lists_what_is_exported(seen: Seen) -> None:
    text = DOCS.read_text(encoding="utf-8").partition("## Traces")[2]
    listed = set(re.findall(r"^\| `([a-z_.]+)`", text, re.MULTILINE))
    spans = seen.receiver.spans
    names = {name for span in spans for name in span.attributes}
    names |= {name for span in spans for event, _, told in span.events for name in (event, *told)}
    assert names <= listed
    # Batches, clients that left, engines that were lost, and kinds of calls that are not made here.
    assert listed - names <= {
        "parrot.batch.id",
        "parrot.client_left",
        "parrot.lost_engines",
        "parrot.link.kind",
        "parrot.link.confidence",
        # Asked for elsewhere.
        "gen_ai.system_instructions",
        "gen_ai.input.messages",
        "gen_ai.output.messages",
        "parrot.content.cut_characters",
    }
