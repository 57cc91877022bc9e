"""Fields that `/v1/responses` refuses by name, and fields that it lets pass."""

from __future__ import annotations

import json
from typing import Any

import pytest
from harness.gateway.responding import get, refused
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.serving import Service


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"input": None}, "input", "missing_required_parameter"),
        ({"input": []}, "input", "missing_required_parameter"),
        ({"input": 5}, "input", "invalid_type"),
        ({"input": [{"content": "x"}]}, "input[0].role", "missing_required_parameter"),
        ({"input": [{"role": "user"}]}, "input[0].content", "missing_required_parameter"),
        ({"input": [{"role": "wolf", "content": "x"}]}, "input[0].role", "invalid_value"),
        ({"input": [{"role": "user", "content": []}]}, "input[0].content", "empty_array"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
            "unsupported_value",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
            "input[0].content[0].text",
            "missing_required_parameter",
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]},
            "input[0].call_id",
            "invalid_value",
        ),
        ({"background": True, "store": False}, "store", "invalid_value"),
        ({"tools": [{"type": "web_search"}]}, "tools", "unsupported_parameter"),
        ({"tools": 5}, "tools", "invalid_type"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format", "unsupported_value"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "unsupported_value"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "unsupported_parameter"),
        ({"moderation": {"model": "x"}}, "moderation", "unsupported_parameter"),
        (
            {"context_management": [{"type": "compaction"}]},
            "context_management",
            "unsupported_parameter",
        ),
        ({"max_tokens": 5}, "max_tokens", "unsupported_parameter"),
        ({"n": 2}, "n", "unsupported_parameter"),
        ({"max_output_tokens": 0}, "max_output_tokens", "integer_below_min_value"),
        ({"temperature": 3}, "temperature", "decimal_above_max_value"),
        ({"top_logprobs": 21}, "top_logprobs", "integer_above_max_value"),
        ({"truncation": "middle"}, "truncation", "invalid_value"),
        ({"include": ["everything"]}, "include[0]", "invalid_value"),
        ({"metadata": {"a": "x" * 513}}, "metadata", "string_above_max_length"),
        ({"metadata": {"a": 1}}, "metadata", "invalid_type"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "invalid_value"),
        ({"parrot": {"output": "x"}}, "parrot", "unsupported_parameter"),
        ({"input": "x" * 600}, "input", "context_length_exceeded"),
        ({"max_output_tokens": 510}, "max_output_tokens", "context_length_exceeded"),
        (
            {"previous_response_id": "resp_1", "conversation": "conv_1"},
            "previous_response_id",
            "mutually_exclusive_parameters",
        ),
    ],
)
async def test_refusals(
    service: Service, engine: ScriptedRemoteEngine, body: dict[str, Any], param: str, code: str
) -> None:
    found = await refused(service, **body)
    assert found["status"] == 400
    assert found["code"] == code
    assert (found["param"] or "").startswith(param)
    assert engine.submitted == []


async def test_harmless_fields_pass(service: Service) -> None:
    answer = await service.respond(
        background=False,
        tools=[{"type": "function", "name": "f", "parameters": {}, "strict": True}],
        tool_choice="none",
        text={"format": {"type": "text"}, "verbosity": "medium"},
        include=["reasoning.encrypted_content"],
        reasoning={"effort": "low", "summary": "auto"},
        service_tier="auto",
        stream_options=None,
        truncation="disabled",
    )
    assert answer["tools"][0]["name"] == "f"
    assert answer["reasoning"]["effort"] == "low"


async def test_unknown_routes(service: Service) -> None:
    assert (await get(service, "/v1/responses"))[0] == 404
    assert (await get(service, "/v1/responses/input_tokens"))[0] == 404
    status, _, body = await service.post("/v1/responses", {"input": "x"})
    assert (status, json.loads(body)["error"]["param"]) == (400, "model")
    status, body = await get(service, "/v1/conversations/conv_1")
    assert (status, json.loads(body)["error"]["code"]) == (404, "conversation_not_found")
