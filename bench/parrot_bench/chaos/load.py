"""Puts the calls of `bench chaos` on a gateway, phase by phase, while faults strike."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import aiohttp

from parrot_bench.apps.recipes import chain_summary, summary
from parrot_bench.apps.runner import GatewayClient, run_workload
from parrot_bench.apps.workload import SEMANTIC, Size, Workload
from parrot_bench.chaos.answers import Answer, call
from parrot_bench.chaos.mix import Request
from parrot_bench.chaos.targets import Targets
from parrot_bench.servers import BenchmarkError

#: Deferred graphs: steps of the chain, chunks of the map-reduce, and the share of the paper's
#: lengths.
_STEPS, _CHUNKS, _SCALE = 20, 8, 0.1
#: Every run of a graph says the same, so that its texts can be compared.
_SALT = "Copy 000000000000."
#: Longest wait until nothing of a load is left.
_SETTLE_S = 30.0


class GraphRun(NamedTuple):
    """One run of a deferred graph: the texts that its client read, or why there are none."""

    name: str
    texts: tuple[str, ...]
    failure: str = ""


class Strike(NamedTuple):
    """One fault."""

    number: int
    at: float
    #: When the next may come: it is over, and those of its kind that are to be followed are back.
    ended: float


@dataclass(slots=True)
class Phase:
    """Everything that came of a time under load.

    Attributes:
        seconds: from its first call to the end of its last.
    """

    name: str
    seconds: float = 0.0
    answers: list[Answer] = field(default_factory=list)
    graphs: list[GraphRun] = field(default_factory=list)
    strikes: list[Strike] = field(default_factory=list)
    #: Faults for which nobody was there.
    skipped: int = 0


class Load:
    """Sends calls to a gateway from many clients at once.

    Args:
        client: of the gateway.
        requests: are sent in turn.
        streams: clients.
        with_graphs: a chain and a map-reduce run beside them, again and again.
    """

    def __init__(
        self, client: GatewayClient, requests: Sequence[Request], streams: int, *, with_graphs: bool
    ) -> None:
        self._client = client
        self._requests = requests
        self._streams = streams
        size = Size(_STEPS, _SCALE), Size(_CHUNKS, _SCALE)
        self._graphs = (
            [chain_summary(size[0], _SALT), summary(size[1], _SALT)] if with_graphs else []
        )

    async def once(self, name: str) -> Phase:
        """Every request and every graph once."""
        phase = Phase(name)
        return await self._run(phase, iter(self._requests), lambda: False)

    async def during(
        self,
        name: str,
        seconds: float,
        strike: Callable[[Phase, float], asyncio.Task[None]] | None = None,
    ) -> Phase:
        """Calls and graphs begin for so long; those under way are waited for."""
        phase = Phase(name)
        ends = time.monotonic() + seconds
        striking = strike(phase, ends) if strike is not None else None
        await self._run(phase, itertools.cycle(self._requests), lambda: time.monotonic() < ends)
        if striking is not None:
            await striking
        return phase

    async def _run(
        self, phase: Phase, requests: Iterator[Request], goes_on: Callable[[], bool]
    ) -> Phase:
        began = time.monotonic()
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as http,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(self._streams):
                group.create_task(self._client_loop(phase, http, requests, goes_on))
            for workload in self._graphs:
                group.create_task(self._graph_loop(phase, workload, goes_on))
        phase.seconds = time.monotonic() - began
        return phase

    async def _client_loop(
        self,
        phase: Phase,
        http: aiohttp.ClientSession,
        requests: Iterator[Request],
        goes_on: Callable[[], bool],
    ) -> None:
        is_endless = isinstance(requests, itertools.cycle)
        while goes_on() or not is_endless:
            request = next(requests, None)
            if request is None:
                return
            answer = await call(http, self._client.base_url, Answer(request))
            phase.answers.append(answer)
            if answer.failure:
                # A client that fails at once would only count its own haste.
                await asyncio.sleep(0.5)

    async def _graph_loop(
        self, phase: Phase, workload: Workload, goes_on: Callable[[], bool]
    ) -> None:
        while True:
            session = f"chaos-{secrets.token_hex(8)}"
            try:
                result = await run_workload(
                    self._client, workload, SEMANTIC, session, own_sessions=True
                )
                texts = tuple(text for job in result.jobs for text in job.texts)
                phase.graphs.append(GraphRun(workload.name, texts))
            except BenchmarkError as error:
                phase.graphs.append(GraphRun(workload.name, (), str(error)[:200]))
                await asyncio.sleep(0.5)
            if not goes_on():
                return

    async def left_behind(self) -> int:
        """Calls and contexts that are still there after a while without load."""
        ends = time.monotonic() + _SETTLE_S
        while True:
            began = time.monotonic()
            health = await self._client.health()
            engines = health["engines"]
            is_fresh = all(each["stats_age_s"] < _SETTLE_S - ends + began for each in engines)
            left: int = health["calls"]["running"]
            left += sum(each["running"] + each["stats"]["contexts"] for each in engines)
            if (left == 0 and is_fresh) or began > ends:
                return left
            await asyncio.sleep(0.2)


def strikes(
    targets: Targets, every: float, at_once: int
) -> Callable[[Phase, float], asyncio.Task[None]]:
    """Make what strikes the targets in turn, `at_once` of them, each time `every` seconds pass."""

    async def strike(phase: Phase, ends: float) -> None:
        turn = 0
        while True:
            due = time.monotonic() + every
            if due > ends:
                return
            await asyncio.sleep(every)
            ready = sorted(await targets.ready(), key=lambda number: (number < turn, number))
            if not ready:
                phase.skipped += 1
                continue
            victims = ready[:at_once]
            turn = victims[-1] + 1
            at = time.monotonic()
            await asyncio.gather(*map(targets.strike, victims))
            phase.strikes += [Strike(number, at, time.monotonic()) for number in victims]

    return lambda phase, ends: asyncio.create_task(strike(phase, ends))


def pauses(phase: Phase, times: Sequence[float], window_s: float) -> list[list[float]]:
    """By time, of each answer under way then its longest gap between chunks that ended within the
    window after it; answers that failed or had no chunk yet are left out."""
    found: list[list[float]] = []
    for at in times:
        longest = []
        for answer in phase.answers:
            arrivals = answer.arrivals
            if answer.failure or len(arrivals) < 2 or not arrivals[0] < at < arrivals[-1]:
                continue
            gaps = [
                after - before
                for before, after in itertools.pairwise(arrivals)
                if after > at and before < at + window_s
            ]
            longest.append(max(gaps))
        found.append(longest)
    return found
