"""JSON that was closed near `max_tokens` is told from JSON that a model ended itself."""

from __future__ import annotations

import json
from typing import Any

import pytest
from harness.message_events import events_of as message_events
from harness.message_events import message_of
from harness.processes import DEMO_MODEL, GatewayProcess
from harness.raw_http import RawConnection

ENDLESS = {
    "type": "object",
    "properties": {
        "a": {"type": "array", "minItems": 3, "items": {"type": "string", "minLength": 9}}
    },
    "required": ["a"],
    "additionalProperties": False,
}
SHORT = {"enum": ["yes", "no"]}
CLOSED = {"type": "max_tokens"}
CHAT = [{"role": "user", "content": "Hi"}]


def ask(demo: GatewayProcess, path: str, schema: dict[str, Any], stream: bool) -> dict[str, Any]:
    """The answer, or what its stream comes to: `text`, `reason`, `details`."""
    body: dict[str, Any] = {"model": DEMO_MODEL, "stream": stream, "max_tokens": 60}
    named = {"name": "n", "schema": schema}
    if path == "responses":
        del body["max_tokens"]
        body |= {"input": "Hi", "max_output_tokens": 60, "temperature": 0}
        body["text"] = {"format": {"type": "json_schema", **named}}
    elif path == "messages":
        body |= {"messages": CHAT, "output_config": {"format": {"type": "json_schema", **named}}}
    else:
        body |= {"messages": CHAT} if path == "chat/completions" else {"prompt": "Hi"}
        body["response_format"] = {"type": "json_schema", "json_schema": named}
    with RawConnection(demo.port) as connection:
        key = {"Authorization": f"Bearer {demo.api_key}"}
        response = connection.ask("POST", f"/v1/{path}", body, key)
    assert response.status == 200, response.body
    if path == "messages":
        whole = message_of(message_events(response.body)) if stream else response.json
        text = whole["content"][0]["text"]
        return {
            "text": text,
            "reason": whole["stop_reason"],
            "details": whole.get("finish_details"),
        }
    events = [
        json.loads(line.removeprefix("data: "))
        for line in response.body.decode().splitlines()
        if line.startswith("data: {")
    ]
    if path == "responses":
        whole = events[-1]["response"] if stream else response.json
        text = whole["output"][0]["content"][0]["text"]
        return {"text": text, "reason": whole["status"], "details": whole.get("finish_details")}
    choices = [event["choices"][0] for event in events] if stream else response.json["choices"]
    parts = [choice.get("delta", choice.get("message", choice)) for choice in choices]
    field = "content" if path == "chat/completions" else "text"
    last = choices[-1]
    assert all("finish_details" not in choice for choice in choices[:-1])
    return {
        "text": "".join(part.get(field) or "" for part in parts),
        "reason": last["finish_reason"],
        "details": last.get("finish_details"),
    }


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses", "messages"])
@pytest.mark.parametrize("stream", [False, True])
def test_it_is_told(demo: GatewayProcess, path: str, stream: bool) -> None:
    ends = {"responses": "completed", "messages": "end_turn"}
    closed = ask(demo, path, ENDLESS, stream)
    assert (closed["reason"], closed["details"]) == (ends.get(path, "stop"), CLOSED)
    assert len(json.loads(closed["text"])["a"]) >= 3
    own = ask(demo, path, SHORT, stream)
    assert (own["reason"], own["details"]) == (ends.get(path, "stop"), None)
    assert json.loads(own["text"]) in ("yes", "no")
