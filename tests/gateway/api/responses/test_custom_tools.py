"""Custom tools in `/v1/responses`: tools that take a text, free or of a grammar."""

from __future__ import annotations

from typing import Any

import pytest
from harness.gateway.responding import events_of, get, prompt_of, refused, strict
from harness.gateway.serving import Service, serving
from harness.gateway.tool_calling import TEMPLATES, allows, grammar_of, tool_engine

LARK = 'start: line+\nline: "+" /[^\\n]*/ LF\nLF: "\\n"\n'
SHELL: dict[str, Any] = {"type": "custom", "name": "shell", "description": "Runs a command."}
DIGITS: dict[str, Any] = {
    **SHELL, "format": {"type": "grammar", "syntax": "regex", "definition": "[0-9]+|\"x\""},
}  # fmt: skip
PATCH: dict[str, Any] = {
    **SHELL, "format": {"type": "grammar", "syntax": "lark", "definition": LARK},
}  # fmt: skip


def written(input: str, arguments: str = "arguments") -> str:
    return f'<tool_call>\n{{"name": "shell", "{arguments}": {input}}}\n</tool_call>'


FREE = written('{"input": "echo \\"h\\u00e9\\ud83d\\ude00\\"\\n"}')
RAW = written('<<<\n+say "hi" {\n+\n\n>>>', "input")


@pytest.mark.parametrize(
    ("text", "tool", "input"),
    [
        (FREE, SHELL, 'echo "h\u00e9\U0001f600"\n'),
        (written('{"input": "12"}'), DIGITS, "12"),
        (RAW, PATCH, '+say "hi" {\n+\n'),
        # What is no such text is not lost.
        (written('{"command": "ls"}'), SHELL, '{"command": "ls"}'),
    ],
    ids=["free", "regex", "lark", "other"],
)
async def test_input_of_a_call(text: str, tool: dict[str, Any], input: str) -> None:
    engine = tool_engine("Well. " + text, TEMPLATES["hermes"])
    async with serving(engine) as service, strict(service) as client:
        answer = await client.responses.create(model="m", input="Hi", tools=[tool])  # type: ignore[list-item]
        _, call = answer.output
        assert call.type == "custom_tool_call"
        assert (call.name, call.input) == ("shell", input)
        assert (call.id or "").startswith("ctc_")
        assert answer.tools[0].type == "custom"
        body = {"model": "m", "input": "Hi", "tools": [tool], "stream": True}
        _, _, live = await service.post("/v1/responses", body)
        events = [event for event in events_of(live) if event.get("output_index") == 1]
        kinds = [event["type"] for event in events]
        assert kinds[0] == "response.output_item.added"
        assert events[0]["item"]["input"] == ""
        assert set(kinds[1:-2]) == {"response.custom_tool_call_input.delta"}
        assert kinds[-2:] == ["response.custom_tool_call_input.done", "response.output_item.done"]
        assert "".join(event["delta"] for event in events[1:-2]) == input
        assert events[-2]["input"] == events[-1]["item"]["input"] == input
        response_id = events_of(live)[0]["response"]["id"]
        assert (await get(service, f"/v1/responses/{response_id}?stream=true"))[1] == live
        # What it returned, behind the call.
        output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Done."}
        second = await client.responses.create(
            model="m", input=[output], previous_response_id=answer.id, tools=[tool]  # type: ignore[list-item]
        )  # fmt: skip
        assert 'CALL {"name": "shell", "arguments": {"input": ' in prompt_of(engine)
        assert "<|im_start|>tool\nDone.<|im_end|>" in prompt_of(engine)
        page = await client.responses.input_items.list(second.id, order="asc")
        assert [item.type for item in page.data][-2:] == [
            "custom_tool_call", "custom_tool_call_output",
        ]  # fmt: skip


async def test_what_the_model_is_kept_to() -> None:
    engine = tool_engine(FREE, TEMPLATES["hermes"])
    async with serving(engine) as service:
        for choice in ("required", {"type": "custom", "name": "shell"}):
            await service.respond(tools=[SHELL], tool_choice=choice)
            assert allows(engine, written('{"input": "echo \\"h\\"\\n"}'))
            assert not allows(engine, written('{"other": "x"}'))
        # A grammar holds whenever the tool is called, also where it need not be.
        for choice in ("required", "auto"):
            await service.respond(tools=[DIGITS], tool_choice=choice)
            assert allows(engine, written('{"input": "12"}'))
            assert allows(engine, written('{"input": "\\"x\\""}'))
            assert not allows(engine, written('{"input": "1a"}'))
            await service.respond(tools=[PATCH], tool_choice=choice)
            assert allows(engine, RAW)
            assert not allows(engine, RAW.replace("+say", "-say"))
        await service.respond(tools=[SHELL])
        assert grammar_of(engine) is None
        assert "Runs a command." in prompt_of(engine)
        await service.respond(tools=[PATCH])
        assert "line+" in prompt_of(engine)


@pytest.mark.parametrize(
    ("format", "param"),
    [
        (5, "tools[0].format"),
        ({"type": "wolf"}, "tools[0].format.type"),
        ({"type": "grammar", "syntax": "lark"}, "tools[0].format.definition"),
        ({"type": "grammar", "syntax": "ebnf", "definition": "x"}, "tools[0].format.syntax"),
    ],
)
async def test_refusals(service: Service, format: Any, param: str) -> None:
    found = await refused(service, tools=[{**SHELL, "format": format}])
    assert (found["status"], found["param"]) == (400, param)


async def test_chats_say_where_custom_tools_are_taken(service: Service) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "tools": [SHELL]}
    status, _, answer = await service.post("/v1/chat/completions", body)
    assert status == 400
    assert b"/v1/responses" in answer
