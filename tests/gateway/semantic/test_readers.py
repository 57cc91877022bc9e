"""Waits for variables, which end in time and leave nothing behind."""

from __future__ import annotations

import asyncio
import re

import pytest
from harness.gateway.scripted_runner import ScriptedRunner, gauges, session_of, submit
from harness.gateway.serving import until
from parrot_scheduler.task import LATENCY, THROUGHPUT

from parrot_gateway.exceptions import DeadlineError, DependencyFailedError
from parrot_gateway.semantic.variable import Failure


async def test_a_wait_ends_with_the_change_that_it_is_for() -> None:
    async with session_of(ScriptedRunner()) as (service, session):
        readers, variable = service.readers, session.variable("a")
        variable.begin()
        final = asyncio.ensure_future(readers.wait(variable, 60.0))
        longer = asyncio.ensure_future(readers.wait(variable, 60.0, after=3))
        await until(lambda: readers.count == 2)
        assert not session.is_idle
        assert gauges(service)["readers"] == 2
        variable.append("four")
        assert await longer is True
        assert not final.done()
        assert await readers.wait(variable, 60.0, after=3) is True, "it is longer already"
        assert await readers.wait(variable, 0.0, after=4) is False
        variable.set("four and")
        assert await final is True
        assert readers.count == 0
        assert await readers.wait(variable, 0.0) is True
        assert session.is_idle


async def test_values_come_in_time_or_say_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    async with session_of(ScriptedRunner()) as (service, session):
        readers = service.readers
        ready, failed, empty = (session.variable(name) for name in ("ready", "failed", "empty"))
        ready.set("")
        failed.fail(Failure("broke", "It broke.", "failed", "call_1"))
        assert await readers.value(ready) == ""
        with pytest.raises(DependencyFailedError) as broken:
            await readers.value(failed)
        assert all(text in str(broken.value) for text in ("'failed'", "call_1", "It broke."))
        late = "Variable 'empty' had no value within {} s; it goes on."
        with pytest.raises(DeadlineError, match=re.escape(late.format(0))) as told:
            await readers.value(empty, 0.0)
        assert told.value.param == "variable"
        readers.timeout_s = 0.01
        with pytest.raises(DeadlineError, match=re.escape(late.format(0.01))):
            await readers.value(empty)
        both = {"b": ready, "a": empty}
        with pytest.raises(DeadlineError):
            await readers.values(both, 0.0)
        waiting = asyncio.ensure_future(readers.values(both, 60.0))
        await until(lambda: readers.count == 1)
        empty.set("late")
        assert await waiting == {"b": "", "a": "late"}


async def test_only_a_wait_with_an_objective_hurries_what_it_is_for() -> None:
    runner = ScriptedRunner.hanging()
    async with session_of(runner) as (service, session):
        output = submit(service, session, "a", "x")
        (node,) = session.graph
        seen = []
        for objective in (None, THROUGHPUT, LATENCY):
            waiting = asyncio.ensure_future(service.readers.wait(output, 60.0, objective=objective))
            await until(lambda: service.readers.count == 1)
            await asyncio.sleep(0)
            seen.append((node.objective, service.objectives.num_waited))  # type: ignore[attr-defined]
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            assert service.readers.count == service.objectives.num_waited == 0
        assert seen == [(THROUGHPUT, 0), (THROUGHPUT, 1), (LATENCY, 1)]
        service.close_session(session)
