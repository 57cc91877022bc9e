"""An engine whose heartbeats go on while its steps do not: its calls go on elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from harness import lying_engine
from harness.crowd import Crowd, ask_all
from harness.processes import DEMO_MODEL, GatewayProcess, ServerProcess, wait_until
from parrot_bench.chaos.mix import KINDS, requests
from parrot_bench.chaos.oracle import Oracle

JOIN_KEY = {"PARROT_JOIN_KEY": "the key of the engines"}
CALLS = requests(DEMO_MODEL, len(KINDS) + 3, 64)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """The file with which the steps of one engine stop."""
    return tmp_path / "lie"


@pytest.fixture
def hub(marker: Path) -> Iterator[GatewayProcess]:
    """A gateway with two engines, one of which can lie."""
    link = {"join_key": "env:PARROT_JOIN_KEY", "heartbeat_s": 0.2, "stall_s": 1.0}
    with ExitStack() as stack:
        gateway = stack.enter_context(
            GatewayProcess(config={"engines": link}, environment=JOIN_KEY)
        )
        url = gateway.root.replace("http://", "ws://") + "/v1/engines/join"
        options = ["--model", DEMO_MODEL, "--join", url, "--engine-name"]
        for program in (["-m", "parrot_engine"], [lying_engine.__file__, str(marker)]):
            name = "liar" if len(program[0]) > 2 else "honest"
            stack.enter_context(ServerProcess([*program, *options, name], JOIN_KEY))
        wait_until(lambda: len(gateway.health()["engines"]) == 2, "both have joined", 60.0)
        yield gateway


async def test_an_engine_that_only_beats(hub: GatewayProcess, marker: Path) -> None:
    oracle = Oracle(await ask_all(hub, CALLS))

    def names() -> list[str]:
        return [each["name"] for each in hub.health()["engines"]]

    async with Crowd(hub, CALLS) as crowd:
        await crowd.begun()
        await asyncio.to_thread(marker.touch)
        await asyncio.to_thread(wait_until, lambda: names() == ["honest"], "it is found out", 60.0)
        verdict = oracle.judge(await crowd.finish())
    assert (verdict.lost, verdict.different) == (0, 0), verdict.reasons
