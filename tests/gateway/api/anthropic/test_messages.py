"""`POST /v1/messages` and `/v1/messages/count_tokens` on an engine of our own, through a socket."""

from __future__ import annotations

import json
from typing import Any

import pytest
from harness.gateway.responding import prompt_of, sampling_of
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.serving import HI, Service
from harness.message_events import events_of, message_of
from parrot_engine.protocol import Failed, Generate

USAGE = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "service_tier": "standard"}


async def refusal(service: Service, path: str = "/v1/messages", **body: Any) -> tuple[int, str]:
    """Status and message of a request that is refused."""
    whole = {"model": "m", "messages": HI, "max_tokens": 16, **body}
    fields = {name: value for name, value in whole.items() if value is not None}
    status, headers, answer = await service.post(path, fields)
    decoded = json.loads(answer)
    assert decoded["type"] == "error"
    assert decoded["request_id"].encode() == headers[b"request-id"] == headers[b"x-request-id"]
    assert status == 400
    assert decoded["error"]["type"] == "invalid_request_error"
    return status, decoded["error"]["message"]


async def stream(service: Service, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream."""
    status, headers, answer = await service.post(
        "/v1/messages", {"model": "m", "messages": HI, "max_tokens": 16, "stream": True, **body}
    )
    assert status == 200, answer
    assert headers[b"content-type"] == b"text/event-stream; charset=utf-8"
    return events_of(answer)


async def test_answer_shape(service: Service) -> None:
    answer = await service.message(model="any")
    assert answer.pop("id").startswith("msg_")
    assert answer["usage"].pop("input_tokens") > 0
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "any",
        "content": [{"type": "text", "text": "Hello world"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {**USAGE, "output_tokens": 3},
    }


async def test_stream(service: Service) -> None:
    whole = await service.message()
    events = await stream(service)
    names = [event["type"] for event in events]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert events[0]["message"]["usage"] == {**whole["usage"], "output_tokens": 0}
    assert names.count("content_block_delta") > 1
    message = message_of(events)
    assert message.pop("id").startswith("msg_")
    del whole["id"]
    assert message == whole


@pytest.mark.parametrize("streamed", [False, True])
async def test_stop_reasons(service: Service, streamed: bool) -> None:
    async def stop(**body: Any) -> tuple[str, str | None]:
        if streamed:
            found = message_of(await stream(service, **body))
        else:
            found = await service.message(**body)
        return found["stop_reason"], found["stop_sequence"]

    assert await stop(max_tokens=1) == ("max_tokens", None)
    assert await stop(stop_sequences=["never", " wor"]) == ("stop_sequence", " wor")
    assert await stop(stop_sequences=[]) == ("end_turn", None)


async def test_a_message_of_no_tokens_fills_the_cache(
    service: Service, engine: ScriptedRemoteEngine
) -> None:
    answer = await service.message(max_tokens=0)
    assert (answer["content"], answer["stop_reason"]) == ([], "max_tokens")
    assert not [item for item in engine.submitted if isinstance(item, Generate)]
    streamed = message_of(await stream(service, max_tokens=0))
    assert (streamed["content"], streamed["stop_reason"]) == ([], "max_tokens")


async def test_the_prompt_is_that_of_the_same_chat(
    service: Service, engine: ScriptedRemoteEngine
) -> None:
    await service.message(
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=8f1a2;"},
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Be kind."},
        ],
        messages=[
            {"role": "user", "content": "One"},
            {"role": "user", "content": [{"type": "text", "text": "Two"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "d"},
                    {"type": "text", "text": "Three"},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "document",
                        "source": {"type": "text", "media_type": "text/plain", "data": "Four"},
                    }
                ],
            },
        ],
    )
    mine = prompt_of(engine)
    chat = [
        {"role": "system", "content": "Be brief.\nBe kind."},
        {"role": "user", "content": "One\nTwo"},
        {"role": "assistant", "content": "Three"},
        {"role": "user", "content": "Four"},
    ]
    await service.post("/v1/chat/completions", {"model": "m", "messages": chat})
    assert prompt_of(engine) == mine


async def test_a_final_answer_is_continued(service: Service, engine: ScriptedRemoteEngine) -> None:
    await service.message(messages=[*HI, {"role": "assistant", "content": "The answer is"}])
    assert prompt_of(engine).endswith("The answer is")


async def test_sampling(service: Service, engine: ScriptedRemoteEngine) -> None:
    stop = ["a1", "b2", "c3", "d4", "e5"]
    await service.message(temperature=0.5, top_p=0.25, top_k=7, max_tokens=5, stop_sequences=stop)
    found = sampling_of(engine)
    assert (found.temperature, found.top_p, found.top_k) == (0.5, 0.25, 7)
    assert (found.max_tokens, found.stop) == (5, tuple(stop))


async def test_fields_that_ask_for_nothing_missing_are_taken(service: Service) -> None:
    answer = await service.message(
        metadata={"user_id": "user_" + "x" * 200},
        thinking={"type": "enabled", "budget_tokens": 1024},
        service_tier="auto",
        context_management={"edits": []},
        output_config={"effort": "medium"},
        mcp_servers=[],
    )
    assert answer["content"][0]["text"] == "Hello world"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"max_tokens": None}, "'max_tokens'"),
        ({"max_tokens": -1}, "'max_tokens'"),
        ({"messages": None}, "'messages'"),
        ({"messages": []}, "'messages'"),
        ({"model": None}, "'model'"),
        ({"temperature": 1.5}, "'temperature'"),
        ({"stop_sequences": [""]}, "'stop_sequences'"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "'messages[0].role'"),
        ({"messages": [{"role": "user"}]}, "'messages[0].content'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].type: Unsupported value: content of type 'image'",
        ),
        (
            {"messages": [*HI, {"role": "user", "content": [{"type": "tool_result"}]}]},
            "'messages[1].content[0].tool_use_id'",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "'tools[0].input_schema'"),
        ({"tools": [{"name": "no name", "input_schema": {}}]}, "'tools[0].name'"),
        ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "'tools[0].input_schema'"),
        ({"tool_choice": {"type": "perhaps"}}, "'tool_choice.type'"),
        ({"tool_choice": {"type": "tool"}}, "'tool_choice.name'"),
        ({"output_config": {"format": {"type": "xml"}}}, "'output_config.format.type'"),
        ({"mcp_servers": [{"url": "https://x"}]}, "'mcp_servers'"),
        ({"max_tokens": 100_000}, "maximum context length"),
    ],
)
async def test_refusals_name_the_field(service: Service, body: dict[str, Any], says: str) -> None:
    _, message = await refusal(service, **body)
    assert says in message


async def test_errors_have_anthropics_shape(service: Service) -> None:
    status, _, answer = await service.post("/v1/messages", b"{")
    assert (status, json.loads(answer)["error"]["type"]) == (400, "invalid_request_error")
    reader, writer = await service.connect()
    writer.write(b"GET /v1/messages?beta=true HTTP/1.1\r\nHost: x\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 405")
    assert (await reader.readexactly(16)) == b'{"type":"error",'
    writer.close()


async def test_count_tokens(service: Service) -> None:
    body = {"system": "Be brief.", "messages": HI}
    status, _, answer = await service.post(
        "/v1/messages/count_tokens?beta=true", {"model": "m", **body}
    )
    assert status == 200
    used = (await service.message(**body))["usage"]["input_tokens"]
    assert json.loads(answer) == {"input_tokens": used}
    _, message = await refusal(service, "/v1/messages/count_tokens", messages=None)
    assert "'messages'" in message


async def test_tokens_are_counted_beyond_the_context(service: Service) -> None:
    status, _, answer = await service.post(
        "/v1/messages/count_tokens",
        {"model": "m", "messages": [{"role": "user", "content": "word " * 20_000}]},
    )
    assert status == 200
    assert json.loads(answer)["input_tokens"] > 20_000


async def test_failure_in_mid_stream(service: Service, engine: ScriptedRemoteEngine) -> None:
    words = engine.text("Hello", end=False)
    engine.script = lambda prompt, sampling: [*words, Failed(0, "numerical_error", "secret path")]
    events = await stream(service)
    assert [event["type"] for event in events][-2:] == ["content_block_delta", "error"]
    error = events[-1]["error"]
    assert error["type"] == "api_error"
    assert "not a number" in error["message"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_failure_before_the_first_text(
    service: Service, engine: ScriptedRemoteEngine, streamed: bool
) -> None:
    engine.script = lambda prompt, sampling: [Failed(0, "overloaded", "too much")]
    status, headers, answer = await service.post(
        "/v1/messages", {"model": "m", "messages": HI, "max_tokens": 16, "stream": streamed}
    )
    assert status == 503
    assert json.loads(answer)["error"] == {"type": "overloaded_error", "message": "too much"}
    assert headers[b"retry-after"] == b"1"
