"""`/v1/completions` of the demo model and a scripted engine, by the real client and plain HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from harness.openai_client import Driver, fields_of, result
from harness.processes import DEMO_MODEL

if TYPE_CHECKING:
    from harness.raw_client import Either

PROMPT = "Once upon a time"
GREEDY: dict[str, Any] = {"model": DEMO_MODEL, "temperature": 0}
#: So that every test generates what it asked for, whatever the model feels like.
ENDLESS = {"extra_body": {"ignore_eos": True}}


async def token_ids_of(api: Either, prompt: str) -> list[int]:
    answer = await api.complete(
        model=DEMO_MODEL, prompt=prompt, max_tokens=1, extra_body={"return_token_ids": True}
    )
    ids: list[int] = answer.choices[0].prompt_token_ids
    return ids


async def test_shape_of_an_answer(either: Either) -> None:
    answer = await either.complete(model=DEMO_MODEL, prompt=PROMPT, **ENDLESS)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.model == DEMO_MODEL
    assert [choice.index for choice in answer.choices] == [0]
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs is None
    assert answer.usage.completion_tokens == 16  # OpenAI's default of max_tokens
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 16
    assert answer._request_id.startswith("req_")


async def test_an_alias_answers_under_the_name_that_was_asked_for(either: Either) -> None:
    answer = await either.complete(model="gpt-4o", prompt=PROMPT, temperature=0)
    own = await either.complete(prompt=PROMPT, **GREEDY)
    assert answer.model == "gpt-4o"
    assert answer.choices[0].text == own.choices[0].text


async def test_several_choices_of_several_prompts_flatten_in_order(either: Either) -> None:
    answer = await either.complete(
        model=DEMO_MODEL, prompt=[PROMPT, "Tom"], n=2, max_tokens=4, echo=True, **ENDLESS
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    starts = [choice.text.startswith(PROMPT) for choice in answer.choices]
    assert starts == [True, True, False, False]
    assert answer.usage.completion_tokens == 16
    ids = await token_ids_of(either, PROMPT), await token_ids_of(either, "Tom")
    assert answer.usage.prompt_tokens == sum(map(len, ids))


async def test_echo_with_logprobs(loosely: Either) -> None:
    answer = await loosely.complete(
        prompt=PROMPT, echo=True, logprobs=3, max_tokens=5, **GREEDY, **ENDLESS
    )
    choice, logprobs = answer.choices[0], answer.choices[0].logprobs
    prompt_tokens = answer.usage.prompt_tokens
    assert choice.text.startswith(PROMPT)
    count = prompt_tokens + 5
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == count
    assert len(logprobs.top_logprobs) == len(logprobs.text_offset) == count
    assert logprobs.token_logprobs[0] is None
    assert logprobs.top_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    assert all(3 <= len(top) <= 4 for top in logprobs.top_logprobs[1:])
    assert logprobs.text_offset[0] == 0
    assert logprobs.text_offset == sorted(logprobs.text_offset)
    offset = logprobs.text_offset[prompt_tokens]
    assert choice.text[:offset] == PROMPT
    # Greedy: each generated token is the likeliest one.
    for token, own, top in zip(
        logprobs.tokens[prompt_tokens:],
        logprobs.token_logprobs[prompt_tokens:],
        logprobs.top_logprobs[prompt_tokens:],
        strict=True,
    ):
        assert top[token] == own == max(top.values())


async def test_scoring_a_prompt_without_generating(loosely: Either) -> None:
    scored = await loosely.complete(
        model=DEMO_MODEL, prompt=PROMPT, max_tokens=0, echo=True, logprobs=1
    )
    assert scored.choices[0].text == PROMPT
    assert scored.choices[0].finish_reason == "length"
    assert scored.usage.completion_tokens == 0
    chunks = await loosely.stream_completion(
        model=DEMO_MODEL, prompt=PROMPT, max_tokens=0, echo=True, logprobs=1
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == PROMPT
    assert chunks[-1].choices[0].finish_reason == "length"
    longer = await loosely.complete(prompt=PROMPT, max_tokens=1, echo=True, logprobs=1, **GREEDY)
    first = scored.choices[0].logprobs.token_logprobs
    assert len(first) == scored.usage.prompt_tokens
    assert longer.choices[0].logprobs.token_logprobs[1 : len(first)] == pytest.approx(
        first[1:], abs=1e-4
    )


async def test_a_seed_repeats_itself(either: Either) -> None:
    async def texts(seed: int) -> list[str]:
        answer = await either.complete(
            model=DEMO_MODEL, prompt=PROMPT, seed=seed, n=2, temperature=1.5, max_tokens=12,
            **ENDLESS,
        )  # fmt: skip
        return [choice.text for choice in answer.choices]

    first = await texts(7)
    assert first == await texts(7)
    assert first[0] != first[1]
    assert first != await texts(8)


async def test_stop_strings_end_the_text_and_are_not_part_of_it(loosely: Either) -> None:
    whole = (await loosely.complete(prompt=PROMPT, max_tokens=30, **GREEDY)).choices[0].text
    stop = whole[len(whole) // 2 :][:3]
    cut = await loosely.complete(prompt=PROMPT, max_tokens=30, stop=stop, **GREEDY)
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].text == whole[: whole.index(stop)]
    several = await loosely.complete(prompt=PROMPT, max_tokens=30, stop=["\x00", stop], **GREEDY)
    assert several.choices[0].text == cut.choices[0].text
    streamed = await loosely.stream_completion(prompt=PROMPT, max_tokens=30, stop=stop, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in streamed) == cut.choices[0].text


async def test_logit_bias_forces_and_forbids(api: Driver) -> None:
    wanted = (await token_ids_of(api, " dog"))[-1]

    async def ids(bias: dict[str, int]) -> list[int]:
        answer = await api.complete(
            prompt=PROMPT, max_tokens=6, logit_bias=bias, **GREEDY,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )  # fmt: skip
        tokens: list[int] = answer.choices[0].token_ids
        return tokens

    assert await ids({str(wanted): 100}) == [wanted] * 6
    likeliest = (await ids({}))[0]
    assert likeliest not in await ids({str(likeliest): -100})


async def test_frequency_penalty_pushes_repetition_away(api: Driver) -> None:
    pair = [(await token_ids_of(api, word))[-1] for word in (" dog", " cat")]

    async def ids(**penalty: float) -> list[int]:
        answer = await api.complete(
            prompt=PROMPT, max_tokens=30, logit_bias={str(token): 100 for token in pair},
            **penalty, **GREEDY, extra_body={"return_token_ids": True, "ignore_eos": True},
        )  # fmt: skip
        tokens: list[int] = answer.choices[0].token_ids
        return tokens

    plain, frequency = await ids(), await ids(frequency_penalty=2)
    assert set(plain) <= set(pair)
    assert set(frequency) == set(pair)
    # The counts must balance the more, the longer the answer: 2 per occurrence.
    difference = abs(frequency.count(pair[0]) - frequency.count(pair[1]))
    assert difference < abs(plain.count(pair[0]) - plain.count(pair[1]))
    assert set(await ids(presence_penalty=2)) <= set(pair)


async def test_extensions_through_extra_body(api: Driver) -> None:
    greedy = await api.complete(prompt=PROMPT, max_tokens=8, **GREEDY)
    narrow = await api.complete(
        model=DEMO_MODEL, prompt=PROMPT, max_tokens=8, temperature=1.0, extra_body={"top_k": 1}
    )
    assert narrow.choices[0].text == greedy.choices[0].text


async def test_a_stream_says_the_same(loosely: Either) -> None:
    whole = await loosely.complete(prompt=PROMPT, max_tokens=24, **GREEDY, **ENDLESS)
    chunks = await loosely.stream_completion(
        prompt=PROMPT, max_tokens=24, stream_options={"include_usage": True}, **GREEDY, **ENDLESS
    )
    *spoken, last = chunks
    assert {chunk.object for chunk in chunks} == {"text_completion"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert "".join(chunk.choices[0].text for chunk in spoken) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in spoken[:-1]] == [None] * (len(spoken) - 1)
    assert spoken[-1].choices[0].finish_reason == "length"
    assert all("usage" in fields_of(chunk) and chunk.usage is None for chunk in spoken)
    assert last.choices == []
    assert last.usage.completion_tokens == 24
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens


async def test_a_stream_of_many(loosely: Either) -> None:
    body: dict[str, Any] = {
        "prompt": [PROMPT, "Tom"], "n": 2, "max_tokens": 6, "echo": True, "logprobs": 1,
        "seed": 3, "model": DEMO_MODEL, **ENDLESS,
    }  # fmt: skip
    whole = await loosely.complete(**body)
    chunks = await loosely.stream_completion(**body)
    for choice in whole.choices:
        mine = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert "".join(part.text for part in mine) == choice.text
        tokens = [token for part in mine if part.logprobs for token in part.logprobs.tokens]
        assert tokens == choice.logprobs.tokens
        offsets = [o for part in mine if part.logprobs for o in part.logprobs.text_offset]
        assert offsets == choice.logprobs.text_offset
        assert mine[-1].finish_reason == "length"


async def test_text_is_never_cut_inside_a_character(loosely: Either) -> None:
    prompt = "Grüße 🦜🦜 日本"
    body = {"model": DEMO_MODEL, "prompt": prompt, "echo": True, "max_tokens": 30, "seed": 2,
            "temperature": 2, **ENDLESS}  # fmt: skip
    streamed = await loosely.stream_completion(**body)
    whole = await loosely.complete(**body)
    text = "".join(chunk.choices[0].text for chunk in streamed)
    assert text == whole.choices[0].text
    assert text.startswith(prompt)


async def test_headers_through_with_raw_response(api: Driver) -> None:
    raw = await result(
        api.client.completions.with_raw_response.create(prompt=PROMPT, max_tokens=2, **GREEDY)
    )
    assert raw.status_code == 200
    assert raw.headers["content-type"] == "application/json"
    assert raw.headers["openai-version"] == "2020-10-01"
    assert raw.headers["openai-processing-ms"].isdigit()
    parsed = await result(raw.parse())
    assert parsed._request_id == raw.headers["x-request-id"] == raw.request_id
