"""Failover under faults at arbitrary points, on a virtual clock: hundreds of seeds in seconds."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from harness.gateway.failover_world import Call, World
from harness.gateway.hashing_engine import HashingEngine
from harness.virtual_time import VirtualLoop
from parrot_engine.protocol import Fill, Generate, Generated, SamplingParams

from parrot_gateway.backends.own import generate, losses, registry, state
from parrot_gateway.backends.own.losses import INCIDENT_S
from parrot_gateway.backends.own.remote import EngineChannel
from parrot_gateway.calls.generation_request import GenerationRequest, TokenizedPrompt
from parrot_gateway.routing import placer

SEEDS = 400
#: Seeds of one test, so that a failure names a narrow range.
PORTION = 50


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[VirtualLoop]:
    """A loop on a virtual clock, which is the clock of failover, too."""
    made = VirtualLoop()
    clock = SimpleNamespace(monotonic=made.time, perf_counter=made.time, time=made.time)
    for module in (generate, losses, registry, placer):
        monkeypatch.setattr(module, "time", clock)
    yield made
    made.close()


def run(loop: VirtualLoop, seed: int) -> World:
    """One world, to its end.

    Raises:
        AssertionError: a promise is broken; with what happened in that world.
    """

    async def world() -> World:
        made = World(seed)
        try:
            await made.run()
        except BaseException as error:
            error.add_note(f"seed {seed}:\n" + "\n".join(made.story))
            await made.abandon()
            raise
        return made

    return loop.run_until_complete(world())


@pytest.mark.parametrize("first", range(0, SEEDS, PORTION))
def test_every_answer_is_the_one_without_faults(loop: VirtualLoop, first: int) -> None:
    ends: Counter[str] = Counter()
    lost_contexts = 0
    for seed in range(first, first + PORTION):
        world = run(loop, seed)
        ends.update(call.end for call in world.calls)
        lost_contexts += world.lost_contexts
    assert ends["done"] > 0.7 * ends.total(), ends
    # The faults strike calls in work.
    assert lost_contexts > PORTION


@pytest.mark.parametrize(
    ("pause_s", "end"), [(INCIDENT_S / 10, "done"), (INCIDENT_S * 2, "poisoned_call")]
)
def test_engines_that_die_together_do_not_poison_a_call(
    loop: VirtualLoop, pause_s: float, end: str
) -> None:
    async def scenario() -> None:
        world = World(0)
        engines = [world.join() for _ in range(5)]
        for engine in engines:
            engine.stalled = True
        sampling = SamplingParams(max_tokens=30, seed=1, ignore_eos=True)
        call = Call(GenerationRequest([TokenizedPrompt([1, 2, 3])], sampling))
        task = world.start(call)
        for _ in range(4):
            await asyncio.sleep(pause_s)
            world.kill(next(each for each in world.engines if each.engine.contexts))
        (last,) = world.engines
        last.stalled = False
        last.has_work.set()
        await task
        assert call.end == end
        await world.check()

    loop.run_until_complete(scenario())


def test_a_call_that_got_no_further_goes_before_others(loop: VirtualLoop) -> None:
    async def scenario() -> None:
        world = World(0)
        for _ in range(3):
            world.join().stalled = True
        call = Call(GenerationRequest([TokenizedPrompt([1, 2, 3])], SamplingParams()))
        task = world.start(call)
        priorities = []
        for _ in range(3):
            await asyncio.sleep(INCIDENT_S * 2)
            engine = next(each for each in world.engines if each.engine.contexts)
            (context,) = engine.engine.contexts.values()
            assert context.fill is not None
            priorities.append(context.fill.priority)
            if len(world.engines) > 1:
                world.kill(engine)
        assert priorities == sorted(set(priorities), reverse=True)
        engine.stalled = False
        engine.has_work.set()
        await task
        assert call.end == "done"
        await world.check()

    loop.run_until_complete(scenario())


def fails(loop: VirtualLoop, expected: str) -> bool:
    """True if the first world that breaks a promise says so in words of this pattern."""
    for seed in range(PORTION):
        try:
            run(loop, seed)
        except AssertionError as error:
            return re.search(expected, str(error)) is not None
    return False


def test_a_seed_that_changes_is_noticed(loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = count()
    monkeypatch.setattr(state, "choice_seed", lambda seed, choice: seed + next(numbers))
    assert fails(loop, "another text|other tokens")


def test_a_count_that_begins_anew_is_noticed(
    loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(*arguments: Any) -> Generate:
        return Generate(*arguments[:4])

    monkeypatch.setattr(state, "Generate", forgetful)
    assert fails(loop, "another text|other tokens")


def test_a_token_that_is_not_refilled_is_noticed(
    loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def losing(context_id: int, token_ids: list[int], *rest: Any, **more: Any) -> Fill:
        # Only a refill of a fork has a parent.
        return Fill(context_id, token_ids[:-1] or token_ids, *rest, **more)

    def fill(context_id: int, token_ids: list[int], *rest: Any, **more: Any) -> Fill:
        make = losing if rest else Fill
        return make(context_id, token_ids, *rest, **more)

    monkeypatch.setattr(state, "Fill", fill)
    assert fails(loop, "another text|other tokens")


def test_tokens_that_come_twice_are_noticed(
    loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = HashingEngine._advance

    def again(engine: HashingEngine, number: int, context: Any, generate: Generate) -> Generated:
        event = advance(engine, number, context, generate)
        if context.generated - len(event.token_ids) > generate.generated or not generate.generated:
            return event
        return replace(event, token_ids=[*context.token_ids[-context.generated :]], logprobs=None)

    monkeypatch.setattr(HashingEngine, "_advance", again)
    assert fails(loop, "another text|other tokens")


def test_contexts_that_are_not_freed_are_noticed(
    loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineChannel, "close", lambda self: None)
    assert fails(loop, "left")
