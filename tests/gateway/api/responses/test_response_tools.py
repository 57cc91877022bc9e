"""Functions in `/v1/responses`: what the model is told, kept to, and what is made of its text."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from harness.gateway.responding import events_of, get, prompt_of, refused, strict
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.serving import Service, serving
from harness.gateway.tool_calling import SCHEMA, TEMPLATES, TEXTS, allows, grammar_of, tool_engine

ADD: dict[str, Any] = {
    "type": "function",
    "name": "add",
    "description": "Adds two numbers.",
    "parameters": SCHEMA,
    "strict": None,
}
NOW: dict[str, Any] = {"type": "function", "name": "now", "parameters": None, "strict": None}
CALL = TEXTS["hermes"]
TWO_CALLS = "I will. " + CALL + "\n" + CALL.replace("1", "2")


@pytest.mark.parametrize("format", sorted(TEMPLATES))
async def test_each_way_of_writing_calls(format: str) -> None:
    engine = tool_engine(TEXTS[format], TEMPLATES[format])
    async with serving(engine) as service, strict(service) as client:
        answer = await client.responses.create(model="m", input="Hi", tools=[ADD, NOW])  # type: ignore[list-item]
        (call,) = answer.output
        assert call.type == "function_call"
        assert (call.name, call.arguments, call.status) == ("add", '{"a": 1}', "completed")
        assert call.call_id.startswith("call_")
        assert (call.id or "").startswith("fc_")
        assert (answer.status, answer.output_text) == ("completed", "")
        assert answer.parallel_tool_calls is True
        # The template gets the same as from a chat.
        assert prompt_of(engine).startswith('[{"type": "function", "function": {"name": "add"')
        assert grammar_of(engine) is None
        await service.respond(tools=[ADD, NOW], tool_choice="required")
        assert allows(engine, TEXTS[format])
        assert allows(engine, TEXTS[format].replace("add", "now"))
        assert not allows(engine, "Well.")
        assert not allows(engine, TEXTS[format].replace('"a": 1', '"a": 10'))
        named = {"type": "function", "name": "add"}
        for choice in (named, {"type": "allowed_tools", "mode": "required", "tools": [named]}):
            answer = await client.responses.create(
                model="m", input="Hi", tools=[ADD, NOW], tool_choice=choice  # type: ignore[list-item, arg-type]
            )  # fmt: skip
            assert json.loads(answer.tool_choice.model_dump_json(exclude_none=True)) == choice  # type: ignore[union-attr]
            assert allows(engine, TEXTS[format])
            assert not allows(engine, TEXTS[format].replace("add", "now"))
        # Both tools are shown all the same.
        assert '"name": "now"' in prompt_of(engine)
        await service.respond(tools=[{**ADD, "strict": True}])
        # No marker announces a call of Llama's, which thus cannot be told from text.
        assert (grammar_of(engine) is None) == (format == "llama")
        if format != "llama":
            assert not allows(engine, TEXTS[format].replace('"a": 1', '"a": 10'))
        answer = await client.responses.create(
            model="m", input="Hi", tools=[ADD], tool_choice="none"  # type: ignore[list-item]
        )  # fmt: skip
        assert answer.output[0].type == "message"
        assert "add" not in prompt_of(engine)


async def test_parallel_calls_are_an_option() -> None:
    engine = tool_engine(TWO_CALLS.removeprefix("I will. "))
    async with serving(engine) as service:
        for parallel in (True, False):
            answer = await service.respond(
                tools=[ADD], tool_choice="required", parallel_tool_calls=parallel
            )
            assert answer["parallel_tool_calls"] is parallel
            assert allows(engine, TWO_CALLS.removeprefix("I will. ")) is parallel
        # Where nothing keeps the model to one call, the others are left out.
        answer = await service.respond(tools=[ADD], parallel_tool_calls=False)
        assert [item["type"] for item in answer["output"]] == ["function_call"]
        answer = await service.respond(tools=[ADD])
        assert [item["type"] for item in answer["output"]] == ["function_call"] * 2


async def test_order_of_events() -> None:
    engine = tool_engine(TWO_CALLS)
    async with serving(engine) as service:
        body = {"model": "m", "input": "Hi", "tools": [ADD], "stream": True}
        _, _, live = await service.post("/v1/responses", body)
        events = events_of(live)
        kinds = [event["type"] for event in events]
        short = [kind for n, kind in enumerate(kinds) if kinds[n - 1 : n] != [kind]]
        call = [
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
        ]
        assert short == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            *call,
            *call,
            "response.completed",
        ]
        added = [e for e in events if e["type"] == "response.output_item.added"]
        assert [event["output_index"] for event in added] == [0, 1, 2]
        assert added[1]["item"]["arguments"] == ""
        assert added[1]["item"]["status"] == "in_progress"
        final = events[-1]["response"]
        assert [item["type"] for item in final["output"]] == ["message"] + ["function_call"] * 2
        assert final["output"][0]["content"][0]["text"] == "I will. "
        for index in (1, 2):
            own = [e for e in events if e.get("output_index") == index]
            ids = {e.get("item_id", e.get("item", {}).get("id")) for e in own}
            assert ids == {final["output"][index]["id"]}
            deltas = [e["delta"] for e in own if e["type"].endswith(".delta")]
            assert "".join(deltas) == final["output"][index]["arguments"] == f'{{"a": {index}}}'
            assert own[-2]["name"] == "add"
            assert own[-1]["item"] == final["output"][index]
        path = f"/v1/responses/{final['id']}?stream=true"
        assert (await get(service, path))[1] == live
        for number in (0, 7, len(events) - 2):
            _, rest = await get(service, f"{path}&starting_after={number}")
            assert live.endswith(rest)
            first = json.loads(rest.split(b"data: ")[1].split(b"\n")[0])
            assert first["sequence_number"] == number + 1


async def test_accumulator_of_the_client() -> None:
    engine = tool_engine(TWO_CALLS)
    async with serving(engine) as service, strict(service) as client:
        async with client.responses.stream(model="m", input="Hi", tools=[ADD]) as stream:  # type: ignore[list-item]
            snapshots = [
                e.snapshot
                async for e in stream
                if e.type == "response.function_call_arguments.delta"
            ]
            final = await stream.get_final_response()
        assert snapshots[-1] == '{"a": 2}'
        assert [item.type for item in final.output] == ["message", "function_call", "function_call"]


async def test_the_loop_by_input() -> None:
    """The client's own way: it appends `response.output`, then what the tools returned."""
    engine = tool_engine(TWO_CALLS, TEMPLATES["hermes"])
    async with serving(engine) as service, strict(service) as client:
        items: list[Any] = [{"role": "user", "content": "Hi"}]
        answer = await client.responses.create(model="m", input=items, tools=[ADD])  # type: ignore[list-item]
        items += answer.output
        items += [
            {"type": "function_call_output", "call_id": item.call_id, "output": output}
            for item, output in zip(
                answer.output[1:], ("3", [{"type": "input_text", "text": "4"}]), strict=True
            )
            if item.type == "function_call"
        ]
        await client.responses.create(model="m", input=items, tools=[ADD], store=False)  # type: ignore[list-item]
    assert prompt_of(engine).endswith(
        "<|im_start|>user\nHi<|im_end|>\n"
        '<|im_start|>assistant\nI will. CALL {"name": "add", "arguments": {"a": 1}}'
        'CALL {"name": "add", "arguments": {"a": 2}}<|im_end|>\n'
        "<|im_start|>tool\n3<|im_end|>\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant"
    )


@pytest.mark.parametrize("by", ["previous_response_id", "conversation"])
async def test_the_loop_by_stored_turns(by: str) -> None:
    engine = tool_engine(CALL, TEMPLATES["hermes"])
    async with serving(engine) as service, strict(service) as client:
        history: dict[str, Any] = {}
        if by == "conversation":
            made = await client.conversations.create()
            history = {"conversation": made.id}
        first = await client.responses.create(model="m", input="Hi", tools=[ADD], **history)  # type: ignore[list-item]
        (call,) = first.output
        assert call.type == "function_call"
        if by == "previous_response_id":
            history = {"previous_response_id": first.id}
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
        second = await client.responses.create(
            model="m", input=[output], tools=[ADD], **history  # type: ignore[list-item]
        )  # fmt: skip
        assert prompt_of(engine).endswith(
            '<|im_start|>assistant\nCALL {"name": "add", "arguments": {"a": 1}}<|im_end|>\n'
            "<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant"
        )
        page = await client.responses.input_items.list(second.id, order="asc")
        assert [item.type for item in page.data] == [
            "message", "function_call", "function_call_output",
        ]  # fmt: skip
        if by == "conversation":
            listed = await client.conversations.items.list(made.id, order="asc")
            assert [item.type for item in listed.data][-1] == "function_call"
        # Items by reference, as some clients send what they know to be stored.
        reference = {"type": "item_reference", "id": call.id}
        await client.responses.create(
            model="m", input=[{"role": "user", "content": "Hi"}, reference, output]  # type: ignore[list-item]
        )  # fmt: skip
        assert "CALL" in prompt_of(engine)
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.responses.create(
                model="m", input=[{"type": "item_reference", "id": "fc_1"}]  # type: ignore[list-item]
            )  # fmt: skip
        assert unknown.value.param == "input[0].id"


async def test_reasoning_passes_through() -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.reasoning_content or '' }}|{{ m.content }}"
        "{% endfor %}"
    )
    engine = tool_engine("Hello", template)
    async with serving(engine) as service:
        reasoning: dict[str, Any] = {"type": "reasoning", "id": "rs_1", "summary": []}
        said = {"role": "assistant", "content": "Yes."}
        await service.respond(
            input=[
                {"role": "user", "content": "Hi"},
                {**reasoning, "content": [{"type": "reasoning_text", "text": "Hm."}]},
                said,
                {**reasoning, "summary": [{"type": "summary_text", "text": "So."}]},
                said,
                {"role": "user", "content": "Go on."},
            ],
            include=["reasoning.encrypted_content"],
            store=False,
        )
        assert prompt_of(engine) == "[user]|Hi[assistant]Hm.|Yes.[assistant]So.|Yes.[user]|Go on."
        sealed = {**reasoning, "encrypted_content": "gAAAA"}
        found = await refused(service, input=[{"role": "user", "content": "Hi"}, sealed, said])
        assert found == {
            "status": 400, "param": "input[1].encrypted_content", "code": "unsupported_value",
        }  # fmt: skip


async def test_text_or_calls_with_a_schema() -> None:
    """`text.format` and tools: JSON of the one, or calls of the others."""
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"],
              "additionalProperties": False}  # fmt: skip
    engine = tool_engine('{"x": 5}')
    async with serving(engine) as service:
        answer = await service.respond(
            tools=[ADD], text={"format": {"type": "json_schema", "name": "n", "schema": schema}}
        )
        assert answer["output"][0]["content"][0]["text"] == '{"x": 5}'
        assert allows(engine, '{"x": 5}')
        assert allows(engine, CALL)
        assert not allows(engine, "Hello")


async def test_a_call_that_is_cut_off() -> None:
    engine = tool_engine(CALL)
    async with serving(engine) as service:
        whole = len(engine.tokenizer.encode(CALL, add_special_tokens=False))
        answer = await service.respond(tools=[ADD], max_output_tokens=whole - 16)
        (call,) = answer["output"]
        assert (answer["status"], call["status"]) == ("incomplete", "incomplete")
        assert '{"a": 1}'.startswith(call["arguments"])
        answer = await service.respond(tools=[ADD], max_output_tokens=2, tool_choice="required")
        assert (answer["status"], answer["output"]) == ("incomplete", [])


async def test_tools_count_as_input() -> None:
    engine = tool_engine(CALL)
    async with serving(engine) as service, strict(service) as client:
        answer = await client.responses.create(model="m", input="Hi", tools=[ADD])  # type: ignore[list-item]
        counted = await client.responses.input_tokens.count(model="m", input="Hi", tools=[ADD])  # type: ignore[list-item]
        assert answer.usage is not None
        assert counted.input_tokens == answer.usage.input_tokens


@pytest.mark.parametrize(
    ("body", "param", "told"),
    [
        ({"tools": [{"type": "web_search_preview"}]}, "tools", "web_search_preview"),
        ({"tools": [ADD, {"type": "mcp", "server_label": "x"}]}, "tools", "'mcp' (tools[1])"),
        ({"tools": [{"type": "computer_use_preview"}]}, "tools", "computer_use_preview"),
        ({"tools": [{"type": "wolf", "name": "x"}]}, "tools[0].type", "wolf"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name",
         "/v1/chat/completions"),
        ({"tools": [ADD, ADD]}, "tools[1].name", "two functions"),
        ({"tools": [{**ADD, "parameters": {"type": "string"}}]}, "tools[0].parameters", "object"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "'x'"),
        ({"tools": [ADD], "tool_choice": {"type": "file_search"}}, "tool_choice", "type"),
        ({"messages": [{"role": "user", "content": "x"}]}, "messages", "'input'"),
        ({"response_format": {"type": "json_object"}}, "response_format", "'text.format'"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]},
         "input[0].call_id", "call_id"),
        ({"input": [{"type": "shell_call", "call_id": "1"}]}, "input[0].type", "shell_call"),
    ],
)  # fmt: skip
async def test_refusals_name_field_and_reason(
    service: Service, engine: ScriptedRemoteEngine, body: dict[str, Any], param: str, told: str
) -> None:
    status, _, answer = await service.post("/v1/responses", {"model": "m", "input": "Hi", **body})
    error = json.loads(answer)["error"]
    assert (status, error["param"]) == (400, param)
    assert told in error["message"]
    assert engine.submitted == []
