"""`/v1/chat/completions` of the demo model and a scripted engine, by the client and plain HTTP."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import openai
import pytest
from harness.openai_client import Driver, collect, entered, fields_of, first_of, result
from harness.processes import DEMO_MODEL, GatewayProcess, wait_until

if TYPE_CHECKING:
    from harness.raw_client import Either

ASK = [{"role": "user", "content": "Tell me a story."}]
GREEDY: dict[str, Any] = {"model": DEMO_MODEL, "temperature": 0}
ENDLESS = {"extra_body": {"ignore_eos": True}}


async def test_shape_of_an_answer(either: Either) -> None:
    answer = await either.chat(messages=ASK, max_completion_tokens=8, **GREEDY, **ENDLESS)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.message.refusal is None
    assert choice.finish_reason == "length"
    assert choice.logprobs is None
    assert {"logprobs", "refusal"} <= fields_of(choice) | fields_of(choice.message)
    assert answer.usage.prompt_tokens_details.cached_tokens < answer.usage.prompt_tokens
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0
    assert "service_tier" not in fields_of(answer)
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8
    assert answer._request_id.startswith("req_")


@pytest.mark.parametrize("role", ["system", "developer"])
async def test_roles(api: Driver, role: str) -> None:
    answer = await api.chat(
        messages=[
            {"role": role, "content": "You are brief."},
            {"role": "user", "content": "Hello.", "name": "tom"},
            {"role": "assistant", "content": "Good day."},
            {"role": "user", "content": "A story!"},
        ],
        max_completion_tokens=4,
        **GREEDY,
    )
    assert isinstance(answer.choices[0].message.content, str)


async def test_text_parts_are_text(either: Either) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": ASK[0]["content"]}]}]
    plain = await either.chat(messages=ASK, max_completion_tokens=8, **GREEDY)
    split = await either.chat(messages=parts, max_completion_tokens=8, **GREEDY)
    assert split.usage.prompt_tokens == plain.usage.prompt_tokens
    assert split.choices[0].message.content == plain.choices[0].message.content


async def test_logprobs(either: Either) -> None:
    answer = await either.chat(
        messages=ASK, logprobs=True, top_logprobs=4, max_completion_tokens=10, **GREEDY, **ENDLESS
    )
    entries = answer.choices[0].logprobs.content
    assert len(entries) == 10
    assert (
        b"".join(bytes(entry.bytes) for entry in entries).decode(errors="replace").strip()
        == answer.choices[0].message.content.strip()
    )
    for entry in entries:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 4
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert entry.top_logprobs[0].token == entry.token  # greedy
    none = await either.chat(messages=ASK, logprobs=True, max_completion_tokens=2, **GREEDY)
    assert [entry.top_logprobs for entry in none.choices[0].logprobs.content] == [[], []]


async def test_several_choices(either: Either) -> None:
    answer = await either.chat(
        model=DEMO_MODEL, messages=ASK, n=3, seed=5, temperature=1.5, max_completion_tokens=8,
        **ENDLESS,
    )  # fmt: skip
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1
    assert answer.usage.completion_tokens == 24


async def test_a_stream_says_the_same(either: Either) -> None:
    whole = await either.chat(messages=ASK, max_completion_tokens=24, **GREEDY, **ENDLESS)
    chunks = await either.stream_chat(
        messages=ASK, max_completion_tokens=24, stream_options={"include_usage": True},
        **GREEDY, **ENDLESS,
    )  # fmt: skip
    first, *middle, finish, usage = chunks
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert first.choices[0].delta.role == "assistant"
    assert first.choices[0].delta.content == ""
    assert all("role" not in fields_of(chunk.choices[0].delta) for chunk in [*middle, finish])
    text = "".join(
        getattr(chunk.choices[0].delta, "content", None) or "" for chunk in [*middle, finish]
    )
    assert text == whole.choices[0].message.content
    assert all(chunk.choices[0].finish_reason is None for chunk in [first, *middle])
    assert finish.choices[0].finish_reason == "length"
    assert usage.choices == []
    assert usage.usage.completion_tokens == 24
    assert usage.usage.prompt_tokens == whole.usage.prompt_tokens
    assert all("usage" in fields_of(chunk) and chunk.usage is None for chunk in chunks[:-1])
    for chunk in chunks:
        assert chunk.model == DEMO_MODEL
        assert chunk.created > 0


async def test_a_stream_of_several_choices(either: Either) -> None:
    *spoken, usage = await either.stream_chat(
        messages=ASK, max_completion_tokens=12, n=3, stream_options={"include_usage": True},
        **GREEDY, **ENDLESS,
    )  # fmt: skip
    for index, chunk in enumerate(spoken[:3]):
        (choice,) = chunk.choices
        assert choice.index == index
        assert (choice.delta.role, choice.delta.content) == ("assistant", "")
    for index in range(3):
        mine = [part for chunk in spoken for part in chunk.choices if part.index == index]
        assert [part.finish_reason for part in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason == "length"
        assert "content" not in fields_of(mine[-1].delta) or not mine[-1].delta.content
    assert usage.usage.completion_tokens == 36


async def test_a_stream_without_usage_has_none(either: Either) -> None:
    chunks = await either.stream_chat(messages=ASK, max_completion_tokens=4, **GREEDY)
    assert all(chunk.choices and "usage" not in fields_of(chunk) for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason is not None


async def test_streamed_logprobs_are_those_of_the_whole(either: Either) -> None:
    body: dict[str, Any] = {
        "messages": ASK, "logprobs": True, "top_logprobs": 2, "max_completion_tokens": 10,
        **GREEDY, **ENDLESS,
    }  # fmt: skip
    whole = await either.chat(**body)
    chunks = await either.stream_chat(**body)
    streamed = [
        entry.token
        for chunk in chunks
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert streamed == [entry.token for entry in whole.choices[0].logprobs.content]


#: Eleven tokens of text, then this id, which ends it: the helper takes no answer cut for length.
END = 70
ENDING = {
    "logit_bias": {str(END): 100},
    "extra_body": {"min_tokens": 11, "stop_token_ids": [END], "ignore_eos": True},
}


@pytest.mark.parametrize("n", [1, 3])
async def test_the_stream_helper(api: Driver, n: int) -> None:
    manager = api.client.chat.completions.stream(
        model=DEMO_MODEL, messages=ASK, n=n, seed=1, logprobs=True, max_completion_tokens=20,
        stream_options={"include_usage": True}, **ENDING,
    )  # fmt: skip
    async with entered(manager) as stream:
        events = await collect(stream)
        final = await result(stream.get_final_completion())
    kinds = {event.type for event in events}
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert [choice.index for choice in final.choices] == list(range(n))
    assert final.usage.completion_tokens == 12 * n
    done = [event.content for event in events if event.type == "content.done"]
    assert sorted(done) == sorted(choice.message.content for choice in final.choices)
    for choice in final.choices:
        assert choice.finish_reason == "stop"
        assert len(choice.logprobs.content) == 11


async def test_the_stream_helper_sees_that_an_answer_was_cut(api: Driver) -> None:
    manager = api.client.chat.completions.stream(
        model=DEMO_MODEL, messages=ASK, max_completion_tokens=5, **ENDLESS
    )
    async with entered(manager) as stream:
        await collect(stream)
        with pytest.raises(openai.LengthFinishReasonError):
            await result(stream.get_final_completion())


async def test_a_repeated_prompt_is_cached(api: Driver) -> None:
    words = " ".join(uuid.uuid4().hex for _ in range(4))
    messages = [{"role": "user", "content": f"Remember these words: {words}. Now a story."}]

    async def usage() -> Any:
        return (await api.chat(messages=messages, max_completion_tokens=2, **GREEDY)).usage

    first, second = await usage(), await usage()
    assert second.prompt_tokens == first.prompt_tokens
    before = first.prompt_tokens_details.cached_tokens
    cached = second.prompt_tokens_details.cached_tokens
    assert before < cached < second.prompt_tokens
    # Everything but the last, partial block (16 tokens each).
    assert cached >= (second.prompt_tokens - 1) // 16 * 16
    chunks = await api.stream_chat(
        messages=messages, max_completion_tokens=2, stream_options={"include_usage": True},
        **GREEDY,
    )  # fmt: skip
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == cached


@pytest.mark.parametrize("way", ["close", "with"])
async def test_closing_a_stream_cancels_the_call(
    api: Driver, demo: GatewayProcess, way: str
) -> None:
    stream = await api.chat(
        model=DEMO_MODEL, messages=ASK, stream=True, n=4, max_completion_tokens=300, **ENDLESS
    )
    if way == "with":
        async with entered(stream):
            await first_of(stream)
    else:
        await first_of(stream)
        await result(stream.close())

    def idle() -> bool:
        state = demo.health()
        return state["calls"]["running"] == 0 and state["engines"][0]["stats"]["contexts"] == 0

    wait_until(idle, "no calls and no contexts")
