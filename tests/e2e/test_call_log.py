"""The line that a call leaves in the log: real processes, JSON."""

from __future__ import annotations

import json
from typing import Any

from harness.processes import GatewayProcess, wait_until
from harness.raw_http import Response, chat_body
from harness.scripted_upstream import ScriptedUpstream, chat_document, document

from parrot_gateway.telemetry.logs import CALL_FIELDS, COMMON_FIELDS

PROMPT = "a text that is nobody's business"


def logged(relay: GatewayProcess, model: str, **fields: Any) -> tuple[Response, dict[str, Any]]:
    """The answer to a chat, and the line of that call."""
    response = relay.ask(
        "POST", "/v1/chat/completions", chat_body(model, PROMPT, **fields),
        {"authorization": "Bearer sk-not-for-the-log"},
    )  # fmt: skip
    id_ = response.headers["x-request-id"]
    wait_until(lambda: id_ in relay.stderr(), "the call is in the log")
    (line,) = (line for line in relay.stderr().splitlines() if id_ in line)
    fields = json.loads(line)
    assert set(fields) <= {*CALL_FIELDS, *COMMON_FIELDS}
    assert fields["logger"] == "parrot_gateway.calls"
    return response, fields


def test_a_call_is_one_line(relay: GatewayProcess, upstream: ScriptedUpstream) -> None:
    model = upstream.script(document(chat_document()))
    _, line = logged(relay, model)
    assert (line["level"], line["event"], line["status"]) == ("info", "call", 200)
    assert (line["path"], line["engine"]) == ("/v1/chat/completions", "scripted")
    assert (line["prompt_tokens"], line["output_tokens"]) == (3, 2)
    assert 0 <= line["prepared_ms"] <= line["first_token_ms"] <= line["duration_ms"]
    assert "error_message" not in line
    # Every line is JSON, and none tells prompts and keys.
    log = relay.stderr()
    assert all(json.loads(line)["event"] for line in log.splitlines())
    assert PROMPT not in log
    assert "sk-not-for-the-log" not in log


def test_the_log_is_json_where_nothing_can_be_served() -> None:
    with GatewayProcess(
        config={"models": ["/nowhere/at-all"], "telemetry": {"log_format": "json"}}, wait=False
    ) as gateway:
        assert gateway.wait() == 1
        lines = [json.loads(line) for line in gateway.stderr().splitlines()]
    assert lines[-1]["event"] == "Nothing can be served; stopping."
    assert lines[-1]["level"] == "error"
