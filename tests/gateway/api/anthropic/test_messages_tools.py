"""Tools of a message on an engine of our own: what the model is told, what its text becomes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from harness.gateway.responding import prompt_of
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.serving import HI, Service, serving
from harness.gateway.tool_calling import SCHEMA, TEMPLATES, TEXTS, grammar_of, says, tool_engine
from harness.message_events import events_of, message_of

ADD = {"name": "add", "description": "Adds two numbers.", "input_schema": SCHEMA}
NOW = {"type": "custom", "name": "now", "input_schema": {"type": "object"}}
TWO_CALLS = (
    'Let me see. <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)


async def ask(service: Service, *, streamed: bool = False, **body: Any) -> dict[str, Any]:
    whole = {"model": "m", "messages": HI, "max_tokens": 200, "tools": [ADD, NOW], **body}
    status, _, answer = await service.post("/v1/messages", whole | {"stream": streamed})
    assert status == 200, answer
    return message_of(events_of(answer)) if streamed else dict(json.loads(answer))


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("format", sorted(TEMPLATES))
async def test_each_way_of_writing_calls(format: str, streamed: bool) -> None:
    engine = tool_engine(TEXTS[format], TEMPLATES[format])
    async with serving(engine) as service:
        message = await ask(service, streamed=streamed)
        (block,) = message["content"]
        assert block.pop("id").startswith("call_")
        assert block == {"type": "tool_use", "name": "add", "input": {"a": 1}}
        assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)


@pytest.mark.parametrize("streamed", [False, True])
@says(TWO_CALLS)
async def test_text_and_several_calls(telling: tuple[Service, Any], streamed: bool) -> None:
    message = await ask(telling[0], streamed=streamed)
    text, *calls = message["content"]
    assert (text["type"], text["text"].strip()) == ("text", "Let me see.")
    assert [(call["name"], call["input"]) for call in calls] == [("add", {"a": 1}), ("now", {})]
    assert len({call["id"] for call in calls}) == 2
    assert message["stop_reason"] == "tool_use"


@says('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 23456789}}\n</tool_call>')
async def test_a_call_that_is_cut_short(telling: tuple[Service, Any]) -> None:
    message = await ask(telling[0], max_tokens=55)
    assert message["stop_reason"] == "max_tokens"
    (block,) = message["content"]
    assert (block["name"], block["input"]) == ("add", {})


@pytest.mark.parametrize(
    ("choice", "same"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        (
            {"type": "any", "disable_parallel_tool_use": True},
            {"tool_choice": "required", "parallel_tool_calls": False},
        ),
        (
            {"type": "tool", "name": "now"},
            {"tool_choice": {"type": "function", "function": {"name": "now"}}},
        ),
        ({"type": "none"}, {"tool_choice": "none"}),
    ],
    ids=str,
)
@says(TEXTS["hermes"], TEMPLATES["hermes"])
async def test_choices_are_those_of_a_chat(
    telling: tuple[Service, ScriptedRemoteEngine], choice: dict[str, Any], same: dict[str, Any]
) -> None:
    service, engine = telling
    await ask(service, tool_choice=choice)
    mine = prompt_of(engine), grammar_of(engine)
    functions = [
        {"name": "add", "parameters": SCHEMA, "description": "Adds two numbers."},
        {"name": "now", "parameters": {"type": "object"}},
    ]
    tools = [{"type": "function", "function": function} for function in functions]
    chat = {"model": "m", "messages": HI, "max_tokens": 200, "tools": tools, **same}
    status, _, answer = await service.post("/v1/chat/completions", chat)
    assert status == 200, answer
    assert (prompt_of(engine), grammar_of(engine)) == mine


@says("Done.", TEMPLATES["hermes"])
async def test_results_are_shown_as_in_a_chat(
    telling: tuple[Service, ScriptedRemoteEngine],
) -> None:
    service, engine = telling
    use = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}}
    other = {"type": "tool_use", "id": "toolu_2", "name": "now", "input": {}}
    results = [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": "2"},
        {
            "type": "tool_result",
            "tool_use_id": "toolu_2",
            "is_error": True,
            "content": [{"type": "text", "text": "no"}, {"type": "text", "text": "clock"}],
        },
        {"type": "text", "text": "And?"},
    ]
    messages = [
        *HI,
        {"role": "assistant", "content": [{"type": "text", "text": "So:"}, use, other]},
        {"role": "user", "content": results[:1]},
        {"role": "user", "content": results[1:]},
    ]
    message = await ask(service, messages=messages)
    assert message["content"] == [{"type": "text", "text": "Done."}]
    mine = prompt_of(engine)
    calls = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for id, name, arguments in (("toolu_1", "add", '{"a":1}'), ("toolu_2", "now", "{}"))
    ]
    chat = [
        *HI,
        {"role": "assistant", "content": "So:", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "2"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": "no\nclock"},
        {"role": "user", "content": "And?"},
    ]
    function = {"name": "add", "parameters": SCHEMA, "description": "Adds two numbers."}
    now = {"name": "now", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": each} for each in (function, now)]
    await service.post(
        "/v1/chat/completions", {"model": "m", "messages": chat, "max_tokens": 200, "tools": tools}
    )
    assert prompt_of(engine) == mine
    status, _, answer = await service.post(
        "/v1/messages/count_tokens", {"model": "m", "messages": messages, "tools": [ADD, NOW]}
    )
    assert (status, json.loads(answer)["input_tokens"]) == (200, message["usage"]["input_tokens"])


@says('{"a": 1}')
async def test_an_output_format(telling: tuple[Service, ScriptedRemoteEngine]) -> None:
    service, engine = telling
    for fields in (
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {"output_format": {"type": "json_schema", "schema": SCHEMA}},
    ):
        message = await ask(service, tools=None, **fields)
        assert message["content"] == [{"type": "text", "text": '{"a": 1}'}]
        grammar = grammar_of(engine)
        assert grammar is not None
        assert grammar.kind == "json_schema"


@says("Hi")
async def test_names_of_tools(telling: tuple[Service, ScriptedRemoteEngine]) -> None:
    service, _ = telling
    longest = {"name": "a-B_9" * 25 + "xyz", "input_schema": {"type": "object"}}
    await ask(service, tools=[longest])
    for name in ("", "a b", "é", "x" * 129, None, 5):
        status, _, answer = await service.post(
            "/v1/messages",
            {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5,
             "tools": [longest, {**longest, "name": name}]},
        )  # fmt: skip
        assert status == 400
        assert "tools[1].name" in json.loads(answer)["error"]["message"]
