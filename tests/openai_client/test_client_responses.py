"""`/v1/responses` and `/v1/conversations` of a builtin model, with the real client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from harness.openai_client import Driver, collect, entered, result
from harness.processes import DEMO_MODEL
from harness.scripted_upstream import ScriptedUpstream, document, event_stream

GREEDY: dict[str, Any] = {"model": DEMO_MODEL, "temperature": 0}
ENDLESS = {"extra_body": {"ignore_eos": True}}
STORY = "Tell me a story about a parrot that flew over the sea to find a new home. " * 4


async def create(api: Driver, **body: Any) -> Any:
    return await result(api.client.responses.create(**{**GREEDY, **body}))


async def test_shape_of_a_response(api: Driver) -> None:
    answer = await create(api, input="Hello!", max_output_tokens=16, **ENDLESS)
    assert answer.id.startswith("resp_")
    assert answer.object == "response"
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output_text
    assert answer.usage.output_tokens == 16
    assert answer.usage.total_tokens == answer.usage.input_tokens + 16
    assert answer.usage.output_tokens_details.reasoning_tokens == 0
    assert answer._request_id.startswith("req_")


async def test_is_the_chat(api: Driver) -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello!"}]
    chat = await api.chat(messages=messages, max_completion_tokens=16, **GREEDY)
    answer = await create(api, input="Hello!", instructions="Be kind.", max_output_tokens=16)
    assert answer.output_text == chat.choices[0].message.content
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    assert answer.usage.output_tokens == chat.usage.completion_tokens


async def test_stream_is_the_answer(api: Driver) -> None:
    whole = await create(api, input="Hello!", max_output_tokens=24, store=False)
    events = await collect(await create(api, input="Hello!", max_output_tokens=24, stream=True))
    kinds = [event.type for event in events]
    middle = kinds.count("response.output_text.delta")
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * middle,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        f"response.{whole.status}",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(texts) == whole.output_text == events[-1].response.output_text
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens


async def test_accumulator(api: Driver) -> None:
    """The client's own helper, which checks order and identities (3.x strictly)."""
    body = {**GREEDY, "input": "Hello!", "extra_body": {"stop": ["."]}}
    async with entered(api.client.responses.stream(**body)) as stream:
        events = await collect(stream)
        final = await result(stream.get_final_response())
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert deltas[-1].snapshot == final.output_text
    assert final.status == "completed"
    kept = await result(api.client.responses.retrieve(final.id))
    assert kept.output_text == final.output_text


async def test_chain_finds_its_prefix_in_the_cache(api: Driver) -> None:
    first = await create(api, input=STORY, max_output_tokens=32, **ENDLESS)
    second = await create(
        api, input="And then?", previous_response_id=first.id, max_output_tokens=16
    )
    assert second.previous_response_id == first.id
    # All of the first prompt, but for what does not fill a block.
    cached = second.usage.input_tokens_details.cached_tokens
    assert 0 < cached < second.usage.input_tokens
    assert cached >= first.usage.input_tokens - 32
    third = await create(
        api, input="And then?", previous_response_id=second.id, max_output_tokens=16
    )
    assert third.usage.input_tokens_details.cached_tokens > cached
    items = await collect(await result(api.client.responses.input_items.list(third.id)))
    assert [item.role for item in items] == ["user", "assistant", "user", "assistant", "user"]


async def test_retrieve_delete_and_unknown(api: Driver) -> None:
    answer = await create(api, input="Hello!", max_output_tokens=16, metadata={"a": "b"})
    kept = await result(api.client.responses.retrieve(answer.id))
    assert kept.model_dump() == answer.model_dump()
    again = await result(api.client.responses.retrieve(answer.id, stream=True))
    assert (await collect(again))[-1].response.output_text == answer.output_text
    with pytest.raises(openai.BadRequestError):
        await result(api.client.responses.cancel(answer.id))
    await result(api.client.responses.delete(answer.id))
    for ask in (api.client.responses.retrieve, api.client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            await result(ask(answer.id))
    with pytest.raises(openai.NotFoundError) as gone:
        await create(api, input="x", previous_response_id=answer.id)
    assert gone.value.param == "previous_response_id"


WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


async def test_tools(api: Driver) -> None:
    """A small model cannot choose to call; kept to a call, it makes a valid one."""
    only_one = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    first = await create(api, input="How is the weather?", **only_one)
    (call,) = first.output
    assert (call.type, call.name, first.status) == ("function_call", "weather", "completed")
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
    events = await collect(await create(api, input="How is it?", stream=True, **only_one))
    pieces = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == events[-1].response.output[0].arguments
    body = {**GREEDY, **only_one, "input": "How is it?"}
    async with entered(api.client.responses.stream(**body)) as stream:
        await collect(stream)
        final = await result(stream.get_final_response())
    assert json.loads(final.output[0].arguments)["city"] in ("Paris", "Rome")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    second = await create(
        api, input=[output], previous_response_id=first.id, tools=[WEATHER], max_output_tokens=16
    )
    items = await collect(await result(api.client.responses.input_items.list(second.id)))
    assert [item.type for item in items] == ["function_call_output", "function_call", "message"]


async def test_custom_tools_with_grammars(api: Driver) -> None:
    sums = 'start: NUMBER ("+" NUMBER)+\nNUMBER: /[0-9]{1,2}/\n'
    for syntax, definition in (("lark", sums), ("regex", "[0-9]{1,2}[+][0-9]{1,2}")):
        grammar = {"type": "grammar", "syntax": syntax, "definition": definition}
        tool = {"type": "custom", "name": "calculate", "format": grammar}
        answer = await create(
            api,
            input="One and one?",
            tools=[tool],
            tool_choice={"type": "custom", "name": "calculate"},
            max_output_tokens=80,
        )
        (call,) = answer.output
        assert (call.type, call.name) == ("custom_tool_call", "calculate")
        assert all(number.isdigit() for number in call.input.split("+"))
        assert "+" in call.input


async def test_compact(api: Driver) -> None:
    # The model has little to say to that; a story's summary would go on to the limit.
    made = await result(api.client.responses.compact(model=DEMO_MODEL, input="Hello!"))
    (item,) = made.output
    assert item.type == "compaction"
    assert made.usage.output_tokens > 0
    more = [{"type": item.type, "encrypted_content": item.encrypted_content}]
    more.append({"role": "user", "content": "And then?"})
    answer = await create(api, input=more, max_output_tokens=16)
    assert answer.usage.input_tokens > made.usage.output_tokens


async def test_background(api: Driver) -> None:
    queued = await create(api, input="Hello!", background=True, max_output_tokens=16)
    assert queued.status == "queued"
    stream = await result(api.client.responses.retrieve(queued.id, stream=True))
    events = await collect(stream)
    assert [event.type for event in events[:3]] == [
        "response.created", "response.queued", "response.in_progress",
    ]  # fmt: skip
    done = await result(api.client.responses.retrieve(queued.id))
    assert done.status in ("completed", "incomplete")
    assert done.output_text == events[-1].response.output_text
    rest = await result(
        api.client.responses.retrieve(queued.id, stream=True, starting_after=len(events) - 2)
    )
    assert [event.type for event in await collect(rest)] == [events[-1].type]
    endless = await create(api, input="Hello!", background=True, **ENDLESS)
    cancelled = await result(api.client.responses.cancel(endless.id))
    assert cancelled.status == "cancelled"


async def test_conversation(api: Driver) -> None:
    made = await result(
        api.client.conversations.create(
            items=[{"type": "message", "role": "user", "content": "I am Tom."}]
        )
    )
    first = await create(api, input="Hello!", conversation=made.id, max_output_tokens=16)
    assert first.conversation.id == made.id
    await create(api, input="Bye!", conversation=made.id, max_output_tokens=16)
    listed = await result(api.client.conversations.items.list(made.id, order="asc", limit=2))
    items = await collect(listed)
    assert [item.role for item in items] == ["user", "user", "assistant", "user", "assistant"]
    await result(api.client.conversations.delete(made.id))
    with pytest.raises(openai.NotFoundError):
        await result(api.client.conversations.retrieve(made.id))


async def test_input_tokens(api: Driver) -> None:
    answer = await create(api, input=STORY, max_output_tokens=16)
    counted = await result(api.client.responses.input_tokens.count(model=DEMO_MODEL, input=STORY))
    assert counted.input_tokens == answer.usage.input_tokens


async def test_refusals_name_the_field(api: Driver) -> None:
    for body in ({"prompt": {"id": "pmpt_1"}}, {"tools": [{"type": "web_search"}]}):
        with pytest.raises(openai.BadRequestError) as caught:
            await create(api, input="x", **body)  # type: ignore[arg-type]
        assert caught.value.param == next(iter(body))
        assert caught.value.code == "unsupported_parameter"


async def test_upstreams_have_their_own(through: Driver, upstream: ScriptedUpstream) -> None:
    """Models and ids that are not ours go to the upstream, as they came."""
    model = upstream.script(document({"id": "resp_theirs", "object": "response", "x": 1}))
    raw = await result(
        through.client.responses.with_raw_response.create(
            model=model, input="Hello!", previous_response_id="resp_earlier", background=True
        )
    )
    content = raw.content if hasattr(raw, "content") else raw.read()
    assert json.loads(content) == {"id": "resp_theirs", "object": "response", "x": 1}
    (call,) = upstream.calls(model)
    assert call.json["previous_response_id"] == "resp_earlier"
    assert call.json["background"] is True
    events = b'event: response.created\ndata: {"type":"response.created"}\n\n'
    model = upstream.script(
        event_stream(events + b'data: {"type":"response.completed","sequence_number":1}\n\n')
    )
    async with entered(
        through.client.responses.with_streaming_response.create(
            model=model, input="Hello!", stream=True
        )
    ) as response:
        body = await result(response.read())
    assert body.startswith(events)
