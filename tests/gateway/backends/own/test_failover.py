"""Calls whose engine is lost, with scripted engines behind the whole gateway."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest
from harness.gateway.scripted_remote import ScriptedRemoteEngine, storyteller
from harness.gateway.semantic_tools import Http
from harness.gateway.serving import Service, linked, read_chunk, read_head, serving, until
from parrot_engine.protocol import Failed, Generate, SamplingParams
from prometheus_client.parser import text_string_to_metric_families

from parrot_gateway.backends.own.losses import MAX_LOSSES
from parrot_gateway.settings.model import SchedulerSettings

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 40,
}


def lose(service: Service, engine: ScriptedRemoteEngine, number: int, kind: Any = "link") -> None:
    """An engine is gone, with all that it had."""
    service.gateway.registry.remove(service.remotes[number].id, "it was unplugged", kind)
    engine.contexts.clear()
    engine._runs.clear()
    engine._fills.clear()


def engines_of(service: Service, engines: list[ScriptedRemoteEngine]) -> tuple[int, int]:
    """The numbers of the engine that has the call, and of the other one."""
    number = next(i for i, engine in enumerate(engines) if engine.contexts)
    return number, 1 - number


async def metrics_of(service: Service) -> dict[tuple[str, ...], float]:
    http = Http(service)
    text = (await http.get("/metrics")).text
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "le" not in sample.labels
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 2, 17])
async def test_a_call_goes_on_where_it_was(stream: bool, steps: int) -> None:
    body = {**BODY, "stream": stream, "n": 2, "seed": 3, "logprobs": True, "top_logprobs": 1}
    if stream:
        body["stream_options"] = {"include_usage": True}
    alone = storyteller()
    async with serving(alone) as service:
        _, _, whole = await service.post(CHAT, body)
    engines = [storyteller(), storyteller()]
    for engine in engines:
        engine.automatic = False
    async with serving(*engines) as service:
        call = asyncio.create_task(service.post(CHAT, body))
        await until(lambda: any(len(engine.contexts) == 3 for engine in engines))
        first, other = engines_of(service, engines)
        for _ in range(steps):
            engines[first].step()
        await asyncio.sleep(0)
        lose(service, engines[first], first)
        engines[other].automatic = True
        engines[other]._notify()
        status, _, answer = await call
        assert status == 200
        assert contents(answer, stream) == contents(whole, stream)
        refilled = [p for p in engines[other].submitted if isinstance(p, Generate) and p.generated]
        assert len(refilled) == (2 if steps > 1 else 0)
        # The lost engine, why, and how long it took.
        found = await metrics_of(service)
        assert found["parrot_call_engine_losses_total", "m", "link"] == 1
        assert found["parrot_engines_lost_total", "m", "link"] == 1
        assert found["parrot_failover_pause_seconds_count",] == 1
        assert (found["parrot_failover_refilled_tokens_total", "m"] > 0) == (steps > 0)


def contents(answer: bytes, stream: bool) -> Any:
    """All that an answer says, without ids and times."""
    if not stream:
        document = json.loads(answer)
        return document["choices"], document["usage"]
    texts: dict[int, list[Any]] = {}
    usage = None
    for event in answer.split(b"\n\n"):
        if not event.startswith(b"data: {"):
            continue
        document = json.loads(event[6:])
        assert "error" not in document
        usage = document.get("usage") or usage
        for choice in document["choices"]:
            texts.setdefault(choice["index"], []).append(choice)
    return texts, usage


async def test_a_call_without_a_seed_keeps_its_random_numbers() -> None:
    engines = [storyteller(), storyteller()]
    for engine in engines:
        engine.automatic = False
    async with serving(*engines) as service:
        call = asyncio.create_task(service.post(CHAT, BODY))
        await until(lambda: any(engine.contexts for engine in engines))
        first, other = engines_of(service, engines)
        engines[first].step()
        engines[first].step()
        await asyncio.sleep(0)
        lose(service, engines[first], first)
        engines[other].automatic = True
        engines[other]._notify()
        assert (await call)[0] == 200
    seeds = {
        item.sampling.seed
        for engine in engines
        for item in engine.submitted
        if isinstance(item, Generate)
    }
    assert len(seeds) == 1
    assert None not in seeds


async def test_the_explanation_names_the_engines() -> None:
    engines = [ScriptedRemoteEngine(automatic=False), ScriptedRemoteEngine(automatic=False)]
    async with serving(*engines) as service:
        call = asyncio.create_task(service.post(CHAT, BODY))
        await until(lambda: any(engine.contexts for engine in engines))
        first, other = engines_of(service, engines)
        lose(service, engines[first], first)
        engines[other].automatic = True
        engines[other]._notify()
        _, headers, _ = await call
        told = await Http(service).get(f"/v1/calls/{headers[b'x-request-id'].decode()}")
        explanation = told.json()["explanation"]
        assert explanation["lost_engines"] == ["scripted"]
        assert explanation["text"].endswith("Before that it ran on scripted, lost meanwhile.")


async def join_another(service: Service, engine: ScriptedRemoteEngine) -> Any:
    """One more engine, to be left with `__aexit__`."""
    link = linked(engine, service.gateway)
    await link.__aenter__()
    return link


async def test_a_call_that_breaks_engines_is_stopped() -> None:
    """Before its first token, two engines are lost; of the others' calls none is."""

    def script(prompt: list[int], sampling: SamplingParams) -> list[int | Failed]:
        return [Failed(0, "engine_lost", "out of paper")]

    async with serving(ScriptedRemoteEngine(script), ScriptedRemoteEngine(script)) as service:
        for stream in (False, True):
            status, headers, answer = await service.post(CHAT, {**BODY, "stream": stream})
            assert status == 500
            assert headers[b"x-should-retry"] == b"false"
            error = json.loads(answer)["error"]
            assert (error["code"], error["type"]) == ("poisoned_call", "server_error")
            assert "2 engines were lost" in error["message"]
        found = await metrics_of(service)
        assert found["parrot_call_errors_total", "m", "poisoned_call"] == 2
        assert found["parrot_call_engine_losses_total", "m", "crashed"] == 4


async def test_progress_forgives_losses() -> None:
    """A call may lose 16 engines in all, with a token on each."""
    runs = itertools.count(1)

    def script(prompt: list[int], sampling: SamplingParams) -> list[int | Failed]:
        return [65] * next(runs) + [Failed(0, "engine_lost", "out of paper")]

    async with serving(ScriptedRemoteEngine(script)) as service:
        reader, writer = await service.send(CHAT, json.dumps({**BODY, "stream": True}).encode())
        assert (await read_head(reader))[0] == 200
        chunks = b""
        while chunk := await read_chunk(reader):
            chunks += chunk
        writer.close()
    assert b"poisoned_call" in chunks
    assert f"{MAX_LOSSES} engines".encode() in chunks
    # What was written before stays: once each, in order.
    told = [json.loads(event[6:]) for event in chunks.split(b"\n\n") if event[:7] == b"data: {"]
    text = "".join(c["delta"].get("content") or "" for t in told for c in t.get("choices", []))
    assert text == text[0] * MAX_LOSSES


async def test_calls_that_wait_in_the_queue_go_on_with_the_next_engine() -> None:
    """The only engine goes while a call waits behind another: both run on the one that joins."""
    engine = ScriptedRemoteEngine(automatic=False)
    async with serving(engine, scheduler=SchedulerSettings(max_wait_s=60)) as service:
        calls = [asyncio.create_task(service.post(CHAT, BODY)) for _ in range(2)]
        await engine.wait_for(lambda: len(engine.contexts) == 2)
        lose(service, engine, 0)
        # A new call comes while there is none.
        calls.append(asyncio.create_task(service.post(CHAT, BODY)))
        await until(lambda: service.gate.running == 3)
        fresh = ScriptedRemoteEngine()
        link = await join_another(service, fresh)
        assert [status for status, _, _ in await asyncio.gather(*calls)] == [200] * 3
        await fresh.settle()
        await link.__aexit__(None, None, None)


async def test_a_deferred_call_and_its_reader_go_on_with_an_engine_that_leaves() -> None:
    """Text was written already; the engine said goodbye, and left with work left."""
    alone = storyteller()
    deferred = {**BODY, "seed": 3, "parrot": {"session": "s", "output": "o", "defer": True}}
    reader = {
        "model": "m",
        "max_tokens": 5,
        "seed": 4,
        "messages": [{"role": "user", "content": "{{text}}"}],
        "parrot": {"session": "s", "inputs": {"text": "o"}},
    }
    async with serving(alone) as service:
        assert (await service.post(CHAT, deferred))[0] == 200
        whole = contents((await service.post(CHAT, reader))[2], False)
    engines = [storyteller(), storyteller()]
    for engine in engines:
        engine.automatic = False
    async with serving(*engines) as service:
        assert (await service.post(CHAT, deferred))[0] == 200
        read = asyncio.create_task(service.post(CHAT, reader))
        await until(lambda: any(engine.contexts for engine in engines))
        first, other = engines_of(service, engines)
        for _ in range(5):
            engines[first].step()
        await asyncio.sleep(0)
        service.gateway.registry.drain(service.remotes[first].id)
        lose(service, engines[first], first, "left")
        engines[other].automatic = True
        engines[other]._notify()
        status, _, answer = await read
        assert status == 200
        assert contents(answer, False) == whole
        found = await metrics_of(service)
        assert found["parrot_call_engine_losses_total", "m", "left"] == 1
