"""Calls of thousands of prompts: fed to an engine in portions, in order, and freed as they end."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from harness.gateway.direct_placer import DirectPlacer
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.serving import serving
from harness.waiting import until
from parrot_engine.protocol import EngineInfo, Fill, SamplingParams

from parrot_gateway.backends.own.generate import Generation
from parrot_gateway.backends.own.remote import RemoteEngine
from parrot_gateway.backends.own.state import MAX_OPEN_CONTEXTS
from parrot_gateway.calls.generation_request import GenerationRequest, TokenizedPrompt
from parrot_gateway.exceptions import OverloadedError


def prompts(count: int) -> list[str]:
    return [f"<{number}>" for number in range(count)]


async def test_as_many_prompts_as_allowed_are_scored() -> None:
    engine = ScriptedRemoteEngine(cached_tokens=1)
    async with serving(engine) as service:
        texts = prompts(2048)
        answer = await service.complete(prompt=texts, echo=True, logprobs=0, max_tokens=0)
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert [choice["index"] for choice in answer["choices"]] == list(range(2048))
    assert all(choice["logprobs"]["tokens"] for choice in answer["choices"])
    counts = [len(engine.tokenizer.encode(text)) for text in texts]
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (sum(counts), 0)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2048
    assert engine.most_contexts <= MAX_OPEN_CONTEXTS


@pytest.mark.parametrize("stream", [False, True])
async def test_as_many_candidates_as_allowed(stream: bool) -> None:
    engine = ScriptedRemoteEngine()
    engine.script = lambda prompt, sampling: [prompt[1], engine.im_end]
    async with serving(engine) as service, service.client() as client:
        texts = prompts(1365)
        created: Any = await client.completions.create(
            model="m", prompt=texts, n=3, stream=stream, max_tokens=2
        )
        found = [""] * (3 * 1365)
        async for chunk in created if stream else _once(created):
            for choice in chunk.choices:
                found[choice.index] += choice.text
    # Each is continued with its own first digit.
    assert found == [text[1] for text in texts for _ in range(3)]
    assert engine.most_contexts <= MAX_OPEN_CONTEXTS


async def _once(item: Any) -> Any:
    yield item


async def test_leaving_in_a_later_portion_frees_everything() -> None:
    engine = ScriptedRemoteEngine(
        lambda prompt, sampling: [65] * (1000 if prompt[1] == ord("7") else 1)
    )
    async with serving(engine) as service:
        body = {"model": "m", "prompt": prompts(2000), "max_tokens": 400}
        _, writer = await service.send("/v1/completions", json.dumps(body).encode())
        fills = engine.submitted
        await engine.wait_for(lambda: sum(isinstance(item, Fill) for item in fills) > 600)
        assert engine.contexts
        writer.transport.abort()
        await engine.wait_for(lambda: not engine.contexts)
        assert sum(isinstance(item, Fill) for item in fills) < 2000
        await until(lambda: not service.gate.running)


async def test_a_huge_call_leaves_room_for_others() -> None:
    engine = ScriptedRemoteEngine(lambda prompt, sampling: [65] * 1000, automatic=False)
    async with serving(engine) as service:
        body = {"model": "m", "prompt": prompts(2048), "max_tokens": 400}
        _, writer = await service.send("/v1/completions", json.dumps(body).encode())
        await engine.wait_for(lambda: len(engine.contexts) == MAX_OPEN_CONTEXTS)
        other = asyncio.create_task(service.complete(prompt="x", max_tokens=2))
        await engine.wait_for(lambda: len(engine.contexts) == MAX_OPEN_CONTEXTS + 1)
        for _ in range(3):
            engine.step()
        assert (await other)["choices"][0]["text"] == engine.tokenizer.decode([65, 65])
        writer.transport.abort()
        await engine.wait_for(lambda: not engine.contexts)


async def test_more_candidates_than_a_portion_begin_alone() -> None:
    engine = ScriptedRemoteEngine()
    sampling = SamplingParams(max_tokens=5, temperature=0.0)
    count = MAX_OPEN_CONTEXTS + 10
    async with serving(engine) as service:
        request = GenerationRequest(
            [TokenizedPrompt([1]), TokenizedPrompt([2])], sampling, n=count, best_of=count
        )
        with Generation(DirectPlacer(service.remote), request) as generation:
            while not generation.state.done:
                await generation.next()
            assert generation.state.usage.prompt_tokens == 2
    assert engine.most_contexts == count + 1


class Crowded:
    """An engine whose link takes nothing more for a while after the first portion."""

    def __init__(self, remote: RemoteEngine, refusals: int) -> None:
        self._remote = remote
        self.refusals = refusals
        self.info: EngineInfo = remote.info
        self.tokenizer = remote.tokenizer

    def open(self, count: int, *, salt: str = "", **_: str) -> Any:
        channel = self._remote.open(count, salt=salt)
        crowded = self

        class Channel:
            context_ids = channel.context_ids
            __enter__ = channel.__enter__
            __exit__ = channel.__exit__
            close = channel.close
            submit = channel.submit
            next = channel.next

            def extend(self, more: int) -> list[int]:
                if crowded.refusals:
                    crowded.refusals -= 1
                    raise OverloadedError("too much waits to be sent")
                return channel.extend(more)

        return Channel()


async def test_a_crowded_link_delays_the_rest() -> None:
    engine = ScriptedRemoteEngine()
    sampling = SamplingParams(max_tokens=0)
    async with serving(engine) as service:
        crowded = Crowded(service.remote, refusals=20)
        request = GenerationRequest([TokenizedPrompt([1])] * 600, sampling)
        with Generation(DirectPlacer(crowded), request) as generation:
            while not generation.state.done:
                await generation.next()
    assert crowded.refusals == 0
    assert sum(isinstance(item, Fill) for item in engine.submitted) == 600
