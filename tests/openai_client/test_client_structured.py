"""Structured output and tool calls of a builtin model, with the real client and its helpers.

The demo model knows nothing of JSON or of tools: what it writes is valid because it can write
nothing else.
"""

from __future__ import annotations

import json
import re
from enum import Enum
from typing import Any, Literal

import openai
import pydantic
import pytest
from harness.openai_client import Driver, collect, entered, result
from harness.processes import DEMO_MODEL

ASK = [{"role": "user", "content": "Who was it?"}]
CALL: dict[str, Any] = {"model": DEMO_MODEL, "max_completion_tokens": 400}


class Mood(Enum):
    """How somebody feels."""

    GLAD = "glad"
    SAD = "sad"


class Place(pydantic.BaseModel):
    """Where somebody is."""

    floor: int = pydantic.Field(ge=0, le=99)
    indoors: bool


class Person(pydantic.BaseModel):
    """Somebody, with nested parts and optional ones."""

    name: str = pydantic.Field(max_length=8)
    mood: Mood
    places: list[Place] = pydantic.Field(max_length=2)
    kind: Literal["friend", "foe"] | None


class GetWeather(pydantic.BaseModel):
    """A tool's arguments."""

    city: str = pydantic.Field(max_length=4)
    days: int = pydantic.Field(ge=1, le=9)


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 4},
                "unit": {"$ref": "#/$defs/unit"},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
            "$defs": {"unit": {"enum": ["C", "F"]}},
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
TIME["function"]["parameters"] = {  # type: ignore[index]
    "type": "object",
    "properties": {"zone": {"type": "integer", "minimum": -12, "maximum": 12}},
    "required": ["zone"],
    "additionalProperties": False,
}


def check_arguments(name: str, arguments: str) -> None:
    values = json.loads(arguments)
    if name == "get_weather":
        assert set(values) == {"city", "unit"}
        assert values["unit"] in ("C", "F")
        assert len(values["city"]) <= 4
    else:
        assert name == "get_time"
        assert set(values) == {"zone"}
        assert -12 <= values["zone"] <= 12


# Structured output


@pytest.mark.parametrize("seed", [1, 2])
async def test_parse_gives_the_model_s_own_class(api: Driver, seed: int) -> None:
    answer = await result(
        api.client.chat.completions.parse(messages=ASK, response_format=Person, seed=seed, **CALL)
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Person)
    assert json.loads(choice.message.content)["mood"] in ("glad", "sad")


async def test_a_stream_is_parsed_as_well(api: Driver) -> None:
    async with entered(
        api.client.chat.completions.stream(messages=ASK, response_format=Person, seed=4, **CALL)
    ) as stream:
        events = await collect(stream)
        final = await result(stream.get_final_completion())
    assert isinstance(final.choices[0].message.parsed, Person)
    assert sum(event.type == "content.delta" for event in events) > 3


async def test_several_candidates_and_log_probabilities(api: Driver) -> None:
    answer = await result(
        api.client.chat.completions.parse(
            messages=ASK, response_format=Person, seed=7, n=3, logprobs=True, top_logprobs=2, **CALL
        )
    )
    parsed = [choice.message.parsed for choice in answer.choices]
    assert all(isinstance(item, Person) for item in parsed)
    assert len({choice.message.content for choice in answer.choices}) > 1
    for choice in answer.choices:
        text = "".join(entry.token for entry in choice.logprobs.content)
        assert text == choice.message.content


async def test_json_object(api: Driver) -> None:
    # Candidates are written side by side: three take hardly longer than one.
    body = {**CALL, "max_completion_tokens": 60, "n": 3}
    answer = await api.chat(messages=ASK, response_format={"type": "json_object"}, seed=1, **body)
    assert len(answer.choices) == 3
    for choice in answer.choices:
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)
        else:
            assert choice.message.content.startswith("{")


async def test_cut_by_its_length(api: Driver) -> None:
    answer = await api.chat(
        messages=ASK,
        model=DEMO_MODEL,
        max_completion_tokens=3,
        response_format={"type": "json_object"},
        seed=1,
    )
    assert answer.choices[0].finish_reason == "length"
    with pytest.raises(openai.LengthFinishReasonError):
        await result(
            api.client.chat.completions.parse(
                messages=ASK, model=DEMO_MODEL, max_completion_tokens=3, response_format=Person
            )
        )


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"structured_outputs": {"choice": ["yes", "no, never"]}}, "yes|no, never"),
        ({"guided_choice": ["yes", "no, never"]}, "yes|no, never"),
        ({"structured_outputs": {"regex": "[a-f]{2}-[0-9]{1,3}"}}, "[a-f]{2}-[0-9]{1,3}"),
        ({"structured_outputs": {"grammar": 'start: "a" | "b" start'}}, "b*a"),
        ({"structured_outputs": {"grammar": 'root ::= "x" [0-9]'}}, "x[0-9]"),
        ({"structured_outputs": {"json": {"enum": [1, "b"]}}}, '1|"b"'),
        ({"structured_outputs": {"json": '{"type": "boolean"}'}}, "true|false"),
        ({"guided_json": {"type": "null"}}, "null"),
        ({"response_format": {"type": "json_schema",
                              "json_schema": {"name": "x", "schema": {"type": "boolean"}}}},
         "true|false"),
    ],
)  # fmt: skip
async def test_completions_take_all_of_them(
    loose: Driver, extra: dict[str, Any], pattern: str
) -> None:
    answer = await loose.complete(
        model=DEMO_MODEL, prompt=["It was", "He said"], max_tokens=40, n=2, extra_body=extra
    )
    assert len(answer.choices) == 4
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert re.fullmatch(pattern, choice.text), choice.text


async def test_stop_strings_still_stop(api: Driver) -> None:
    answer = await api.complete(
        model=DEMO_MODEL,
        prompt="It was",
        max_tokens=40,
        stop="-",
        extra_body={"structured_outputs": {"regex": "[a-f]{2}-[0-9]{1,3}"}},
    )
    assert re.fullmatch("[a-f]{2}", answer.choices[0].text)


async def test_responses_parse(api: Driver) -> None:
    answer = await result(
        api.client.responses.parse(model=DEMO_MODEL, input="Who was it?", text_format=Person,
                                   max_output_tokens=400)
    )  # fmt: skip
    assert isinstance(answer.output_parsed, Person)
    assert answer.text.format.type == "json_schema"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {
            "name": "x", "schema": {"properties": {"a": {"not": {}}}}}}},
         "response_format", "#/properties/a"),
        ({"response_format": {"type": "json_schema", "json_schema": {
            "name": "x", "schema": {"type": "tree"}}}}, "response_format", "tree"),
        ({"extra_body": {"structured_outputs": {"regex": "(a"}}}, "structured_outputs",
         "unclosed group"),
        ({"extra_body": {"guided_grammar": "start: x"}}, "guided_grammar", "unknown name"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
async def test_what_cannot_be_followed_is_a_bad_request(
    api: Driver, body: dict[str, Any], param: str, words: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await api.chat(messages=ASK, stream=stream, **CALL, **body)
    assert caught.value.param == param
    assert words in caught.value.message


# Tool calls


async def test_required_tools_are_called_validly(api: Driver) -> None:
    # Room for a few calls: the model knows no end, and would go on to any limit.
    body = {**CALL, "max_completion_tokens": 110}
    answer = await api.chat(messages=ASK, tools=[TIME], tool_choice="required", seed=1, **body)
    choice = answer.choices[0]
    calls = choice.message.tool_calls
    assert choice.message.content is None
    assert 1 <= len(calls) <= 16
    assert len({call.id for call in calls}) == len(calls)
    # A model that knows no end may call until it is cut off.
    if choice.finish_reason == "length":
        calls = calls[:-1]
    else:
        assert choice.finish_reason == "tool_calls"
    for call in calls:
        assert call.id.startswith("call_")
        check_arguments(call.function.name, call.function.arguments)


async def test_one_call_where_several_are_not_wanted(api: Driver) -> None:
    answer = await api.chat(
        messages=ASK, tools=[WEATHER, TIME], tool_choice="required", seed=1, n=3,
        parallel_tool_calls=False, **CALL,
    )  # fmt: skip
    assert [len(choice.message.tool_calls) for choice in answer.choices] == [1, 1, 1]


async def test_a_named_tool(api: Driver) -> None:
    answer = await api.chat(
        messages=ASK,
        tools=[WEATHER, TIME],
        tool_choice={"type": "function", "function": {"name": "get_time"}},
        n=2,
        seed=5,
        **CALL,
    )
    for choice in answer.choices:
        (call,) = choice.message.tool_calls
        assert call.function.name == "get_time"
        check_arguments(call.function.name, call.function.arguments)


async def test_streamed_calls_are_what_is_answered_whole(api: Driver) -> None:
    body: dict[str, Any] = {
        **CALL, "messages": ASK, "tools": [WEATHER, TIME], "tool_choice": "required", "seed": 8,
        "parallel_tool_calls": False,
    }  # fmt: skip
    whole = (await api.chat(**body)).choices[0].message.tool_calls
    chunks = await api.stream_chat(**body)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "tool_calls"
    names: list[str] = []
    arguments: list[str] = []
    for chunk in chunks:
        for call in chunk.choices[0].delta.tool_calls or ():
            if call.id is not None:
                assert call.index == len(names)
                assert call.type == "function"
                assert call.function.arguments == ""
                names.append(call.function.name)
                arguments.append("")
            else:
                assert call.function.name is None
                assert call.index == len(names) - 1
                arguments[call.index] += call.function.arguments
    assert len(chunks) > 2 + 2 * len(names)
    assert list(zip(names, arguments, strict=True)) == [
        (call.function.name, call.function.arguments) for call in whole
    ]


async def test_the_client_s_own_helpers(api: Driver) -> None:
    tool = openai.pydantic_function_tool(GetWeather)
    parsed = await result(
        api.client.chat.completions.parse(
            messages=ASK, tools=[tool], tool_choice="required", parallel_tool_calls=False, **CALL
        )
    )
    (call,) = parsed.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, GetWeather)
    async with entered(
        api.client.chat.completions.stream(
            messages=ASK, tools=[tool], tool_choice="required", parallel_tool_calls=False, **CALL
        )
    ) as stream:
        events = await collect(stream)
        final = await result(stream.get_final_completion())
    (call,) = final.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, GetWeather)
    done = [e for e in events if e.type == "tool_calls.function.arguments.done"]
    assert len(done) == 1
    assert done[0].arguments == call.function.arguments


async def test_a_conversation_with_results(api: Driver) -> None:
    first = await api.chat(
        messages=ASK, tools=[WEATHER, TIME], tool_choice="required", seed=1,
        parallel_tool_calls=False, **CALL,
    )  # fmt: skip
    message = first.choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "42"} for call in message.tool_calls
    ]
    answer = await api.chat(
        messages=[*ASK, message.model_dump(exclude_none=True), *results],
        tools=[WEATHER, TIME],
        model=DEMO_MODEL,
        max_completion_tokens=8,
    )
    assert answer.usage.prompt_tokens > first.usage.prompt_tokens
    assert answer.choices[0].finish_reason in ("stop", "length")


async def test_json_or_calls(api: Driver) -> None:
    answer = await result(
        api.client.chat.completions.parse(
            messages=ASK, tools=[openai.pydantic_function_tool(GetWeather)],
            response_format=Person, parallel_tool_calls=False, seed=1, n=2, **CALL,
        )
    )  # fmt: skip
    assert len(answer.choices) == 2
    for message in (choice.message for choice in answer.choices):
        if message.tool_calls:
            assert isinstance(message.tool_calls[0].function.parsed_arguments, GetWeather)
        else:
            assert isinstance(message.parsed, Person)
