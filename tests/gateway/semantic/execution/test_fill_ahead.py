"""Beginnings of waiting calls are filled ahead: what is sent, when, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.semantic_tools import CHAT, COMPLETIONS, PATHS, Http, echo, http_of
from harness.gateway.serving import serving
from harness.waiting import until
from parrot_engine.protocol import Failed, Fill, FreeContext, Generate

from parrot_gateway.semantic.execution.fill_ahead import LOWEST_PRIORITY, PORTION_TOKENS

BLOCK = 16
LONG = "0123456789" * 30


def caching(engine: ScriptedRemoteEngine, *, device: str = "cpu", num_blocks: int = 1000) -> None:
    """Let the engine pass for one that finds blocks again."""
    engine.info = replace(
        engine.info,
        device=device,
        block_size=BLOCK,
        num_blocks=num_blocks,
        max_context_tokens=4096,
        reports_blocks=True,
    )


@asynccontextmanager
async def filling(engine: ScriptedRemoteEngine, **info: object) -> AsyncIterator[Http]:
    """A client of a served engine that caches; in the end no gauge is above zero."""
    caching(engine, **info)  # type: ignore[arg-type]
    async with http_of(engine) as http:
        yield http
        statistics = await gauges(http)
        assert (statistics["candidates"], statistics["filling"], statistics["held_tokens"]) == (
            (0, 0, 0)
        )


async def gauges(http: Http) -> dict[str, int]:
    """Return the gauges of filling ahead in `/health`."""
    found: dict[str, int] = (await http.get("/health")).json()["semantic"]["fill_ahead"]
    return found


def ahead(engine: ScriptedRemoteEngine) -> list[int]:
    """All tokens of the last context that was filled ahead."""
    fills = [p for p in engine.submitted if isinstance(p, Fill) and p.priority == LOWEST_PRIORITY]
    return [
        token
        for fill in fills
        if fill.context_id == fills[-1].context_id
        for token in fill.token_ids
    ]


def generated(engine: ScriptedRemoteEngine) -> list[list[int]]:
    """The prompts that were generated from, in order."""
    asked = {p.context_id for p in engine.submitted if isinstance(p, Generate)}
    fills = [p for p in engine.submitted if isinstance(p, Fill)]
    return [fill.token_ids for fill in fills if fill.context_id in asked]


async def wait_for_fills(http: Http, count: int) -> None:
    fill_ahead = http.service.gateway.semantic.fill_ahead
    assert fill_ahead is not None
    await until(lambda: fill_ahead.statistics().fills == count)


async def set_variable(http: Http, session: str, name: str, value: str) -> None:
    listed = (await http.get("/v1/variables", params={"session": session})).json()["data"]
    (variable,) = [item["id"] for item in listed if item["name"] == name]
    response = await http.put(f"/v1/variables/{variable}", json={"value": value})
    assert response.status_code == 200


@pytest.mark.parametrize("defer", [True, False])
@pytest.mark.parametrize("path", PATHS)
async def test_the_beginning_is_filled_while_the_call_waits(
    engine: ScriptedRemoteEngine, path: str, defer: bool
) -> None:
    async with filling(engine) as http:
        parrot = {"session": "s", "inputs": {"x": "x"}, "output": "y", "defer": defer}
        call = asyncio.create_task(http.call(path, LONG + "{{x}} end", parrot=parrot))
        await wait_for_fills(http, 1)
        assert (await gauges(http))["held_tokens"] == len(ahead(engine)) > 256
        await engine.settle()
        await set_variable(http, "s", "x", "value")
        assert (await call).status_code == 200
        await until(lambda: len(generated(engine)) == 1)
        (prompt,) = generated(engine)
        beginning = ahead(engine)
        assert engine.tokenizer.decode(prompt, skip_special_tokens=True).count(LONG + "value end")
        assert prompt[: len(beginning)] == beginning
        assert len(beginning) % BLOCK == 0
        assert len(prompt) - len(beginning) < 3 * BLOCK
        portions = [p for p in engine.submitted if isinstance(p, Fill)]
        assert max(len(p.token_ids) for p in portions[:-1]) == PORTION_TOKENS


async def test_it_goes_on_when_some_of_the_inputs_are_there(engine: ScriptedRemoteEngine) -> None:
    async with filling(engine) as http:
        parrot = {"session": "s", "inputs": {n: n for n in "abc"}, "output": "y", "defer": True}
        text = LONG + "{{a}}" + LONG + "{{b}}" + "short" + "{{c}}"
        await http.call(COMPLETIONS, text, parrot=parrot)
        await wait_for_fills(http, 1)
        first = ahead(engine)
        await set_variable(http, "s", "a", "value")
        await wait_for_fills(http, 2)
        second = ahead(engine)
        assert second[: len(first)] == first
        assert len(second) > len(first) + 200
        # It has hardly grown: nothing more is filled, and the call goes its way.
        await set_variable(http, "s", "b", "v")
        await set_variable(http, "s", "c", "w")
        await until(lambda: len(generated(engine)) == 1)
        assert generated(engine)[0][: len(second)] == second
        assert ahead(engine) == second


@pytest.mark.parametrize(
    "text", ["{{x}}" + LONG, "short {{x}}" + LONG], ids=["nothing", "too short"]
)
async def test_what_is_too_short_is_left_alone(engine: ScriptedRemoteEngine, text: str) -> None:
    async with filling(engine) as http:
        parrot = {"session": "s", "inputs": {"x": "x"}, "defer": True}
        await http.call(CHAT, text, parrot=parrot)
        fill_ahead = http.service.gateway.semantic.fill_ahead
        assert fill_ahead is not None
        await until(lambda: not fill_ahead._workers)
        await set_variable(http, "s", "x", "value")
        await until(lambda: len(generated(engine)) == 1)
        assert ahead_or_nothing(engine) == []


def ahead_or_nothing(engine: ScriptedRemoteEngine) -> list[Fill]:
    return [p for p in engine.submitted if isinstance(p, Fill) and p.priority == LOWEST_PRIORITY]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
async def test_a_busy_engine_is_left_alone(engine: ScriptedRemoteEngine, device: str) -> None:
    async with filling(engine, device=device) as http:
        engine.automatic = False
        busy = asyncio.create_task(http.call(COMPLETIONS, "busy"))
        await engine.wait_for(lambda: bool(engine.contexts))
        parrot = {"session": "s", "inputs": {"x": "x"}, "output": "y", "defer": True}
        await http.call(COMPLETIONS, LONG + "{{x}}", parrot=parrot)
        await gauges(http)
        assert ahead_or_nothing(engine) == []
        # The prompt is filled: on an accelerator the rest goes beside it.
        engine.step()
        if device == "cuda":
            await engine.wait_for(lambda: bool(ahead_or_nothing(engine)))
        else:
            engine.step()
            await gauges(http)
            assert ahead_or_nothing(engine) == []
        engine.automatic = True
        engine.step()
        assert (await busy).status_code == 200
        await wait_for_fills(http, 1)
        await set_variable(http, "s", "x", "value")


@pytest.mark.parametrize("end", ["runs", "cancelled", "session", "engine fails"])
async def test_a_call_that_waits_no_more_is_not_filled_any_further(
    engine: ScriptedRemoteEngine, end: str
) -> None:
    async with filling(engine) as http:
        engine.automatic = False
        parrot = {"session": "s", "inputs": {"x": "x"}, "output": "y", "defer": True}
        response = await http.call(COMPLETIONS, LONG + "{{x}}", parrot=parrot)
        await engine.wait_for(lambda: bool(ahead_or_nothing(engine)))
        (fill,) = ahead_or_nothing(engine)
        if end == "runs":
            await set_variable(http, "s", "x", "value")
        elif end == "cancelled":
            call = response.headers["x-parrot-call"]
            assert (await http.delete(f"/v1/calls/{call}")).status_code < 300
        elif end == "session":
            assert (await http.delete("/v1/sessions/s")).status_code < 300
        else:
            engine.deliver([Failed(fill.context_id, "overloaded", "too much")])
        await engine.wait_for(lambda: FreeContext(fill.context_id) in engine.submitted)
        assert len(ahead_or_nothing(engine)) == 1
        engine.automatic = True
        if engine.contexts:
            engine.step()
        if end == "engine fails":
            await set_variable(http, "s", "x", "value")
        fill_ahead = http.service.gateway.semantic.fill_ahead
        assert fill_ahead is not None
        await until(lambda: not fill_ahead._filling)
        assert (await gauges(http))["cut_off"] == 1


async def test_beginnings_leave_most_of_the_cache_to_others(engine: ScriptedRemoteEngine) -> None:
    async with filling(engine, num_blocks=100) as http:
        # A quarter of 100 blocks holds one beginning of 18 blocks.
        for number in range(3):
            parrot = {"session": "s", "inputs": {"x": "x"}, "output": f"y{number}", "defer": True}
            await http.call(COMPLETIONS, f"{number}" + LONG + "{{x}}", parrot=parrot)
        fill_ahead = http.service.gateway.semantic.fill_ahead
        assert fill_ahead is not None
        await until(lambda: not fill_ahead._workers)
        assert (await gauges(http))["fills"] == 1
        await set_variable(http, "s", "x", "value")
        await until(lambda: len(generated(engine)) == 3)


async def test_it_can_be_switched_off(engine: ScriptedRemoteEngine) -> None:
    async with filling(engine) as http:
        fill_ahead = http.service.gateway.semantic.fill_ahead
        assert fill_ahead is not None
        fill_ahead.min_tokens = 0
        parrot = {"session": "s", "inputs": {"x": "x"}, "output": "y", "defer": True}
        await http.call(COMPLETIONS, LONG + "{{x}}", parrot=parrot)
        assert not fill_ahead._workers
        await set_variable(http, "s", "x", "value")


async def test_engines_without_a_cache_are_left_alone(engine: ScriptedRemoteEngine) -> None:
    async with http_of(engine) as http:
        parrot = {"session": "s", "inputs": {"x": "x"}, "output": "y", "defer": True}
        await http.call(COMPLETIONS, LONG + "{{x}}", parrot=parrot)
        fill_ahead = http.service.gateway.semantic.fill_ahead
        assert fill_ahead is not None
        assert not fill_ahead._workers
        await set_variable(http, "s", "x", "value")


async def test_beginnings_on_one_engine_take_no_room_on_another(
    engine: ScriptedRemoteEngine,
) -> None:
    other = ScriptedRemoteEngine()
    for each, model in ((engine, "m"), (other, "n")):
        caching(each, num_blocks=100)
        each.info = replace(each.info, model=model)
        echo(each)
    async with serving(engine, other) as service, Http(service) as http:
        for number, model in enumerate(("m", "n")):
            parrot = {"session": "s", "inputs": {"x": "x"}, "output": f"y{number}", "defer": True}
            await http.call(COMPLETIONS, LONG + "{{x}}", model=model, parrot=parrot)
            await wait_for_fills(http, number + 1)
        await set_variable(http, "s", "x", "value")
        await until(lambda: len(generated(engine)) == len(generated(other)) == 1)
        await http.settled()
        await service.gateway.semantic.close()
    assert other.contexts == {}
