"""An engine process that lives and does nothing: ended and started again, once it is missed."""

from __future__ import annotations

import os
import signal

import pytest
from linked import eventually, joined
from parrot_engine.link.wire import Register
from test_supervisor import impatient as impatient
from test_supervisor import pids, settled, supervised

from parrot_gateway.engines import supervisor as supervisor_module


async def test_a_process_that_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "_REJOIN_TIMEOUT_S", 0.2)
    async with supervised("serve") as (supervisor, registry):
        await settled(supervisor)
        first = await joined(registry)
        (hung,) = pids(supervisor)
        os.kill(hung, signal.SIGSTOP)
        await eventually(lambda: first.lost)
        await joined(registry)
        await eventually(lambda: supervisor.state("scripted") == "ready")
        assert pids(supervisor) != [hung]
        assert supervisor.processes[0].restarts == 1


async def test_a_process_whose_link_breaks_may_come_back() -> None:
    async with supervised("serve") as (supervisor, registry):
        await settled(supervisor)
        for _ in range(2):
            engine = await joined(registry)
            (pid,) = pids(supervisor)
            os.kill(pid, signal.SIGSTOP)
            await eventually(lambda lost=engine: lost.lost)
            os.kill(pid, signal.SIGCONT)
            await joined(registry)
            assert pids(supervisor) == [pid]
        assert supervisor.processes[0].restarts == 0


async def test_an_old_link_that_ends_late_says_nothing_of_the_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor_module, "_REJOIN_TIMEOUT_S", 0.1)
    async with supervised("serve") as (supervisor, registry):
        await settled(supervisor)
        engine = await joined(registry)
        old = registry.add(Register(engine.name, engine.info, engine.text), engine.tokenizer)
        registry.remove(old.id, "noticed late")
        assert supervisor.state("scripted") == "ready"
        # The clock: somebody who waits for longer than a process may be away.
        with pytest.raises(TimeoutError):
            await eventually(lambda: "another" in registry.serving, 0.3)
        assert registry.serving["scripted"] == [engine]
        assert supervisor.processes[0].restarts == 0
