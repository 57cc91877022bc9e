"""`POST /v1/completions` on an engine of our own, through a socket and the real client."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import openai
import pytest
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.serving import Service, serving
from parrot_engine.protocol import Failed, Fill, Generate, SamplingParams, TokenLogprobs


def fills(engine: ScriptedRemoteEngine) -> list[Fill]:
    return [item for item in engine.submitted if isinstance(item, Fill)]


def generates(engine: ScriptedRemoteEngine) -> list[Generate]:
    return [item for item in engine.submitted if isinstance(item, Generate)]


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        ("the fox", ["the fox"]),
        (["the", "fox"], ["the", "fox"]),
        ([[5, 6], [7]], [[5, 6], [7]]),
        ([5, 6, 7], [[5, 6, 7]]),
        (None, [[288]]),
        ("", [[288]]),
    ],
)
async def test_prompt_forms(
    service: Service, engine: ScriptedRemoteEngine, prompt: Any, wanted: list[Any]
) -> None:
    assert engine.tokenizer.bos_token_id == engine.tokenizer.token_id("<|endoftext|>")
    start = [engine.tokenizer.bos_token_id]
    expected = [engine.tokenizer.encode(item) if isinstance(item, str) else item for item in wanted]
    expected = [start if item == [288] else item for item in expected]
    answer = await service.complete(prompt=prompt)
    assert [fill.token_ids for fill in fills(engine)] == expected
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))


async def test_a_missing_prompt_is_the_default_one(
    service: Service, engine: ScriptedRemoteEngine
) -> None:
    await service.complete()
    assert fills(engine)[0].token_ids == [engine.tokenizer.bos_token_id]


async def test_messages_without_a_prompt_are_sent_to_the_right_route(service: Service) -> None:
    messages = [{"role": "user", "content": "Hello."}]
    status, _, answer = await service.post("/v1/completions", {"model": "m", "messages": messages})
    assert status == 400
    error = json.loads(answer)["error"]
    assert error["param"] == "prompt"
    assert "/v1/chat/completions" in error["message"]


async def test_batch_keeps_its_order() -> None:
    engine = ScriptedRemoteEngine()

    def script(prompt: list[int], sampling: SamplingParams) -> list[int]:
        # Later prompts are done earlier.
        text = engine.tokenizer.decode(prompt)
        return engine.text(text * (6 - len(text)))

    engine.script = script
    async with serving(engine) as service:
        answer = await service.complete(prompt=["a", "bb", "ccc"], n=2, max_tokens=50)
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == ["aaaaa"] * 2 + ["bbbbbbbb"] * 2 + ["ccccccccc"] * 2
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert engine.contexts == {}


async def test_default_is_sixteen_tokens(service: Service, engine: ScriptedRemoteEngine) -> None:
    engine.script = lambda prompt, sampling: engine.text("abcdefghijklmnopqrstuvwxyz")
    answer = await service.complete(prompt="x")
    assert answer["choices"][0]["text"] == "abcdefghijklmnop"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 16


async def test_n_fills_once_and_forks(service: Service, engine: ScriptedRemoteEngine) -> None:
    answer = await service.complete(prompt="Hi", n=3, seed=11)
    assert len(fills(engine)) == 1
    parents = {item.parent_context_id for item in generates(engine)}
    assert parents == {fills(engine)[0].context_id}
    seeds = [item.sampling.seed for item in generates(engine)]
    assert seeds[0] == 11
    assert len(set(seeds)) == 3
    assert len(answer["choices"]) == 3
    assert answer["usage"]["prompt_tokens"] == 2
    assert answer["usage"]["completion_tokens"] == 9


async def test_one_choice_runs_on_the_context_of_its_prompt(
    service: Service, engine: ScriptedRemoteEngine
) -> None:
    await service.complete(prompt="Hi")
    assert generates(engine)[0].parent_context_id is None
    assert generates(engine)[0].context_id == fills(engine)[0].context_id


async def test_best_of_answers_the_likeliest() -> None:
    engine = ScriptedRemoteEngine()
    # The double gives every token -0.5; here a candidate's own logprob tells it apart.
    values = {3: -0.1, 1: -0.2, 0: -0.3, 2: -0.4}
    order: list[int | None] = []

    def script(prompt: list[int], sampling: SamplingParams) -> list[int]:
        order.append(sampling.seed)
        return engine.text(chr(ord("a") + len(order) - 1))

    def logprobs(token_id: int, top: int) -> TokenLogprobs:
        text = engine.tokenizer.token_text(token_id)
        return TokenLogprobs(token_id, values.get(ord(text[0]) - ord("a"), -0.0))

    engine.script = script
    engine._logprobs = logprobs  # type: ignore[method-assign]
    async with serving(engine) as service:
        answer = await service.complete(prompt="x", n=2, best_of=4, seed=1)
    assert [choice["text"] for choice in answer["choices"]] == ["d", "b"]
    assert [choice["logprobs"] for choice in answer["choices"]] == [None, None]
    # All candidates count.
    assert answer["usage"]["completion_tokens"] == 8


async def test_best_of_compares_means_so_that_length_does_not_count() -> None:
    engine = ScriptedRemoteEngine()
    # The short text is likelier as a whole (-1 against -2), the long one by the token.
    values = {"a": -1.0, "b": -0.5, "<|im_end|>": 0.0}

    def logprobs(token_id: int, top: int) -> TokenLogprobs:
        return TokenLogprobs(token_id, values[engine.tokenizer.token_text(token_id)])

    engine.script = lambda prompt, sampling: engine.text("a" if sampling.seed == 1 else "bbbb")
    engine._logprobs = logprobs  # type: ignore[method-assign]
    async with serving(engine) as service:
        answer = await service.complete(prompt="x", best_of=2, seed=1)
    assert [choice["text"] for choice in answer["choices"]] == ["bbbb"]


async def test_what_follows_a_stop_string_counts_for_nothing() -> None:
    engine = ScriptedRemoteEngine(tokens_per_step=8)
    values = {"a": -0.5, "b": -1.0, "#": -0.5, "z": -9.0, "<|im_end|>": 0.0}

    def logprobs(token_id: int, top: int) -> TokenLogprobs:
        return TokenLogprobs(token_id, values[engine.tokenizer.token_text(token_id)])

    engine.script = lambda prompt, sampling: engine.text("a#zz" if sampling.seed == 1 else "b")
    engine._logprobs = logprobs  # type: ignore[method-assign]
    async with serving(engine) as service:
        best = await service.complete(prompt="x", best_of=2, seed=1, stop="#")
        alone = await service.complete(prompt="x", seed=1, stop="#", return_token_ids=True)
    assert [choice["text"] for choice in best["choices"]] == ["a"]
    assert alone["choices"][0]["token_ids"] == engine.text("a#", end=False)
    assert alone["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_scoring(service: Service, engine: ScriptedRemoteEngine, max_tokens: int) -> None:
    """Evaluation harnesses expect one entry for every token of the prompt, and k more."""
    engine.script = lambda prompt, sampling: [engine.im_end]
    answer = await service.complete(
        prompt=[[84, 85, 86]], echo=True, logprobs=1, max_tokens=max_tokens
    )
    logprobs = answer["choices"][0]["logprobs"]
    for values in logprobs.values():
        assert len(values) == 3 + max_tokens
    assert answer["choices"][0]["text"] == engine.tokenizer.decode([84, 85, 86])
    assert answer["choices"][0]["finish_reason"] == ("stop" if max_tokens else "length")
    assert answer["usage"]["completion_tokens"] == max_tokens
    if max_tokens == 0:
        assert generates(engine) == []


async def test_special_ids_are_echoed(service: Service, engine: ScriptedRemoteEngine) -> None:
    ids = engine.tokenizer.encode("a<|im_end|>b", add_special_tokens=False)
    answer = await service.complete(prompt=ids, echo=True, logprobs=0, max_tokens=0)
    choice = answer["choices"][0]
    assert choice["text"] == "a<|im_end|>b"
    assert choice["logprobs"]["text_offset"] == [0, 1, len("a<|im_end|>")]


async def test_no_tokens_without_echo(service: Service) -> None:
    answer = await service.complete(prompt="Hi", max_tokens=0, n=2)
    assert [choice["text"] for choice in answer["choices"]] == ["", ""]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 2


async def test_a_stop_string_ends_its_candidate_only(
    service: Service, engine: ScriptedRemoteEngine
) -> None:
    engine.automatic = False
    texts = iter(["aSTOPbbbbbbbb", "cccccccccccc"])
    engine.script = lambda prompt, sampling: engine.text(next(texts))
    task = asyncio.create_task(service.complete(prompt="x", n=2, stop="STOP", max_tokens=50))
    await engine.wait_for(lambda: len(generates(engine)) == 2)
    for _ in range(4):
        engine.step()
    # Both children and the parent; the first child is freed while the second still runs.
    await engine.wait_for(lambda: len(engine.contexts) == 2)
    engine.automatic = True
    engine.step()
    answer = await task
    assert [choice["text"] for choice in answer["choices"]] == ["a", "cccccccccccc"]


async def test_logprobs_end_with_the_text(service: Service, engine: ScriptedRemoteEngine) -> None:
    engine.script = lambda prompt, sampling: engine.text("ab STOP more")
    answer = await service.complete(prompt="x", stop="STOP", max_tokens=50, logprobs=0)
    choice = answer["choices"][0]
    assert choice["text"] == "ab "
    assert choice["logprobs"]["tokens"] == ["a", "b", " "]


async def test_sampling_reaches_the_engine(service: Service, engine: ScriptedRemoteEngine) -> None:
    as_given: dict[str, Any] = {
        "max_tokens": 3, "temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125,
        "presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.5,
        "ignore_eos": True, "min_tokens": 2, "logprobs": 1,
    }  # fmt: skip
    await service.complete(
        prompt="x",
        **as_given,
        logit_bias={"5": 100, "6": -100},
        seed=-1,
        stop_token_ids=[9],
        user="somebody",
        unheard_of={"deep": [1]},
    )
    assert generates(engine)[0].sampling == SamplingParams(
        **as_given, logit_bias={5: 100.0, 6: -100.0}, seed=2**63 - 1, stop_token_ids=(9,)
    )


async def test_open_fields_follow_the_checkpoint(
    service: Service, engine: ScriptedRemoteEngine
) -> None:
    from dataclasses import replace

    service.remote.info = replace(engine.info, default_sampling={"temperature": 0.6, "top_k": 20.0})
    await service.complete(prompt="x")
    await service.complete(prompt="x", temperature=0, top_p=0, top_k=-1)
    first, second = (item.sampling for item in generates(engine))
    assert 0 < second.top_p < 1e-6
    assert (first.temperature, first.top_p, first.top_k) == (0.6, 1.0, 20)
    assert (second.temperature, second.top_k) == (0.0, 0)


async def test_cached_tokens(service: Service, engine: ScriptedRemoteEngine) -> None:
    engine.cached_tokens = 2
    answer = await service.complete(prompt=["abcdef", "x"])
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 3


async def test_usage_of_a_stream(service: Service) -> None:
    async with service.client() as client:
        stream = await client.completions.create(
            model="m", prompt="Hi", stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (2, 3)
    assert chunks[-2].choices[0].finish_reason == "stop"


async def test_token_ids_on_request(service: Service, engine: ScriptedRemoteEngine) -> None:
    answer = await service.complete(prompt=[[5, 6]], return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == engine.text("Hello world")
    assert answer["choices"][0]["prompt_token_ids"] == [5, 6]


async def test_special_tokens_on_request(service: Service, engine: ScriptedRemoteEngine) -> None:
    engine.script = lambda prompt, sampling: engine.text("a<|im_start|>b")
    assert (await service.complete(prompt="x"))["choices"][0]["text"] == "ab"
    answer = await service.complete(prompt="x", skip_special_tokens=False)
    assert answer["choices"][0]["text"] == "a<|im_start|>b"


async def test_bytes_of_a_character_in_logprobs(
    service: Service, engine: ScriptedRemoteEngine
) -> None:
    engine.script = lambda prompt, sampling: engine.text("é!")
    answer = await service.complete(prompt="x", logprobs=0)
    logprobs = answer["choices"][0]["logprobs"]
    assert answer["choices"][0]["text"] == "é!"
    assert logprobs["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "!", "<|im_end|>"]
    assert logprobs["text_offset"] == [0, 0, 1, 2]


async def test_infinite_logprobs_are_the_sentinel(
    service: Service, engine: ScriptedRemoteEngine
) -> None:
    from parrot_engine.protocol import TokenLogprobs

    engine._logprobs = lambda token_id, top: TokenLogprobs(token_id, float("-inf"))  # type: ignore[method-assign]
    answer = await service.complete(prompt="x", logprobs=0, max_tokens=1)
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]


@pytest.mark.parametrize(
    ("code", "status", "answered"),
    [
        ("context_too_long", 400, "context_length_exceeded"),
        ("invalid_request", 400, None),
        ("numerical_error", 500, "numerical_error"),
        ("overloaded", 503, "engine_overloaded"),
        ("engine_error", 500, "engine_error"),
        ("unknown_context", 500, "engine_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_failures_before_the_first_token_are_statuses(
    service: Service,
    engine: ScriptedRemoteEngine,
    code: Any,
    status: int,
    answered: str | None,
    stream: bool,
) -> None:
    engine.script = lambda prompt, sampling: [Failed(0, code, "the engine's words")]
    async with service.client() as client:
        with pytest.raises(openai.APIStatusError) as caught:
            await client.completions.create(model="m", prompt="x", stream=stream)
    assert caught.value.status_code == status
    assert caught.value.code == answered
    assert caught.value.request_id is not None


@pytest.mark.parametrize("stream", [False, True])
async def test_a_lost_engine(service: Service, engine: ScriptedRemoteEngine, stream: bool) -> None:
    engine.automatic = False
    body = {"model": "m", "prompt": "x", "stream": stream}
    call = asyncio.create_task(service.post("/v1/completions", body))
    await engine.wait_for(lambda: len(engine.contexts) == 1)
    engine.step()
    # It says that it leaves, and so does not come back.
    service.gateway.registry.drain(service.remote.id)
    service.gateway.registry.remove(service.remote.id, "the link broke")
    status, headers, answer = await call
    assert status == 503
    assert b"retry-after" in headers
    assert b'"code":"engine_lost"' in answer
    # Nobody is left to be told to free them.
    engine.contexts.clear()
    engine._runs.clear()


async def test_deadline() -> None:
    engine = ScriptedRemoteEngine(automatic=False)
    async with serving(engine, call_timeout_s=0.05) as service:
        status, headers, body = await service.post("/v1/completions", {"model": "m", "prompt": "x"})
    assert status == 504
    assert headers[b"x-should-retry"] == b"false"
    assert b'"code":"timeout"' in body
    assert engine.contexts == {}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_hopeless_text_is_refused_before_it_is_tokenized(
    service: Service, engine: ScriptedRemoteEngine, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    def encode(text: str, **_: Any) -> list[int]:
        raise AssertionError("this costs seconds")

    monkeypatch.setattr(engine.tokenizer, "encode", encode)
    text = "the quick fox jumps. " * 10_000
    is_chat = path.endswith("chat/completions")
    prompt = {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
    status, _, body = await service.post(path, {"model": "m", **prompt})
    assert status == 400
    error = json.loads(body)["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == ("messages" if is_chat else "prompt")
    # Tokens of this vocabulary have at most 13 bytes.
    found = re.search(r"at least (\d+) tokens", error["message"])
    assert found is not None
    assert len(text) // 13 <= int(found[1]) <= len(text) // 13 + 20


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        # Wrong ids besides: what needs no look at each of them is told first.
        ([10**9] * 3000, "context_length_exceeded"),
        ([10**9] * 600, "context_length_exceeded"),
        ([[1], [10**9] * 600], "context_length_exceeded"),
        ([[10**9]] * 3000, "array_above_max_length"),
        (["x"] * 3000, "array_above_max_length"),
        ([10**9] * 6, "invalid_value"),
    ],
)
async def test_too_many_ids_are_counted_before_they_are_looked_at(
    service: Service, engine: ScriptedRemoteEngine, prompt: Any, code: str
) -> None:
    status, _, body = await service.post("/v1/completions", {"model": "m", "prompt": prompt})
    assert status == 400
    error = json.loads(body)["error"]
    assert (error["code"], error["param"]) == (code, "prompt")
    assert engine.submitted == []


async def test_a_long_prompt_does_not_hold_up_others(
    service: Service, engine: ScriptedRemoteEngine
) -> None:
    text = "the quick " * 5000
    status, _, body = await service.post("/v1/completions", {"model": "m", "prompt": text})
    assert status == 400
    assert b"context_length_exceeded" in body
    assert engine.submitted == []
