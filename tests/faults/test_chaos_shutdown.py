"""A gateway that is ended under load: calls end whole within the drain time, or say why not."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

from harness.crowd import Crowd, ask_all
from harness.processes import DEMO_MODEL, GatewayProcess, is_alive, wait_until
from parrot_bench.chaos.mix import KINDS, Request, requests
from parrot_bench.chaos.oracle import Oracle

#: Failures of calls for which the drain time was too short, in streams and in whole answers.
CUT_OFF = {"in band shutting_down", "503 shutting_down"}


def gateway(**server: Any) -> GatewayProcess:
    return GatewayProcess(config={"models": [DEMO_MODEL], "server": server})


def endless() -> list[Request]:
    """Calls that take minutes, streamed and whole."""
    return requests(DEMO_MODEL, 6, 1800, ("chat", "n=4", "whole"))


async def test_calls_in_flight_end_whole() -> None:
    calls = requests(DEMO_MODEL, len(KINDS) + 3, 64)
    with gateway() as served:
        oracle = Oracle(await ask_all(served, calls))
        engine = served.engine_pid()
        async with Crowd(served, calls) as crowd:
            await crowd.begun()
            served.signal(signal.SIGTERM)
            verdict = oracle.judge(await crowd.finish())
        assert (verdict.lost, verdict.different) == (0, 0), verdict.reasons
        assert await asyncio.to_thread(served.wait) == 0
        wait_until(lambda: not is_alive(engine), "the engine has ended too")
        assert "Traceback" not in served.stderr()


async def test_calls_that_take_too_long_are_told_so() -> None:
    with gateway(drain_timeout_s=0.2) as served:
        async with Crowd(served, endless()) as crowd:
            await crowd.begun()
            served.signal(signal.SIGTERM)
            answers = await crowd.finish()
        assert {answer.failure for answer in answers} <= CUT_OFF
        assert not any(answer.faults for answer in answers)
        assert await asyncio.to_thread(served.wait) == 0
        assert "Traceback" not in served.stderr()


async def test_a_frozen_engine_does_not_hold_the_gateway() -> None:
    with gateway(drain_timeout_s=1.0) as served:
        engine = served.engine_pid()
        async with Crowd(served, endless()) as crowd:
            await crowd.begun()
            os.kill(engine, signal.SIGSTOP)
            served.signal(signal.SIGTERM)
            answers = await crowd.finish()
        assert all(answer.failure for answer in answers)
        assert not any(answer.hung or answer.faults for answer in answers)
        assert await asyncio.to_thread(served.wait, 30.0) == 0
        wait_until(lambda: not is_alive(engine), "the engine has ended too")
