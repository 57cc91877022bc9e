"""Semantic variables over `/v1/messages`, on an engine of our own."""

from __future__ import annotations

import json
from typing import Any

import pytest
from harness.gateway.semantic_tools import Http
from harness.message_events import events_of, message_of

PATH = "/v1/messages"


async def ask(http: Http, text: str, headers: dict[str, str], **fields: Any) -> Any:
    body = {
        "model": "m",
        "max_tokens": 200,
        "messages": [{"role": "user", "content": [{"type": "text", "text": text}]}],
        **fields,
    }
    return await http.post(PATH, json=body, headers=headers)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_deferred_message_feeds_another(http: Http, streamed: bool) -> None:
    session = {"X-Parrot-Session": "story"}
    first = await ask(http, "a", session | {"X-Parrot-Defer": "true"}, stream=streamed)
    assert first.status_code == 200
    message = message_of(events_of(first.content)) if streamed else first.json()
    assert (message["stop_reason"], message["usage"]["output_tokens"]) == ("end_turn", 0)
    (block,) = message["content"]
    second = await ask(http, "b " + block["text"], session)
    assert second.headers["x-parrot-session"] == first.headers["x-parrot-session"]
    assert second.json()["content"][0]["text"] == "<user\nb <user\na\nassistant\n>\nassistant\n>"


async def test_inputs_and_outputs_by_name(http: Http) -> None:
    session = {"X-Parrot-Session": "names"}
    made = await ask(http, "a", session | {"X-Parrot-Output": "one"})
    assert (await http.value(made.headers["x-parrot-variable"])).json()["value"] == (
        made.json()["content"][0]["text"]
    )
    read = await ask(http, "{{x}}!", {}, parrot={"session": "names", "inputs": {"x": "one"}})
    assert read.json()["content"][0]["text"] == "<user\n<user\na\nassistant\n>!\nassistant\n>"


async def test_a_kept_context(http: Http) -> None:
    fields = {"X-Parrot-Session": "kept", "X-Parrot-Context": "chat"}
    first = (await ask(http, "a", fields)).json()["content"][0]["text"]
    second = (await ask(http, "b", fields)).json()["content"][0]["text"]
    assert second == f"<user\na\nassistant\n{first}\nuser\nb\nassistant\n>"


async def test_a_session_named_by_its_client_is_recorded(http: Http) -> None:
    answer = await ask(http, "a", {"x-session-id": "run-7"})
    assert answer.status_code == 200
    assert answer.headers["x-parrot-session"]
    assert answer.headers["x-parrot-call"].startswith("call_")


async def test_unknown_fields_of_ours_are_refused_in_its_shape(http: Http) -> None:
    unknown = await ask(http, "x", {"X-Parrot-Nothing": "1"})
    assert unknown.status_code == 400
    assert json.loads(unknown.content)["error"]["type"] == "invalid_request_error"
    assert "X-Parrot-Nothing" in unknown.json()["error"]["message"]


async def test_tools_are_not_deferred(http: Http) -> None:
    tool = {"name": "f", "input_schema": {"type": "object"}}
    refused = await ask(http, "x", {"X-Parrot-Defer": "true"}, tools=[tool])
    assert refused.status_code == 400
    assert refused.json()["type"] == "error"
