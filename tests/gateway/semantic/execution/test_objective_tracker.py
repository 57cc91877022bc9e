"""Objectives of calls follow who waits, as readers and producers come."""

from __future__ import annotations

import asyncio

from harness.gateway.scripted_runner import ScriptedRunner, session_of, submit
from harness.waiting import until
from parrot_scheduler.task import LATENCY, THROUGHPUT, Objective

from parrot_gateway.semantic.session import Session
from parrot_gateway.semantic.templates.reference import reference_of


def objectives(session: Session) -> dict[str, Objective]:
    return {node.name: node.objective for node in session.graph if node.kind == "call"}  # type: ignore[attr-defined]


async def test_who_waits_decides_what_a_call_is_for() -> None:
    runner = ScriptedRunner.hanging()
    async with session_of(runner) as (service, session):
        first = submit(service, session, "a", "x")
        last = submit(service, session, "b", reference_of(first.id))
        submit(service, session, "aside", "y")
        await until(lambda: runner.running == 2)
        assert set(objectives(session).values()) == {THROUGHPUT}
        waiting = asyncio.create_task(service.readers.value(last))
        await until(lambda: objectives(session)["b"] == LATENCY)
        assert objectives(session) == {"a": LATENCY, "b": LATENCY, "aside": THROUGHPUT}
        waiting.cancel()
        service.close_session(session)


async def test_a_producer_that_comes_late_inherits_the_wait() -> None:
    runner = ScriptedRunner.hanging()
    async with session_of(runner) as (service, session):
        reader = submit(service, session, "r", reference_of(session.variable("x").id))
        waiting = asyncio.create_task(service.readers.value(reader))
        await until(lambda: objectives(session)["r"] == LATENCY)
        submit(service, session, "x", "late")
        await until(lambda: objectives(session)["x"] == LATENCY)
        waiting.cancel()
        service.close_session(session)


async def test_running_calls_are_told_of_a_new_group_though_their_objective_stays() -> None:
    runner = ScriptedRunner.hanging()
    async with session_of(runner) as (service, session):
        parts = [submit(service, session, f"m{number}", "x") for number in range(2)]
        await until(lambda: runner.running == 2)
        changed: list[str] = []
        service.objectives.on_change = changed.append
        last = submit(service, session, "reduce", " ".join(reference_of(each.id) for each in parts))
        waiting = asyncio.create_task(service.readers.value(last))
        await until(lambda: objectives(session)["reduce"] == LATENCY)
        assert {objectives(session)[name] for name in ("m0", "m1")} == {THROUGHPUT}
        assert set(changed) == {each.producer for each in parts}
        waiting.cancel()
        service.close_session(session)
