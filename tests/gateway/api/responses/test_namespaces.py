"""Namespaces of tools in `/v1/responses`: what the model is told, and what clients get back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from harness.gateway.responding import events_of, get, prompt_of, strict
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.serving import Service, serving
from harness.gateway.tool_calling import TEMPLATES, allows, tool_engine

ADD: dict[str, Any] = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}
NOTE: dict[str, Any] = {"type": "custom", "name": "note"}
MATHS: dict[str, Any] = {
    "type": "namespace",
    "name": "maths",
    "description": "For sums.",
    "tools": [ADD, NOTE],
}


def called(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


SUM, WORD = called("maths__add", '{"a": 1}'), called("maths__note", '{"input": "x"}')


async def test_calls_and_their_outputs() -> None:
    engine = tool_engine(SUM + WORD + called("add", '{"a": 2}'), TEMPLATES["hermes"])
    async with serving(engine) as service, strict(service) as client:
        answer = await client.responses.create(model="m", input="Hi", tools=[MATHS, ADD])  # type: ignore[list-item]
        function, custom, plain = answer.output
        assert (function.type, custom.type) == ("function_call", "custom_tool_call")
        assert (function.namespace, function.name) == ("maths", "add")  # type: ignore[union-attr]
        assert (custom.namespace, custom.name) == ("maths", "note")  # type: ignore[union-attr]
        assert (plain.namespace, plain.name) == (None, "add")  # type: ignore[union-attr]
        shown = answer.tools[0].model_dump(exclude_none=True)
        assert (shown["type"], len(shown["tools"])) == ("namespace", 2)
        told = prompt_of(engine)
        assert '"name": "maths__add", "description": "For sums.\\n\\nAdds."' in told
        assert '"name": "add", "description": "Adds."' in told
        body = {"model": "m", "input": "Hi", "tools": [MATHS, ADD], "stream": True}
        _, _, live = await service.post("/v1/responses", body)
        items = [event["item"] for event in events_of(live) if "item" in event]
        assert [item.get("namespace") for item in items] == ["maths"] * 4 + [None] * 2
        response_id = events_of(live)[0]["response"]["id"]
        assert (await get(service, f"/v1/responses/{response_id}?stream=true"))[1] == live
        # The history names tools as the model knows them, kept or sent again.
        outputs: list[Any] = [
            {"type": "function_call_output", "call_id": function.call_id, "output": "3"},  # type: ignore[union-attr]
            {"type": "custom_tool_call_output", "call_id": custom.call_id, "output": "4"},  # type: ignore[union-attr]
        ]
        options: Any = {"model": "m", "tools": [MATHS]}
        await client.responses.create(input=outputs, previous_response_id=answer.id, **options)
        kept = prompt_of(engine)
        assert 'CALL {"name": "maths__add"' in kept
        assert 'CALL {"name": "maths__note"' in kept
        given = [item.model_dump(exclude_none=True) for item in answer.output]
        hello = {"role": "user", "content": "Hi"}
        await client.responses.create(input=[hello, *given, *outputs], **options)
        assert prompt_of(engine) == kept


async def test_a_choice_names_a_tool_as_the_model_does() -> None:
    engine = tool_engine(SUM, TEMPLATES["hermes"])
    async with serving(engine) as service:
        choice = {"type": "function", "name": "maths__add"}
        await service.respond(tools=[MATHS], tool_choice=choice)
        assert allows(engine, SUM)
        assert not allows(engine, WORD)
        await service.respond(tools=[MATHS], tool_choice="required")
        assert allows(engine, SUM)
        assert allows(engine, WORD)


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{**MATHS, "name": None}], "tools[0].name"),
        ([{**MATHS, "name": "a b"}], "tools[0].name"),
        ([{**MATHS, "description": 5}], "tools[0].description"),
        ([{**MATHS, "tools": None}], "tools[0].tools"),
        ([{**MATHS, "tools": [5]}], "tools[0].tools[0]"),
        ([{**MATHS, "tools": [{**ADD, "name": 5}]}], "tools[0].tools[0].name"),
        ([{**MATHS, "tools": [MATHS]}], "tools[0].tools[0].type"),
        ([{**MATHS, "tools": [{"type": "web_search"}]}], "tools"),
        ([MATHS, {**ADD, "name": "maths__add"}], "tools[1].name"),
        ([{**MATHS, "tools": [{**ADD, "name": f"f{n}"} for n in range(129)]}], "tools"),
    ],
)
async def test_refusals(
    service: Service, engine: ScriptedRemoteEngine, tools: Any, param: str
) -> None:
    body = {"model": "m", "input": "Hi", "tools": tools}
    status, _, answer = await service.post("/v1/responses", body)
    assert (status, json.loads(answer)["error"]["param"]) == (400, param)
    assert engine.submitted == []
