"""Tools of a chat on an engine of our own: what the model is told, and what is made of its text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from harness.gateway.responding import prompt_of
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.serving import HI, Service, serving
from harness.gateway.tool_calling import (
    SCHEMA,
    TEMPLATES,
    TEXTS,
    allows,
    grammar_of,
    says,
    tool_engine,
)
from parrot_engine.protocol import Failed

ADD = {
    "type": "function",
    "function": {"name": "add", "description": "Adds two numbers.", "parameters": SCHEMA},
}
NOW = {"type": "function", "function": {"name": "now"}}


@pytest.mark.parametrize("format", sorted(TEMPLATES))
async def test_each_way_of_writing_calls(format: str) -> None:
    engine = tool_engine(TEXTS[format], TEMPLATES[format])
    async with serving(engine) as service:
        answer = await service.chat(tools=[ADD, NOW])
        choice = answer["choices"][0]
        (call,) = choice["message"]["tool_calls"]
        assert choice["message"]["content"] is None
        assert choice["finish_reason"] == "tool_calls"
        assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
        assert call["type"] == "function"
        assert call["id"].startswith("call_")
        # Its template knows tools and gets them as they are; nothing has to be enforced.
        assert prompt_of(engine).startswith('[{"type": "function", "function": {"name": "add"')
        assert grammar_of(engine) is None
        # Where a call is required, the model can write nothing but one.
        await service.chat(tools=[ADD, NOW], tool_choice="required")
        assert allows(engine, TEXTS[format])
        assert not allows(engine, "Well.")
        assert not allows(engine, TEXTS[format].replace('"a": 1', '"a": 10'))
        assert not allows(engine, TEXTS[format].replace("add", "sub"))
        assert allows(engine, TEXTS[format].replace("add", "now"))
        named = {"type": "function", "function": {"name": "add"}}
        await service.chat(tools=[ADD, NOW], tool_choice=named)
        assert allows(engine, TEXTS[format])
        assert not allows(engine, TEXTS[format].replace("add", "now"))
        strict = {**ADD, "function": {**ADD["function"], "strict": True}}  # type: ignore[dict-item]
        async with (
            service.client() as client,
            client.chat.completions.stream(
                model="m",
                messages=HI,  # type: ignore[arg-type]
                tools=[strict],  # type: ignore[list-item]
            ) as stream,
        ):
            final = await stream.get_final_completion()
        assert final.choices[0].finish_reason == "tool_calls"
        calls = final.choices[0].message.tool_calls
        assert calls is not None
        assert calls[0].function.arguments == '{"a": 1}'


@says("No calls here.")
async def test_a_template_that_knows_no_tools(telling: tuple[Service, Any]) -> None:
    service, engine = telling
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]
    answer = await service.chat(tools=[ADD], messages=messages)
    choice = answer["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "No calls here.")
    assert "tool_calls" not in choice["message"]
    prompt = prompt_of(engine)
    assert prompt.startswith("<|im_start|>system\nBe brief.\n\nYou can call functions")
    assert "<tools>\n" + json.dumps(ADD) + "\n</tools>" in prompt
    said = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert f"<|im_start|>assistant\n{said}<|im_end|>" in prompt
    assert "<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>" in prompt


@says("I will. " + TEXTS["hermes"] + "\n" + TEXTS["hermes"].replace("1", "2"))
async def test_content_and_several_calls_streamed(telling: tuple[Service, Any]) -> None:
    service, _ = telling
    async with service.client() as client:
        stream = await client.chat.completions.create(
            model="m", messages=HI, tools=[ADD], stream=True, logprobs=True, n=2,  # type: ignore[arg-type, list-item]
        )  # fmt: skip
        chunks = [chunk async for chunk in stream]
    for index in (0, 1):
        choices = [c.choices[0] for c in chunks if c.choices[0].index == index]
        content = "".join(choice.delta.content or "" for choice in choices)
        assert content == "I will. "
        deltas = [call for choice in choices for call in choice.delta.tool_calls or ()]
        begins = [call for call in deltas if call.id]
        assert [call.index for call in begins] == [0, 1]
        assert len({call.id for call in begins}) == 2
        for number in (0, 1):
            pieces = [
                call.function.arguments or ""
                for call in deltas
                if call.index == number and call.function is not None
            ]
            assert "".join(pieces) == f'{{"a": {number + 1}}}'
            assert len(pieces) > 3
        assert [c.finish_reason for c in choices if c.finish_reason] == ["tool_calls"]
        tokens = [
            entry.token
            for choice in choices
            if choice.logprobs and choice.logprobs.content
            for entry in choice.logprobs.content
        ]
        assert "".join(tokens).startswith("I will. <tool_call>")


@says(TEXTS["hermes"])
async def test_cut_off_in_the_middle_of_a_call(telling: tuple[Service, Any]) -> None:
    service, _ = telling
    answer = await service.chat(tools=[ADD], max_tokens=50)
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "length"
    assert '{"a": 1}'.startswith(choice["message"]["tool_calls"][0]["function"]["arguments"])


@says("Hm. " + TEXTS["hermes"])
async def test_strict_tools_are_kept_to_their_schema_once_called(
    telling: tuple[Service, Any],
) -> None:
    service, engine = telling
    strict = {**ADD, "function": {**ADD["function"], "strict": True}}  # type: ignore[dict-item]
    await service.chat(tools=[strict, NOW])
    assert allows(engine, "Just text, {braces} and all.")
    assert allows(engine, "Hm. " + TEXTS["hermes"])
    assert allows(engine, TEXTS["hermes"].replace("add", "now").replace('"a": 1', '"z": [2]'))
    assert not allows(engine, TEXTS["hermes"].replace("1", "10"))
    assert not allows(engine, TEXTS["hermes"].replace("add", "sub"))


@says('{"x": 1}')
async def test_json_or_a_call(telling: tuple[Service, Any]) -> None:
    service, engine = telling
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"],
              "additionalProperties": False}  # fmt: skip
    answer = await service.chat(
        tools=[ADD],
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
    )
    assert answer["choices"][0]["message"]["content"] == '{"x": 1}'
    assert allows(engine, '{"x": 1}')
    assert allows(engine, TEXTS["hermes"])
    assert not allows(engine, "Hi")


@says("Hello.")
async def test_allowed_tools(telling: tuple[Service, Any]) -> None:
    service, engine = telling
    choice = {
        "type": "allowed_tools",
        "allowed_tools": {
            "mode": "required",
            "tools": [{"type": "function", "function": {"name": "now"}}],
        },
    }
    await service.chat(tools=[ADD, NOW], tool_choice=choice)
    assert '"name": "add"' in prompt_of(engine)
    assert not allows(engine, TEXTS["hermes"])


OPEN = {"type": "object", "properties": {"a": {"type": "integer"}}}


def schema_format(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **fields}}


@pytest.mark.parametrize(
    ("fields", "takes_more"),
    [
        ({"response_format": schema_format(OPEN)}, False),
        ({"response_format": schema_format(OPEN, strict=False)}, False),
        ({"response_format": schema_format(OPEN | {"additionalProperties": True})}, True),
        ({"guided_json": OPEN}, False),
        ({"json_schema": OPEN}, False),
        ({"json_schema": json.dumps(OPEN)}, False),
        ({"structured_outputs": {"json": OPEN}}, False),
        ({"structured_outputs": {"json": OPEN}, "guided_json": OPEN}, False),
        ({"structured_outputs": {"json": OPEN, "disable_additional_properties": True}}, False),
        ({"structured_outputs": {"json": OPEN, "disable_additional_properties": False}}, True),
        ({"tools": [ADD], "response_format": schema_format(OPEN)}, False),
        ({"tools": [ADD], "structured_outputs": {
            "json": OPEN, "disable_additional_properties": False}}, True),
    ],
)  # fmt: skip
@says("x", TEMPLATES["hermes"])
async def test_objects_have_the_properties_that_they_list(
    telling: tuple[Service, Any], fields: dict[str, Any], takes_more: bool
) -> None:
    service, engine = telling
    await service.chat(**fields)
    assert allows(engine, '{"a": 1}')
    assert allows(engine, '{"a":1}')
    assert not allows(engine, '{\n"a":1}')
    assert not allows(engine, '{"a":  1}')
    assert allows(engine, '{"a": 1, "b": 2}') == takes_more


@says("x", TEMPLATES["hermes"])
async def test_grammars_as_sglang_names_them(telling: tuple[Service, Any]) -> None:
    service, engine = telling
    for fields in ({"regex": "[ab]"}, {"ebnf": 'root ::= "a" | "b"'}):
        await service.chat(**fields)
        assert allows(engine, "a")
        assert not allows(engine, "c")


@says("x", TEMPLATES["hermes"])
async def test_arguments_are_those_that_a_function_lists(telling: tuple[Service, Any]) -> None:
    service, engine = telling
    empty = {"type": "object", "properties": {}}
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": OPEN}},
        {"type": "function", "function": {"name": "g", "parameters": empty}},
    ]
    await service.chat(tools=tools, tool_choice="required")
    for call, good in [
        ('{"name": "f", "arguments": {"a": 1}}', True),
        ('{"name": "f", "arguments": {"a": 1, "b": 2}}', False),
        ('{"name": "g", "arguments": {}}', True),
        ('{"name": "g", "arguments": {"a": 1}}', False),
    ]:
        assert allows(engine, f"<tool_call>\n{call}\n</tool_call>") == good, call
    assert "additionalProperties" not in prompt_of(engine)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{}]}, "tools[0].type"),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [ADD, ADD]}, "tools[1].function.name"),
    ({"tools": [NOW] * 129}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
     "tools[0].function.parameters"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
     "tools[0].function.parameters"),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]},
     "tools[0].function.strict"),
    ({"tools": [ADD], "tool_choice": "perhaps"}, "tool_choice"),
    ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}},
     "tool_choice"),
    ({"tools": [ADD], "tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"tools": [ADD], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools.tools"),
    ({"tools": [ADD], "tool_choice": {"type": "custom"}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": []}}},
     "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}},
     "response_format.json_schema.name"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": 1}}},
     "response_format.json_schema.strict"),
    ({"response_format": {"type": "json_schema", "json_schema": {
        "name": "x", "schema": {"description": "x" * 300_000}}}},
     "response_format.json_schema.schema"),
    ({"structured_outputs": "x"}, "structured_outputs"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"colour": "a"}}, "structured_outputs.colour"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"json": {}, "disable_additional_properties": 1}},
     "structured_outputs.disable_additional_properties"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ({"guided_regex": "a", "tools": [ADD]}, "guided_regex"),
    ({"guided_regex": "a", "structured_outputs": {"regex": "b"}}, "guided_regex"),
    ({"regex": 5}, "regex"),
    ({"ebnf": ""}, "ebnf"),
    ({"json_schema": "{"}, "json_schema"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ({"include_stop_str_in_output": True}, "include_stop_str_in_output"),
]  # fmt: skip


@says("x")
async def test_bad_fields_are_named(telling: tuple[Service, Any]) -> None:
    service, engine = telling
    wrong = []
    for body, param in BAD:
        error = (await service.chat(400, **body))["error"]
        if error["param"] != param or error["type"] != "invalid_request_error":
            wrong.append((str(body)[:80], param, error))
    assert wrong == []
    assert engine.submitted == []


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_engine_says_of_a_grammar_names_the_field(stream: bool) -> None:
    engine = tool_engine("x")
    message = 'grammar (json_schema): Unimplemented keys: ["not"] at #/properties/a'
    engine.script = lambda prompt, sampling: [Failed(0, "invalid_request", message)]
    async with serving(engine) as service:
        error = (await service.chat(400, response_format={"type": "json_object"}, stream=stream))[
            "error"
        ]
    assert error["param"] == "response_format"
    assert "#/properties/a" in error["message"]


async def test_an_engine_without_grammars_refuses_by_name() -> None:
    engine = ScriptedRemoteEngine()
    async with serving(engine) as service:
        for body, param in [
            ({"response_format": {"type": "json_object"}}, "response_format"),
            ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
            ({"tools": [NOW], "tool_choice": "required"}, "tool_choice"),
        ]:
            error = (await service.chat(400, **body))["error"]
            assert (error["param"], error["code"]) == (param, "unsupported_value")
        # Calls that nothing has to enforce are read all the same.
        assert (await service.chat(tools=[NOW]))["choices"][0]["message"]["content"] == (
            "Hello world"
        )
