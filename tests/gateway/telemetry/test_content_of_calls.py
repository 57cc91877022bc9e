"""Prompts and answers on spans and on the live page, where the operator asks for them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
from harness.otlp_receiver import Receiver, Span
from harness.processes import DEMO_MODEL, GatewayProcess, wait_until
from harness.scripted_upstream import ScriptedUpstream, chat_document, chat_events, document
from harness.scripted_upstream import event_stream as streamed

pytest.importorskip("opentelemetry.sdk", reason="pip install 'parrot-gateway[tracing]'")

DOCS = Path(__file__).parents[3] / "docs" / "observability.md"
CONTENT = ("gen_ai.input.messages", "gen_ai.output.messages", "gen_ai.system_instructions")
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0"
SECRET = "sk-test-0123456789abcdef"
LIMIT = 2000


@dataclass
class Seen:
    """Calls and what they wrote, what was exported, and what the page shows of it."""

    receiver: Receiver
    ids: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    shown: dict[str, dict[str, Any]] = field(default_factory=dict)

    def span(self, name: str) -> Span:
        (found,) = (
            each
            for each in self.receiver.spans
            if each.attributes.get("parrot.request.id") == self.ids[name]
        )
        return found

    def said(self, name: str) -> tuple[list[Any], list[Any]]:
        """Messages of the prompt and of the answer, on the span of a call."""
        told = self.span(name).attributes
        return json.loads(told[CONTENT[0]]), json.loads(told[CONTENT[1]])


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "parts": [{"type": "text", "content": text}]}


def text_of(message: dict[str, Any]) -> str:
    (part,) = message["parts"]
    return str(part["content"])


@pytest.fixture(scope="module")
def seen() -> Iterator[Seen]:
    """Calls of all routes; what the page shows of them; then the gateway ends."""
    with Receiver() as receiver, ScriptedUpstream() as upstream:
        whole = upstream.script(document(chat_document("Paris, of course.")))
        stream = upstream.script(streamed(*chat_events(["It ", "is ", "late."])))
        config = {
            "models": [{"model": DEMO_MODEL}],
            "upstreams": [{"name": "other", "url": upstream.base_url, "models": [whole, stream]}],
            "telemetry": {
                "traces_endpoint": receiver.url,
                "traces_content": True,
                "keep_content": True,
                "max_content_characters": LIMIT,
            },
        }
        with GatewayProcess(config=config) as gateway:
            seen = Seen(receiver)
            client = openai.OpenAI(base_url=gateway.base_url, api_key="none", max_retries=0)

            def post(name: str, path: str, /, **body: Any) -> Any:
                status, headers, answer = gateway.post(path, body)
                assert status == 200, answer
                seen.ids[name] = headers["x-request-id"]
                return answer

            hello = [{"role": "user", "content": f"Say hello, {SECRET}!"}]
            chat = client.chat.completions.with_raw_response.create
            with client.chat.completions.with_streaming_response.create(
                model=DEMO_MODEL,
                messages=hello,  # type: ignore[arg-type]
                max_tokens=6,
                stream=True,
            ) as answer:
                seen.ids["chat"] = answer.headers["x-request-id"]
                events = [json.loads(line[6:]) for line in answer.iter_lines() if "{" in line]
                pieces = (each["choices"][0]["delta"].get("content") or "" for each in events)
                seen.texts["chat"] = "".join(pieces)
            completion = post("completion", "/v1/completions", model=DEMO_MODEL, prompt="Once",
                              max_tokens=4)  # fmt: skip
            seen.texts["completion"] = completion["choices"][0]["text"]
            response = post("response", "/v1/responses", model=DEMO_MODEL, input="Well?",
                            instructions="Be brief.", max_output_tokens=4)  # fmt: skip
            seen.texts["response"] = response["output"][0]["content"][0]["text"]
            message = post("message", "/v1/messages", model=DEMO_MODEL, system="Be kind.",
                           max_tokens=4, messages=[{"role": "user", "content": "Hm?"}])  # fmt: skip
            seen.texts["message"] = message["content"][0]["text"]
            body = {"model": DEMO_MODEL, "max_tokens": 4}
            post("producer", "/v1/completions", **body, prompt="A draft",
                 parrot={"session": "tale", "output": "draft", "defer": True})  # fmt: skip
            reader = {"session": "tale", "inputs": {"draft": "draft"}, "output": "end"}
            end = post("reader", "/v1/completions", **body, prompt="Shorten {{draft}}",
                       parrot=reader)  # fmt: skip
            seen.texts["reader"] = end["choices"][0]["text"]
            variables = gateway.get("/v1/variables?session=tale")["data"]
            draft = next(each for each in variables if each["name"] == "draft")
            seen.texts["draft"] = gateway.get(f"/v1/variables/{draft['id']}")["value"]
            post("upstream", "/v1/chat/completions", model=whole, messages=hello)
            list(client.chat.completions.create(model=stream, messages=hello, stream=True))  # type: ignore[arg-type,call-overload]
            for name, flag in (("long", "1"), ("unsampled", "0")):
                long = [{"role": "user", "content": f"{name} " * 1000}]
                answer = chat(model=whole, messages=long, max_tokens=4,  # type: ignore[arg-type]
                              extra_headers={"traceparent": PARENT + flag})  # fmt: skip
                seen.ids[name] = answer.headers["x-request-id"]
            with pytest.raises(openai.BadRequestError) as refused:
                chat(model=DEMO_MODEL, messages=hello, top_p=7)  # type: ignore[arg-type]
            seen.ids["refused"] = refused.value.response.headers["x-request-id"]
            for name, request_id in seen.ids.items():
                path = f"/ui/api/calls/{request_id}/text"

                def text(path: str = path) -> Any:
                    found = gateway.get(path)
                    return found if found["source"] else None

                seen.shown[name] = wait_until(text, f"the text of {name}")
            graph = seen.shown["reader"]
            client.close()
            assert graph["variables"]
        yield seen


@pytest.mark.parametrize("name", ["chat", "completion", "response", "message"])
def test_answers_of_all_routes_are_on_their_spans(seen: Seen, name: str) -> None:
    asked, answered = seen.said(name)
    assert [text_of(each) for each in answered] == [seen.texts[name]]
    assert answered[0]["role"] == "assistant"
    assert answered[0]["finish_reason"] in ("stop", "length")
    prompts = {"chat": "Say hello, sk-…!", "completion": "Once", "response": "Well?",
               "message": "Hm?"}  # fmt: skip
    assert asked == [user(prompts[name])]
    told = seen.span(name).attributes.get("gen_ai.system_instructions")
    instructions = {"response": "Be brief.", "message": "Be kind."}.get(name)
    assert (told and json.loads(told)[0]["content"]) == instructions


def test_deferred_calls_have_values_in_place_of_variables(seen: Seen) -> None:
    asked, answered = seen.said("producer")
    assert asked == [user("A draft")]
    assert text_of(answered[0]) == seen.texts["draft"]
    asked, answered = seen.said("reader")
    assert asked == [user(f"Shorten {seen.texts['draft']}")]
    assert text_of(answered[0]) == seen.texts["reader"]


def test_upstreams_too_whole_and_streamed(seen: Seen) -> None:
    assert text_of(seen.said("upstream")[1][0]) == "Paris, of course."
    streams = [
        each.attributes
        for each in seen.receiver.spans
        if "It is late." in each.attributes.get("gen_ai.output.messages", "")
    ]
    assert len(streams) == 1


def test_what_is_cut_says_so(seen: Seen) -> None:
    told = seen.span("long").attributes
    asked, _ = seen.said("long")
    text = text_of(asked[0])
    assert re.fullmatch(r"(long )+\w*… \[\d+ characters cut\]", text)
    assert len(text) < LIMIT + 50
    assert told["parrot.content.cut_characters"] == 5000 - text.rindex("…")


def test_calls_that_are_not_sampled_have_none(seen: Seen) -> None:
    exported = [each.attributes.get("parrot.request.id") for each in seen.receiver.spans]
    assert seen.ids["unsampled"] not in exported
    assert not any("unsampled" in str(each.attributes) for each in seen.receiver.spans)
    # It is kept all the same: these are two settings.
    assert "unsampled" in str(seen.shown["unsampled"]["input_messages"])


def test_keys_are_on_no_span_and_on_no_page(seen: Seen) -> None:
    everything = str([each.attributes for each in seen.receiver.spans]) + str(seen.shown)
    assert "0123456789" not in everything


def test_the_page_has_prompt_answer_and_the_request_itself(seen: Seen) -> None:
    shown = seen.shown["chat"]
    assert (shown["source"], shown["why"], shown["path"]) == (
        "kept", None, "/v1/chat/completions"
    )  # fmt: skip
    assert shown["input_messages"] == seen.said("chat")[0]
    request = json.loads(shown["request"])
    assert request["messages"][0]["content"] == "Say hello, sk-…!"
    assert request["max_tokens"] == 6
    assert seen.shown["long"]["request"] == "", "a request that is cut cannot be sent again"
    reader = seen.shown["reader"]
    assert json.loads(reader["request"]) == {
        "model": DEMO_MODEL, "max_tokens": 4, "prompt": f"Shorten {seen.texts['draft']}"
    }  # fmt: skip
    found = {(each["direction"], each["name"]): each["value"] for each in reader["variables"]}
    assert found == {
        ("reads", "draft"): seen.texts["draft"],
        ("writes", "end"): seen.texts["reader"],
    }
    assert seen.shown["refused"]["output_messages"] == []


def test_the_document_lists_what_is_exported(seen: Seen) -> None:
    text = DOCS.read_text(encoding="utf-8").partition("## Traces")[2]
    listed = set(re.findall(r"^\| `([a-z_.]+)`", text, re.MULTILINE))
    names = {name for span in seen.receiver.spans for name in span.attributes}
    assert {*CONTENT, "parrot.content.cut_characters"} <= names <= listed
