"""Semantic variables in front of an upstream, on real processes."""

from __future__ import annotations

import json
import signal
from typing import Any

import openai
import pytest
from harness.processes import GatewayProcess, upstream_settings, wait_until
from harness.raw_http import RawConnection, chat_body
from harness.scripted_upstream import (
    ScriptedUpstream,
    chat_document,
    chat_events,
    completion_document,
    document,
    error,
    event_stream,
)

CHAT = "/v1/chat/completions"


def value(relay: GatewayProcess, variable: str) -> dict[str, Any]:
    return dict(relay.ask("GET", f"/v1/variables/{variable}").json)


def content_of(call: Any) -> str:
    return str(call.json["messages"][0]["content"])


def check_quiet(relay: GatewayProcess) -> None:
    """Nothing waits, runs or is held."""
    semantic = relay.ask("GET", "/health").json["semantic"]
    calls = semantic["calls"]
    names = ("waiting", "in_line", "running", "held_bytes")
    assert [calls[name] for name in names] == [0, 0, 0, 0]
    assert semantic["readers"] == 0
    assert semantic["sessions"]["unfinished_calls"] == 0


def test_two_deferred_calls_feed_a_third(relay: GatewayProcess, upstream: ScriptedUpstream) -> None:
    one = upstream.script(event_stream(*chat_events(["fir", "st"])))
    two = upstream.script(event_stream(*chat_events(["second"])))
    three = upstream.script(document(chat_document("third")))
    client = openai.OpenAI(base_url=f"{relay.root}/v1", api_key="none", max_retries=0)
    parrot = {"X-Parrot-Session": "up", "X-Parrot-Defer": "true"}

    def deferred(model: str) -> str:
        answer = client.chat.completions.create(**chat_body(model, "go"), extra_headers=parrot)
        return answer.choices[0].message.content or ""

    prompt = f"{deferred(one)} + {deferred(two)}"
    answer = client.chat.completions.create(**chat_body(three, prompt))
    assert answer.choices[0].message.content == "third"
    (received,) = upstream.calls(three)
    assert content_of(received) == "first + second"
    (received,) = upstream.calls(one)
    assert received.json == chat_body(one, "go", stream=True)
    assert not [name for name in received.headers if name.startswith("x-parrot")]
    check_quiet(relay)


def test_nothing_of_ours_reaches_the_upstream(
    relay: GatewayProcess, upstream: ScriptedUpstream
) -> None:
    model = upstream.script(document(completion_document("text")))
    body = {"model": model, "prompt": "x", "unknown": {"a": 1.0}, "parrot": {"output": "o"}}
    response = relay.ask("POST", "/v1/completions", body, {"X-Parrot-Session": "s2"})
    (received,) = upstream.calls(model)
    assert received.json == {"model": model, "prompt": "x", "unknown": {"a": 1.0}}
    assert not [name for name in received.headers if name.startswith("x-parrot")]
    assert response.body == json.dumps(completion_document("text")).encode()
    assert response.headers["x-parrot-engine"] == "scripted"
    assert response.headers["x-parrot-cached-tokens"] == "0"
    assert value(relay, response.headers["x-parrot-variable"])["value"] == "text"


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/responses"])
def test_other_routes_of_upstreams_take_references(
    relay: GatewayProcess, upstream: ScriptedUpstream, path: str
) -> None:
    producer = upstream.script(event_stream(*chat_events(["the ", "value"])))
    parrot = {"session": "embed", "defer": True}
    reference = relay.ask("POST", CHAT, chat_body(producer, "go", parrot=parrot))
    text = reference.json["choices"][0]["message"]["content"]
    model = upstream.script(document({"object": "list", "data": []}))
    response = relay.ask("POST", path, {"model": model, "input": f"of {text}", "user": text})
    assert response.json == {"object": "list", "data": []}
    (received,) = upstream.calls(model)
    assert received.json == {"model": model, "input": "of the value", "user": text}
    # What looks like a reference and is none stays; an unknown one is refused here.
    relay.ask("POST", path, {"model": model, "input": "[[parrot:x]]"})
    assert upstream.calls(model)[-1].json["input"] == "[[parrot:x]]"
    relay.ask("DELETE", "/v1/sessions/embed")
    refused = relay.ask("POST", path, {"model": model, "input": text})
    assert (refused.status, refused.json["error"]["code"]) == (404, "variable_not_found")
    assert len(upstream.calls(model)) == 2
    check_quiet(relay)


@pytest.mark.parametrize("spacing", [None, (", ", ": "), (",", ":")])
def test_ordinary_calls_pass_byte_for_byte(
    relay: GatewayProcess, upstream: ScriptedUpstream, spacing: tuple[str, str] | None
) -> None:
    """Also when they look as if they meant us."""
    raw = json.dumps(chat_document("[[parrot:x]]"), separators=spacing, indent=1).encode()
    model = upstream.script(document(raw))
    text = 'say "parrot": [[parrot:aaaa]] {{x}} \u00e4'
    body = json.dumps(chat_body(model, text, tool_choice="none"), separators=spacing).encode()
    response = relay.ask("POST", CHAT, body)
    (received,) = upstream.calls(model)
    assert received.body == body
    assert response.body == raw
    names = [name for name in response.headers if name.startswith("x-parrot")]
    assert names == ["x-parrot-engine"]


def test_streams_with_an_output_pass_byte_for_byte(
    relay: GatewayProcess, upstream: ScriptedUpstream
) -> None:
    events = chat_events(["Hel", "lo"])
    model = upstream.script(event_stream(*events))
    response = relay.ask("POST", CHAT, chat_body(model, "x", stream=True, parrot={"output": "o"}))
    assert response.body == b"".join(events)
    assert value(relay, response.headers["x-parrot-variable"])["value"] == "Hello"


def test_deferred_text_can_be_read_as_it_is_written(
    relay: GatewayProcess, upstream: ScriptedUpstream
) -> None:
    gate = upstream.gate()
    role, first, second, *rest = chat_events(["Hel", "lo"])
    model = upstream.script(event_stream(role, first, gate, second, *rest))
    answer = relay.ask("POST", CHAT, chat_body(model, "x", parrot={"defer": True}))
    variable = answer.headers["x-parrot-variable"]
    with RawConnection(relay.port) as connection:
        headers = {"Accept": "text/event-stream"}
        connection.send(connection.request("GET", f"/v1/variables/{variable}", None, headers))
        seen = b""
        while b"Hel" not in seen:
            seen += connection.receive()
        assert b"lo" not in seen.replace(b"close", b"")
        gate.open()
        while b"[DONE]" not in seen:
            seen += connection.receive()
    assert b'{"text":"lo"}' in seen


def test_errors_of_the_upstream_travel(relay: GatewayProcess, upstream: ScriptedUpstream) -> None:
    model = upstream.script(error(400))
    answer = relay.ask("POST", CHAT, chat_body(model, "x", parrot={"defer": True}))
    reference = answer.json["choices"][0]["message"]["content"]
    never = upstream.script(document(chat_document("never")))
    dependent = relay.ask("POST", CHAT, chat_body(never, reference))
    assert dependent.status == 424
    assert dependent.json["error"]["code"] == "dependency_failed"
    assert "scripted 400" in dependent.json["error"]["message"]
    assert dependent.headers["x-should-retry"] == "false"
    assert upstream.calls(never) == []
    failure = value(relay, answer.headers["x-parrot-variable"])["variable"]["failure"]
    assert failure["code"] == "scripted_400"
    check_quiet(relay)


def test_a_stream_that_breaks_off_fails_the_variable_not_the_client(
    relay: GatewayProcess, upstream: ScriptedUpstream
) -> None:
    role, first, *_ = chat_events(["Hel"])
    model = upstream.script(event_stream(role, first, cut=True))
    attended = relay.ask("POST", CHAT, chat_body(model, "x", stream=True, parrot={"output": "o"}))
    assert attended.events[-1] == "[DONE]"
    assert value(relay, attended.headers["x-parrot-variable"])["error"]["code"] == (
        "dependency_failed"
    )
    deferred = relay.ask("POST", CHAT, chat_body(model, "x", parrot={"defer": True}))
    failed = value(relay, deferred.headers["x-parrot-variable"])
    assert failed["variable"]["failure"]["code"] == "upstream_error"


def test_answers_that_ignore_the_stream_are_read_too(
    relay: GatewayProcess, upstream: ScriptedUpstream
) -> None:
    model = upstream.script(document(chat_document("whole")))
    answer = relay.ask("POST", CHAT, chat_body(model, "x", parrot={"defer": True}))
    assert value(relay, answer.headers["x-parrot-variable"])["value"] == "whole"


def test_tool_arguments_take_values_too(relay: GatewayProcess, upstream: ScriptedUpstream) -> None:
    source = relay.ask("POST", "/v1/variables", {"session": "tools", "value": 'a "b"\n'}).json
    model = upstream.script(document(chat_document("ok")))
    arguments = json.dumps({"query": source["reference"]})
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "done"}]},
    ]
    response = relay.ask("POST", CHAT, {"model": model, "messages": messages})
    assert response.status == 200
    (received,) = upstream.calls(model)
    sent = received.json["messages"][1]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(sent) == {"query": 'a "b"\n'}


def test_cancelling_reaches_the_upstream(relay: GatewayProcess, upstream: ScriptedUpstream) -> None:
    gate = upstream.gate()
    model = upstream.script(event_stream(*chat_events(["x"]), before=gate))
    body = chat_body(model, "x", parrot={"session": "cancelled", "defer": True})
    answer = relay.ask("POST", CHAT, body)
    (received,) = upstream.wait_for_calls(model)
    assert relay.ask("DELETE", "/v1/sessions/cancelled").status == 200
    assert received.aborted.wait(10)
    gate.open()
    assert relay.ask("GET", f"/v1/calls/{answer.headers['x-parrot-call']}").status == 404
    check_quiet(relay)


def test_own_routes_go_before_the_upstream(
    relay: GatewayProcess, upstream: ScriptedUpstream
) -> None:
    before = len(upstream.received)
    assert relay.ask("GET", "/v1/sessions").json["object"] == "list"
    assert relay.ask("POST", "/v1/resolve", {"text": "x"}).json == {"text": "x"}
    assert relay.ask("DELETE", "/v1/variables/vnone").status == 404
    assert len(upstream.received) == before


def test_running_deferred_calls_may_finish_when_the_gateway_stops(
    upstream: ScriptedUpstream,
) -> None:
    gate = upstream.gate()
    first = upstream.script(event_stream(*chat_events(["x"]), before=gate))
    second = upstream.script(event_stream(*chat_events(["y"])))
    with GatewayProcess(
        config={"upstreams": [upstream_settings("u", upstream.base_url)]}
    ) as stopped:
        answer = stopped.ask("POST", CHAT, chat_body(first, "x", parrot={"defer": True}))
        reference = answer.json["choices"][0]["message"]["content"]
        stopped.ask("POST", CHAT, chat_body(second, reference, parrot={"defer": True}))
        (received,) = upstream.wait_for_calls(first)
        stopped.signal(signal.SIGTERM)
        wait_until(lambda: stopped.ask("GET", "/v1/sessions").status == 503, "the drain to begin")
        assert upstream.calls(second) == []
        gate.open()
        assert stopped.wait() == 0
    assert received.completed.is_set()
    # What depended on it and could run, ran too.
    (received,) = upstream.calls(second)
    assert content_of(received) == "x"


def test_deferred_calls_with_tools_never_reach_the_upstream(
    relay: GatewayProcess, upstream: ScriptedUpstream
) -> None:
    model = upstream.script(document(chat_document("never")))
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    response = relay.ask("POST", CHAT, chat_body(model, "x", tools=[tool], parrot={"defer": True}))
    assert (response.status, response.json["error"]["param"]) == (400, "parrot.defer")
    assert upstream.calls(model) == []
