"""`/v1/messages` over upstreams: chats for those that speak OpenAI's API, unchanged otherwise."""

from __future__ import annotations

import json
from typing import Any

import pytest
from harness.message_events import events_of, message_of
from harness.processes import GatewayProcess
from harness.raw_http import RawConnection, Response
from harness.scripted_upstream import (
    DEADLINE_S,
    ScriptedUpstream,
    chat_document,
    chat_events,
    chunk,
    data,
    document,
    error,
    event_stream,
)

PATH = "/v1/messages"
TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
USAGE = {
    "prompt_tokens": 20,
    "completion_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 16},
}


def answer_to(
    relay: GatewayProcess, model: str, headers: dict[str, str] | None = None, **fields: Any
) -> Response:
    body = {
        "model": model,
        "max_tokens": 64,
        "messages": [{"role": "user", "content": "Hello."}],
        **fields,
    }
    return relay.ask("POST", f"{PATH}?beta=true", body, headers)


def check_refusal(response: Response, status: int, kind: str) -> str:
    assert response.status == status
    assert response.json["type"] == "error"
    assert response.json["error"]["type"] == kind
    assert response.json["request_id"] == response.headers["request-id"]
    return str(response.json["error"]["message"])


def test_a_message_becomes_a_chat(relay: GatewayProcess, upstream: ScriptedUpstream) -> None:
    model = upstream.script(document(chat_document("Hi.")))
    response = answer_to(
        relay,
        model,
        {
            "x-api-key": "sk-ant",
            "anthropic-version": "2023-06-01",
            "anthropic-beta": "claude-code-20250219",
        },
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "What is it?"},
                    {
                        "type": "image",
                        "source": {"type": "base64", "media_type": "image/png", "data": "aGk="},
                    },
                    {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}},
                ],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm", "signature": "s"},
                    {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": [1, 2.5]}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "2"}],
            },
        ],
        tools=[TOOL],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        stop_sequences=["END"],
        temperature=0.5,
        metadata={"user_id": "u"},
    )
    assert response.status == 200
    assert response.headers["x-parrot-engine"] == "scripted"
    message = response.json
    assert message["content"] == [{"type": "text", "text": "Hi."}]
    assert (message["model"], message["stop_reason"]) == (model, "end_turn")
    (call,) = upstream.calls(model)
    assert call.target == "/v1/chat/completions"
    assert call.headers["authorization"] == "Bearer sk-ant"
    assert not [name for name in call.headers if name.startswith(("anthropic-", "x-api-key"))]
    assert call.json == {
        "model": model,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "What is it?"},
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}},
                    {"type": "image_url", "image_url": {"url": "https://x/y.png"}},
                ],
            },
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "t1",
                        "type": "function",
                        "function": {"name": "add", "arguments": '{"a":[1,2.5]}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "t1", "content": "2"},
        ],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "add",
                    "description": "Adds.",
                    "parameters": {"type": "object"},
                },
            }
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "max_completion_tokens": 64,
        "temperature": 0.5,
        "stop": ["END"],
        "user": "u",
    }


def test_a_stream(relay: GatewayProcess, upstream: ScriptedUpstream) -> None:
    gate = upstream.gate()
    first, *rest = chat_events(["Hel", "lo"])
    usage = data({"id": "x", "object": "chat.completion.chunk", "choices": [], "usage": USAGE})
    model = upstream.script(event_stream(first, rest[0], gate, *rest[1:-1], usage, rest[-1]))
    body = {
        "model": model,
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "x"}],
        "stream": True,
    }
    with RawConnection(relay.port) as connection:
        connection.send(connection.request("POST", PATH, body))
        # The first piece is there before the upstream writes the second.
        connection.read_until(b'"Hel"')
        gate.open()
        response = connection.read_response()
    (call,) = upstream.calls(model)
    assert (call.json["stream"], call.json["stream_options"]) == (True, {"include_usage": True})
    message = message_of(events_of(response.body))
    assert message["content"] == [{"type": "text", "text": "Hello"}]
    assert message["usage"]["input_tokens"] == 4
    assert message["usage"]["cache_read_input_tokens"] == 16
    assert message["usage"]["output_tokens"] == 5


def test_an_authorization_goes_before_a_key(
    relay: GatewayProcess, upstream: ScriptedUpstream
) -> None:
    model = upstream.script(document(chat_document("Hi.")))
    answer_to(relay, model, {"x-api-key": "one", "authorization": "Bearer two"})
    (call,) = upstream.calls(model)
    assert call.headers["authorization"] == "Bearer two"


@pytest.mark.parametrize("repeats", [False, True])
def test_streamed_tool_calls(
    relay: GatewayProcess, upstream: ScriptedUpstream, repeats: bool
) -> None:
    def piece(index: int, arguments: str, *, begins: bool) -> bytes:
        function: dict[str, Any] = {"arguments": arguments}
        call: dict[str, Any] = {"index": index, "function": function}
        if begins or repeats:
            call |= {"id": f"c{index}", "type": "function"}
            function["name"] = f"f{index}"
        return data(chunk("m", {"tool_calls": [call]}))

    model = upstream.script(
        event_stream(
            data(chunk("m", {"role": "assistant", "content": "Well."})),
            piece(0, "", begins=True),
            piece(0, '{"a":', begins=False),
            piece(0, "1}", begins=False),
            piece(1, "{}", begins=True),
            data(chunk("m", {}, "tool_calls")),
            b"data: [DONE]\n\n",
        )
    )
    message = message_of(events_of(answer_to(relay, model, tools=[TOOL], stream=True).body))
    assert message["content"] == [
        {"type": "text", "text": "Well."},
        {"type": "tool_use", "id": "c0", "name": "f0", "input": {"a": 1}},
        {"type": "tool_use", "id": "c1", "name": "f1", "input": {}},
    ]
    assert message["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("choice", "reason", "sequence"),
    [
        ({"finish_reason": "length"}, "max_tokens", None),
        ({"finish_reason": "content_filter"}, "refusal", None),
        ({"finish_reason": "stop", "stop_reason": "END"}, "stop_sequence", "END"),
        ({"finish_reason": "stop", "matched_stop": "END"}, "stop_sequence", "END"),
        ({"finish_reason": "stop", "stop_reason": 151643}, "end_turn", None),
    ],
)
def test_stop_reasons(
    relay: GatewayProcess,
    upstream: ScriptedUpstream,
    choice: dict[str, Any],
    reason: str,
    sequence: str | None,
) -> None:
    answer = chat_document("Hi.")
    answer["choices"][0].update(choice)
    message = answer_to(relay, upstream.script(document(answer))).json
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (529, "overloaded_error"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_errors_keep_their_status(
    relay: GatewayProcess, upstream: ScriptedUpstream, status: int, kind: str, streamed: bool
) -> None:
    model = upstream.script(error(status))
    response = answer_to(relay, f"once/{model}", stream=streamed)
    assert check_refusal(response, status, kind) == f"scripted {status}"


def test_an_upstream_that_is_not_there(relay: GatewayProcess) -> None:
    message = check_refusal(answer_to(relay, "dead/x"), 502, "api_error")
    assert "'dead' cannot be reached" in message


def test_the_fallback_answers(relay: GatewayProcess, upstream: ScriptedUpstream) -> None:
    upstream.script_listed(document(chat_document("Instead.")))
    message = answer_to(relay, "lame/x").json
    assert message["content"] == [{"type": "text", "text": "Instead."}]


def test_a_stream_that_breaks_off_ends_with_an_error(
    relay: GatewayProcess, upstream: ScriptedUpstream
) -> None:
    model = upstream.script(event_stream(*chat_events(["Hel", "lo"])[:2], cut=True))
    events = events_of(answer_to(relay, f"once/{model}", stream=True).body)
    assert events[0]["type"] == "message_start"
    assert (events[-1]["type"], events[-1]["error"]["type"]) == ("error", "api_error")


def test_a_client_that_leaves_ends_the_upstreams_call(
    relay: GatewayProcess, upstream: ScriptedUpstream
) -> None:
    gate = upstream.gate()
    model = upstream.script(event_stream(*chat_events(["Hel"])[:2], gate))
    body = {"model": model, "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
    with RawConnection(relay.port) as connection:
        connection.send(connection.request("POST", PATH, body | {"stream": True}))
        connection.read_until(b'"Hel"')
    (call,) = upstream.calls(model)
    assert call.aborted.wait(DEADLINE_S)


def test_deferred_messages(relay: GatewayProcess, upstream: ScriptedUpstream) -> None:
    one = upstream.script(event_stream(*chat_events(["fir", "st"])))
    two = upstream.script(document(chat_document("second")))
    session = {"X-Parrot-Session": "deferred-messages"}
    reference = answer_to(relay, one, session | {"X-Parrot-Defer": "true"}).json["content"][0][
        "text"
    ]
    message = answer_to(
        relay, two, session, messages=[{"role": "user", "content": f"Go: {reference}"}]
    )
    assert message.json["content"][0]["text"] == "second"
    assert message.headers["x-parrot-session"]
    (call,) = upstream.calls(two)
    assert call.json["messages"] == [{"role": "user", "content": "Go: first"}]


def count(relay: GatewayProcess, model: str, **fields: Any) -> Response:
    body = {"model": model, "messages": [{"role": "user", "content": "x"}], **fields}
    return relay.ask("POST", f"{PATH}/count_tokens", body)


def test_an_upstream_counts_the_tokens_of_its_models(
    relay: GatewayProcess, upstream: ScriptedUpstream
) -> None:
    model = upstream.script(document({"count": 7, "max_model_len": 10, "tokens": [1] * 7}))
    response = count(relay, model, system="s", tools=[TOOL])
    assert (response.status, response.json) == (200, {"input_tokens": 7})
    (call,) = upstream.calls(model)
    assert call.target == "/tokenize"
    assert [message["role"] for message in call.json["messages"]] == ["system", "user"]
    assert call.json["tools"][0]["function"]["name"] == "add"
    assert call.json["add_generation_prompt"] is True
    begun = {"role": "assistant", "content": "I"}
    assert count(relay, model, messages=[{"role": "user", "content": "x"}, begun]).status == 200
    assert upstream.calls(model)[1].json["continue_final_message"] is True


def test_or_those_of_messages(relay: GatewayProcess, upstream: ScriptedUpstream) -> None:
    model = upstream.script(error(404), document({"input_tokens": 9}))
    response = count(relay, model, system="s")
    assert (response.status, response.json) == (200, {"input_tokens": 9})
    assert [call.target for call in upstream.calls(model)] == ["/tokenize", f"{PATH}/count_tokens"]
    assert upstream.calls(model)[1].json["system"] == "s"


@pytest.mark.parametrize("answer", [error(404), error(400), document({}), document(b"no JSON")])
def test_nobody_counts_tokens_of_other_models(
    relay: GatewayProcess, upstream: ScriptedUpstream, answer: Any
) -> None:
    message = check_refusal(count(relay, upstream.script(answer)), 400, "invalid_request_error")
    assert "tokenizer" in message
    assert "/tokenize answered" in message
    assert "vLLM" in message


# -- upstreams that speak it ------------------------------------------------------------------

MESSAGE = b'{"id": "msg_1",  "type":"message", "content": [], "usage": {"input_tokens": 3}}'
EVENTS = (
    b'event: message_start\ndata: {"type": "message_start", "message": {}}\n\n'
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
)


def claude(
    relay: GatewayProcess, body: bytes, path: str = PATH, headers: dict[str, str] | None = None
) -> Response:
    with RawConnection(relay.port) as connection:
        given = {"content-type": "application/json", "anthropic-beta": "b", **(headers or {})}
        return connection.ask("POST", f"{path}?beta=true", body, given)


@pytest.mark.parametrize("path", [PATH, f"{PATH}/count_tokens"])
def test_requests_and_answers_pass_unchanged(
    relay: GatewayProcess, upstream: ScriptedUpstream, path: str
) -> None:
    model = upstream.script(document(MESSAGE, headers={"request-id": "req_theirs"}))
    body = b'{"model": "claude/%s",  "messages": [{"content": 1.0e0}]}' % model.encode()
    response = claude(relay, body, path)
    assert (response.status, response.body) == (200, MESSAGE)
    assert response.headers["request-id"] == "req_theirs"
    (call,) = upstream.calls(model)
    assert call.target == f"{path}?beta=true"
    assert call.json == {"model": model, "messages": [{"content": 1.0}]}
    assert b'{"content": 1.0e0}' in call.body
    assert (call.headers["anthropic-beta"], call.headers["anthropic-version"]) == (
        "b",
        "2023-06-01",
    )


def test_streams_pass_unchanged(relay: GatewayProcess, upstream: ScriptedUpstream) -> None:
    model = upstream.script(event_stream(EVENTS))
    response = claude(relay, json.dumps({"model": f"claude/{model}", "stream": True}).encode())
    assert response.body == EVENTS


def test_a_stream_passed_on_that_breaks_off(
    relay: GatewayProcess, upstream: ScriptedUpstream
) -> None:
    start, _, _ = EVENTS.partition(b"event: message_stop")
    model = upstream.script(event_stream(start, cut=True))
    response = claude(relay, json.dumps({"model": f"claude/{model}", "stream": True}).encode())
    assert [event["type"] for event in events_of(response.body)] == ["message_start", "error"]


def test_semantic_fields_have_no_place_there(
    relay: GatewayProcess, upstream: ScriptedUpstream
) -> None:
    model = upstream.script(document(MESSAGE))
    body = json.dumps({"model": f"claude/{model}"}).encode()
    response = claude(relay, body, headers={"X-Parrot-Output": "x"})
    assert "unchanged" in check_refusal(response, 400, "invalid_request_error")
    assert upstream.calls(model) == []


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("thinking", ["adaptive", "disabled"])
def test_reasoning_becomes_thinking(
    relay: GatewayProcess, upstream: ScriptedUpstream, field: str, stream: bool, thinking: str
) -> None:
    usage = {**USAGE, "completion_tokens_details": {"reasoning_tokens": 3}}
    if stream:
        deltas = [{"role": "assistant"}, {field: "Wh"}, {field: "y?"}, {"content": "So."}]
        events = [data(chunk("m", delta)) for delta in deltas]
        events.append(data({**chunk("m", {}, "stop"), "usage": usage}))
        script = event_stream(*events, b"data: [DONE]\n\n")
    else:
        whole = chat_document("So.")
        whole["choices"][0]["message"][field] = "Why?"
        script = document({**whole, "usage": usage})
    model = upstream.script(script, document(chat_document("Ok.")))
    response = answer_to(relay, model, stream=stream, thinking={"type": thinking})
    message = message_of(events_of(response.body)) if stream else response.json
    *thoughts, text = message["content"]
    assert text == {"type": "text", "text": "So."}
    assert message["usage"]["output_tokens_details"] == {"thinking_tokens": 3}
    if thinking == "disabled":
        assert not thoughts
        return
    assert [block["thinking"] for block in thoughts] == ["Why?"]
    other = {"type": "thinking", "thinking": "Of another server", "signature": "s"}
    turn = {"role": "assistant", "content": [other, *thoughts, text]}
    asked = [{"role": "user", "content": text} for text in "?!"]
    answer_to(relay, model, messages=[asked[0], turn, asked[1]])
    assert upstream.calls(model)[-1].json["messages"][1] == {
        "role": "assistant",
        "content": "So.",
        "reasoning_content": "Why?",
    }


def test_names_of_tools_are_checked_for_upstreams_too(
    relay: GatewayProcess, upstream: ScriptedUpstream
) -> None:
    model = upstream.script(document(chat_document("x")))
    assert answer_to(relay, model, tools=[{**TOOL, "name": "n" * 128}]).status == 200
    response = answer_to(relay, model, tools=[{**TOOL, "name": "n" * 129}])
    assert "tools[0].name" in check_refusal(response, 400, "invalid_request_error")
