"""Sessions named by what clients send anyway, on real processes and with the real client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from harness.processes import GatewayProcess, upstream_settings, wait_until
from harness.raw_http import RawConnection
from harness.scripted_upstream import (
    ScriptedUpstream,
    chat_document,
    chat_events,
    document,
    error,
    event_stream,
)
from harness.session_sources import Source, all_of

CHAT = "/v1/chat/completions"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"

#: Headers, fields of the body, and the name of the session: strongest first.
SOURCES: list[Source] = [
    ({}, {"previous_response_id": "resp_n"}, "previous_response_id:resp_n"),
    ({}, {"conversation": {"id": "conv_n"}}, "conversation:conv_n"),
    ({"x-session-id": "n1"}, {}, "x-session-id:n1"),
    ({"x-session-affinity": "n2"}, {}, "x-session-affinity:n2"),
    ({"x-claude-code-session-id": "n3"}, {}, "x-claude-code-session-id:n3"),
    ({"x-acme-session-id": "n4-12345"}, {}, "x-acme-session-id:n4-12345"),
    ({"baggage": "session.id=n5"}, {}, "baggage:n5"),
    ({"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}, {}, f"traceparent:{TRACE}"),
    ({}, {"prompt_cache_key": "n6"}, "prompt_cache_key:n6"),
    ({}, {"metadata": {"session_id": "n7"}}, "metadata:n7"),
]


def graph_of(gateway: GatewayProcess, session: str) -> dict[str, Any]:
    response = gateway.ask("GET", f"/v1/sessions/{session}/graph")
    assert response.status == 200, response.body
    return dict(response.json)


def client_of(gateway: GatewayProcess) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=gateway.base_url, api_key=gateway.api_key or "none", max_retries=0
    )


def say(client: openai.OpenAI, model: str, headers: dict[str, str], body: dict[str, Any]) -> Any:
    return client.chat.completions.with_raw_response.create(
        model=model,
        messages=[{"role": "user", "content": "hi"}],
        extra_headers=headers,
        extra_body=body,
        max_tokens=2,
    )


@pytest.mark.parametrize(("headers", "body", "name"), SOURCES)
def test_each_source_alone_names_the_session_of_upstream_calls(
    relay: GatewayProcess,
    upstream: ScriptedUpstream,
    headers: dict[str, str],
    body: dict[str, Any],
    name: str,
) -> None:
    model = upstream.script(document(chat_document("one")))
    response = say(client_of(relay), model, headers, body)
    assert response.parse().choices[0].message.content == "one"
    graph = graph_of(relay, name)
    assert response.headers["x-parrot-session"] == graph["session"]["id"]
    call = graph["calls"][-1]
    assert call["id"] == response.headers["x-parrot-call"]
    assert (call["model"], call["state"], call["engine"]) == (model, "done", "scripted")
    (received,) = upstream.calls(model)
    assert {field: received.json.get(field) for field in body} == body
    relay.ask("DELETE", f"/v1/sessions/{graph['session']['id']}")


@pytest.mark.parametrize(("headers", "body", "name"), [SOURCES[2], SOURCES[7], SOURCES[9]])
def test_and_of_calls_to_own_models(
    demo: GatewayProcess, headers: dict[str, str], body: dict[str, Any], name: str
) -> None:
    client = client_of(demo)
    model = client.models.list().data[0].id
    for _ in range(2):
        say(client, model, headers, body)
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "hi"}],
        stream=True,
        max_tokens=2,
        extra_headers=headers,
        extra_body=body,
    )
    assert list(stream)
    graph = graph_of(demo, name)
    assert [call["state"] for call in graph["calls"]] == ["done"] * 3
    assert all(call["tokens"] for call in graph["calls"])
    listed = demo.ask("GET", "/v1/sessions").json["data"]
    assert name in [session["name"] for session in listed]


def test_the_first_source_of_the_order_counts(
    relay: GatewayProcess, upstream: ScriptedUpstream
) -> None:
    client = client_of(relay)
    left = list(SOURCES)
    while left:
        headers, body = all_of(left)
        model = upstream.script(document(chat_document("x")))
        response = say(client, model, headers, body)
        session = relay.ask("GET", f"/v1/sessions/{response.headers['x-parrot-session']}").json
        assert session["name"] == left.pop(0)[2]


@pytest.mark.parametrize("stream", [False, True])
def test_bytes_stay_as_they_are(
    relay: GatewayProcess, upstream: ScriptedUpstream, stream: bool
) -> None:
    if stream:
        events = chat_events(["Hel", "lo"])
        expected, model = b"".join(events), upstream.script(event_stream(*events))
    else:
        expected = json.dumps(chat_document("x"), indent=1).encode()
        model = upstream.script(document(expected))
    fields = {"model": model, "messages": [], "metadata": {"session_id": "bytes"}, "x": 1.50}
    body = json.dumps({**fields, "stream": stream}, indent=3).encode()
    response = relay.ask("POST", CHAT, body, {"X-Session-Id": "bytes"})
    (received,) = upstream.calls(model)
    assert received.body == body
    assert response.body == expected
    assert graph_of(relay, "x-session-id:bytes")["calls"][-1]["state"] == "done"


def test_refusals_of_an_upstream_are_failed_calls(
    relay: GatewayProcess, upstream: ScriptedUpstream
) -> None:
    model = upstream.script(error(400))
    body = {"model": model, "messages": []}
    response = relay.ask("POST", CHAT, body, {"x-session-id": "refused"})
    assert response.status == 400
    unknown = relay.ask("POST", CHAT, {"messages": []}, {"x-session-id": "refused"})
    assert unknown.status == 400
    assert [call["state"] for call in graph_of(relay, "x-session-id:refused")["calls"]] == [
        "failed"
    ]


def test_a_client_that_leaves_cancels_its_call(
    relay: GatewayProcess, upstream: ScriptedUpstream
) -> None:
    gate = upstream.gate()
    role, first, *rest = chat_events(["Hel", "lo"])
    model = upstream.script(event_stream(role, first, gate, *rest))
    body = {"model": model, "messages": [], "stream": True}
    with RawConnection(relay.port) as connection:
        connection.send(connection.request("POST", CHAT, body, {"x-session-id": "leaves"}))
        seen = b""
        while b"Hel" not in seen:
            seen += connection.receive()
        (call,) = graph_of(relay, "x-session-id:leaves")["calls"]
        assert call["state"] == "running"
    wait_until(
        lambda: graph_of(relay, "x-session-id:leaves")["calls"][0]["state"] == "cancelled",
        "the call to be cancelled",
    )
    gate.open()


def test_responses_of_an_upstream_are_one_session(
    relay: GatewayProcess, upstream: ScriptedUpstream
) -> None:
    """From the first that names another, or anything else that names a session."""
    headers: dict[str, str] = {"x-session-id": "chain"}
    previous: dict[str, Any] = {}
    for number in range(3):
        answer = {"id": f"resp_{number}", "object": "response", "output": []}
        model = upstream.script(document(answer))
        body = {"model": model, "input": "x", **previous}
        relay.ask("POST", "/v1/responses", body, headers)
        previous, headers = {"previous_response_id": f"resp_{number}"}, {}
    graph = graph_of(relay, "x-session-id:chain")
    assert [call["name"] for call in graph["calls"]] == ["responses"] * 3


@pytest.mark.parametrize("options", [{}, {"stream": True}, {"background": True}])
def test_responses_of_own_models_are_one_session(
    demo: GatewayProcess, options: dict[str, Any]
) -> None:
    """From the first that names another, or anything else that names a session."""
    client = client_of(demo)
    model = client.models.list().data[0].id

    def respond(**fields: Any) -> str:
        answer: Any = client.responses.create(
            model=model, input="hi", max_output_tokens=3, **fields, **options
        )
        if options.get("stream"):
            return str(list(answer)[-1].response.id)
        if options.get("background"):
            unfinished = ("queued", "in_progress")
            wait_until(
                lambda: client.responses.retrieve(answer.id).status not in unfinished,
                "the response",
            )
        return str(answer.id)

    first = respond()
    second = respond(previous_response_id=first)
    third = respond(previous_response_id=second)
    respond(previous_response_id=third)
    graph = graph_of(demo, f"previous_response_id:{first}")
    assert [(c["name"], c["state"]) for c in graph["calls"]] == [("responses", "done")] * 3
    assert all(call["tokens"] for call in graph["calls"])
    assert graph_of(demo, f"previous_response_id:{third}")["session"] == graph["session"]


def test_a_conversation_is_a_session(demo: GatewayProcess) -> None:
    client = client_of(demo)
    model = client.models.list().data[0].id
    conversation = client.conversations.create(extra_body={"model": model})
    for _ in range(2):
        client.responses.create(
            model=model, input="hi", max_output_tokens=3, conversation=conversation.id
        )
    assert len(graph_of(demo, f"conversation:{conversation.id}")["calls"]) == 2


def test_semantic_calls_join_such_a_session(
    relay: GatewayProcess, upstream: ScriptedUpstream
) -> None:
    headers = {"traceparent": f"00-{'ab' * 16}-00f067aa0ba902b7-00"}
    for fields in ({}, {"parrot": {"output": "o"}}):
        model = upstream.script(document(chat_document("x")))
        relay.ask("POST", CHAT, {"model": model, "messages": [], **fields}, headers)
    assert [call["name"] for call in graph_of(relay, f"traceparent:{'ab' * 16}")["calls"]] == [
        "chat",
        "o",
    ]


def test_the_order_is_a_setting_and_sessions_are_bounded(upstream: ScriptedUpstream) -> None:
    settings = {
        "upstreams": [upstream_settings("scripted", upstream.base_url)],
        "sessions": {"identity": ["header:x-mine"], "max_sessions_per_tenant": 3},
    }
    with GatewayProcess(config=settings) as gateway:
        gateway.ask("POST", "/v1/variables", {"session": "kept", "value": "v"})
        for number in range(8):
            model = upstream.script(document(chat_document("x")))
            headers = {"x-session-id": "no", "x-mine": str(number)}
            response = gateway.ask("POST", CHAT, {"model": model, "messages": []}, headers)
            assert response.status == 200
        listed = gateway.ask("GET", "/v1/sessions").json["data"]
        assert [session["name"] for session in listed] == ["x-mine:7", "x-mine:6", "kept"]
        for number in range(2):
            gateway.ask("POST", "/v1/variables", {"session": f"more-{number}", "value": "v"})
        model = upstream.script(document(chat_document("x")))
        response = gateway.ask("POST", CHAT, {"model": model, "messages": []}, {"x-mine": "9"})
        assert (response.status, response.headers.get("x-parrot-session")) == (200, None)
        recorded = gateway.ask("GET", "/health").json["semantic"]["recorded_calls"]
        assert recorded == {"recorded": 8, "skipped": 1}
