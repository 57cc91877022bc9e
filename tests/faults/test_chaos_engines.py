"""Engines that are killed under calls of every kind: no client sees more than a pause.

Kills follow the progress of the calls, not the clock. The demo model computes in float32: an answer
that went through a fault is the same as one that did not, byte for byte.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest
from harness.crowd import Crowd, ask_all
from harness.processes import DEMO_MODEL, GatewayProcess, wait_until
from parrot_bench.apps.recipes import chain_summary
from parrot_bench.apps.runner import GatewayClient, run_workload
from parrot_bench.apps.workload import SEMANTIC, Size
from parrot_bench.chaos.answers import Answer
from parrot_bench.chaos.mix import KINDS, requests
from parrot_bench.chaos.oracle import Oracle, Verdict

#: Every kind, and some twice.
CALLS = requests(DEMO_MODEL, len(KINDS) + 3, 64)
#: Chunks of all answers, about: four candidates of one call, and one of each other.
CHUNKS = (len(CALLS) + 6) * 50


@pytest.fixture(scope="module")
def pair() -> Iterator[GatewayProcess]:
    """A gateway whose two engines die again and again."""
    with GatewayProcess(
        config={"models": [{"model": DEMO_MODEL, "engines": 2}], "engines": {"heartbeat_s": 0.5}}
    ) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def oracle(pair: GatewayProcess) -> Oracle:
    """The answers without a fault, known."""
    answers = asyncio.run(ask_all(pair, CALLS))
    assert [answer.failure for answer in answers] == [""] * len(CALLS)
    return Oracle(answers)


def ready(gateway: GatewayProcess) -> list[int]:
    """The ids of the processes whose engine takes calls."""
    return [
        each["pid"] for each in gateway.health()["engine_processes"] if each["state"] == "ready"
    ]


async def both_ready(gateway: GatewayProcess) -> list[int]:
    """The ids of both processes, once both take calls."""

    def both() -> list[int] | None:
        found = ready(gateway)
        return found if len(found) == 2 else None

    found: list[int] = await asyncio.to_thread(wait_until, both, "both engines are ready", 60.0)
    return found


def check(oracle: Oracle, answers: list[Answer]) -> Verdict:
    """Nothing was lost, and nothing differs."""
    verdict = oracle.judge(answers)
    assert (verdict.lost, verdict.different) == (0, 0), verdict.reasons
    return verdict


async def test_engines_that_go_one_after_the_other(pair: GatewayProcess, oracle: Oracle) -> None:
    first, second = await both_ready(pair)
    async with Crowd(pair, CALLS) as crowd:
        await crowd.begun()
        os.kill(first, signal.SIGKILL)
        await crowd.reach(CHUNKS // 2)
        # The other one, in good order: it finishes what it has.
        os.kill(second, signal.SIGTERM)
        verdict = check(oracle, await crowd.finish())
    assert verdict.compared == sum(request.is_repeatable for request in CALLS)
    await both_ready(pair)
    pair.wait_idle()


async def test_all_engines_killed_at_once(pair: GatewayProcess, oracle: Oracle) -> None:
    """Calls of every kind, and a chain of deferred ones: what is done is not done again."""
    workload = chain_summary(Size(6, 0.06), "Copy 1.")

    async def run(client: GatewayClient, session: str) -> tuple[str, ...]:
        return (await run_workload(client, workload, SEMANTIC, session)).jobs[0].texts

    def done() -> int:
        calls: int = pair.health()["semantic"]["calls"]["done"]
        return calls

    async with GatewayClient(pair.base_url, DEMO_MODEL) as client:
        expected = await run(client, "calm")
        pids = await both_ready(pair)
        before = done()
        async with Crowd(pair, CALLS) as crowd:
            chain = asyncio.create_task(run(client, "struck"))
            await crowd.begun()
            await asyncio.to_thread(wait_until, lambda: done() > before, "a step of the chain", 60)
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            check(oracle, await crowd.finish())
        assert await chain == expected
    assert done() - before == len(workload.calls)
    await both_ready(pair)
    pair.wait_idle()


async def test_a_frozen_engine_loses_its_calls_to_the_other(
    pair: GatewayProcess, oracle: Oracle
) -> None:
    first, _ = await both_ready(pair)
    async with Crowd(pair, CALLS) as crowd:
        await crowd.begun()
        os.kill(first, signal.SIGSTOP)
        try:
            # It stays frozen: only the other engine can end these calls.
            check(oracle, await crowd.finish())
        finally:
            os.kill(first, signal.SIGCONT)
    await both_ready(pair)
    pair.wait_idle()
