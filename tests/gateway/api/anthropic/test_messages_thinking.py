"""Thinking in `/v1/messages`: asked for, shown, streamed and brought back, on own engines."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest
from harness.gateway.responding import prompt_of
from harness.gateway.serving import HI, Service, serving
from harness.gateway.thinker import TEMPLATE, thinker
from harness.message_events import events_of, message_of

ADAPTIVE = {"type": "adaptive"}
THOUGHT = "<think>\nWhy? €\n</think>\n\nSo."
CLOSED = "assistant\n<think>\n\n</think>\n\n"


async def post(service: Service, **body: Any) -> tuple[dict[str, Any], dict[bytes, bytes]]:
    status, headers, answer = await service.post(
        "/v1/messages", {"model": "m", "messages": HI, "max_tokens": 400, **body}
    )
    assert status == 200, answer
    if body.get("stream"):
        return message_of(events_of(answer)), headers
    return json.loads(answer), headers


async def refusal(service: Service, **body: Any) -> str:
    status, _, answer = await service.post(
        "/v1/messages", {"model": "m", "messages": HI, "max_tokens": 400, **body}
    )
    decoded = json.loads(answer)
    assert (status, decoded["error"]["type"]) == (400, "invalid_request_error")
    message: str = decoded["error"]["message"]
    return message


@pytest.mark.parametrize("stream", [False, True])
async def test_it_is_a_block_before_the_text(stream: bool) -> None:
    async with serving(thinker(THOUGHT)) as service:
        message, _ = await post(service, thinking=ADAPTIVE, stream=stream)
    thinking, text = message["content"]
    assert thinking.pop("signature")
    assert thinking == {"type": "thinking", "thinking": "\nWhy? €\n"}
    assert text == {"type": "text", "text": "So."}
    assert message["stop_reason"] == "end_turn"
    usage = message["usage"]
    assert 0 < usage["output_tokens_details"]["thinking_tokens"] <= usage["output_tokens"]


@pytest.mark.parametrize("stream", [False, True])
async def test_one_that_is_cut(stream: bool) -> None:
    async with serving(thinker("<think>Why? I never")) as service:
        message, _ = await post(service, thinking=ADAPTIVE, stream=stream, max_tokens=12)
    (thinking,) = message["content"]
    assert "Why? I never".startswith(thinking["thinking"])
    assert message["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("stream", [False, True])
async def test_omitted_it_comes_back_all_the_same(stream: bool) -> None:
    engine = thinker(THOUGHT)
    async with serving(engine) as service:
        omitted = {**ADAPTIVE, "display": "omitted"}
        message, _ = await post(service, thinking=omitted, stream=stream)
        assert message["content"][0]["thinking"] == ""
        more = [*HI, {"role": "assistant", "content": message["content"]}, *HI]
        await post(service, messages=more, thinking=omitted)
    assert "[\nWhy? €\n]So." in prompt_of(engine)


async def test_history_reaches_the_template() -> None:
    engine = thinker(THOUGHT)
    blocks = [
        {"type": "thinking", "thinking": "One", "signature": "of another server"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "thinking", "thinking": "Two", "signature": "s"},
        {"type": "text", "text": "Three"},
    ]
    async with serving(engine) as service:
        await post(service, messages=[*HI, {"role": "assistant", "content": blocks}, *HI])
    assert "[One\nTwo]Three" in prompt_of(engine)


@pytest.mark.parametrize("fields", [{}, {"thinking": {"type": "disabled"}}])
@pytest.mark.parametrize("stream", [False, True])
async def test_without_it_the_model_does_not_think(fields: dict[str, Any], stream: bool) -> None:
    engine = thinker("So.")
    async with serving(engine) as service:
        message, _ = await post(service, stream=stream, **fields)
    assert message["content"] == [{"type": "text", "text": "So."}]
    assert prompt_of(engine).endswith(CLOSED)


async def test_switches_of_templates_are_set() -> None:
    engine = thinker(THOUGHT)
    async with serving(engine) as service:
        await post(service, thinking=ADAPTIVE)
    assert prompt_of(engine).endswith("ON")


async def test_a_budget_is_told_to_templates_that_know_one() -> None:
    enabled = {"type": "enabled", "budget_tokens": 2000}
    async with serving(thinker(THOUGHT)) as service:
        _, headers = await post(service, thinking=enabled)
        assert headers[b"x-parrot-ignored"] == b"thinking.budget_tokens"
    engine = thinker(THOUGHT, TEMPLATE.replace("'ON'", "'B%s' % thinking_budget"))
    async with serving(engine) as service:
        _, headers = await post(service, thinking=enabled)
        assert b"x-parrot-ignored" not in headers
    assert prompt_of(engine).endswith("B2000")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": "x"}}, "thinking.budget_tokens"),
        ({"thinking": {**ADAPTIVE, "display": "loud"}}, "thinking.display"),
        ({"thinking": {}}, "thinking.type"),
        ({"thinking": "on"}, "thinking"),
        ({"thinking": ADAPTIVE, "output_config": {"effort": "huge"}}, "output_config.effort"),
    ],
)
async def test_refusals_name_the_field(fields: dict[str, Any], named: str) -> None:
    async with serving(thinker(THOUGHT)) as service:
        assert named in await refusal(service, **fields)


async def test_tools_are_called_behind_it() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    tool = {"name": "f", "input_schema": {"type": "object"}}
    for stream in (False, True):
        async with serving(thinker(f"<think>{call}</think>{call}")) as service:
            message, _ = await post(service, thinking=ADAPTIVE, tools=[tool], stream=stream)
        thinking, use = message["content"]
        assert (thinking["thinking"], use["type"]) == (call, "tool_use")
        assert message["stop_reason"] == "tool_use"


async def test_the_client_reads_it_and_sends_it_back() -> None:
    engine = thinker(THOUGHT)
    async with serving(engine) as service:
        client = anthropic.AsyncAnthropic(
            base_url=service.root, api_key="none", max_retries=0, _strict_response_validation=True
        )
        fields: Any = {"model": "m", "max_tokens": 400, "thinking": ADAPTIVE}
        async with client, client.messages.stream(messages=HI, **fields) as stream:  # type: ignore[arg-type]
            kinds = [event.type async for event in stream]
            message = await stream.get_final_message()
            assert kinds.index("thinking") < kinds.index("signature") < kinds.index("text")
            thinking = message.content[0]
            assert isinstance(thinking, anthropic.types.ThinkingBlock)
            assert thinking.thinking == "\nWhy? €\n"
            assert thinking.signature
            messages: Any = [*HI, message.to_param(), *HI]
            again = await client.messages.create(messages=messages, **fields)
    assert again.content[0].type == "thinking"
    assert "[\nWhy? €\n]So." in prompt_of(engine)
