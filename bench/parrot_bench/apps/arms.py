"""Arms of a comparison: a gateway with engines of its own and one kind of client each.

All arms stay up and run one after the other; the first in one round is the last in the next. Every
round has a salt of its own, the same for all arms, which have to give the same texts.
"""

from __future__ import annotations

import asyncio
import math
import random
import secrets
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from parrot_bench.applications.description import Call, Message
from parrot_bench.apps.measure import alternate
from parrot_bench.apps.runner import GatewayClient, RunResult, run_workload
from parrot_bench.apps.workload import Way, Workload
from parrot_bench.servers import START_TIMEOUT_S, BenchmarkError, Server, start_gateway
from parrot_gateway.settings import DEMO_MODEL

#: Engines report so often: each run waits for a report.
_HEARTBEAT_S = 0.5
#: To load other models than the demo model, for all arms at once.
_LOAD_TIMEOUT_S = 900.0
#: Longest wait for the counters that come with heartbeats.
_STATS_TIMEOUT_S = 15.0
#: Memory of a process of the demo model.
_ENGINE_BYTES = 350 * 1024 * 1024


class Work(msgspec.Struct, frozen=True):
    """What the engines of a gateway did, by their own counters."""

    #: Prompt tokens, and of these those found in a cache; tokens that were computed again after
    #: a preemption count anew.
    filled_tokens: int
    cached_tokens: int
    generated_tokens: int
    preemptions: int
    #: Seconds that engines spent in steps, all together.
    busy_s: float
    #: Steps of all engines.
    steps: int

    @property
    def prefilled_tokens(self) -> int:
        """Prompt tokens whose KV had to be computed."""
        return self.filled_tokens - self.cached_tokens


@dataclass(frozen=True, slots=True)
class Arm:
    """One gateway and one kind of client."""

    name: str
    way: Way
    settings: dict[str, Any] = field(default_factory=dict)
    policy: str = "parrot"


@dataclass(frozen=True, slots=True)
class Fleet:
    """The engines of each arm.

    Attributes:
        model: a folder, a hub id, or the demo model.
        engines: how many.
        settings: of the model, as in a gateway's `models`.
    """

    model: str
    engines: int
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What clients call."""
        return self.model if self.model == DEMO_MODEL else Path(self.model).name

    @property
    def kv_tokens(self) -> int:
        """Of all engines together, where that is given; else 0."""
        blocks, size = self.settings.get("num_blocks"), self.settings.get("block_size")
        return self.engines * int(blocks or 0) * int(size or 0)


async def start_arms(
    stack: AsyncExitStack, arms: Sequence[Arm], fleet: Fleet
) -> dict[str, GatewayClient]:
    """Gateways of all arms, started together, by the arms' names; `stack` ends them.

    Raises:
        BenchmarkError: one did not start.
    """
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-apps-")))
    model = {"model": fleet.model, "name": fleet.name, "engines": fleet.engines, **fleet.settings}
    timeout_s = START_TIMEOUT_S if fleet.model == DEMO_MODEL else _LOAD_TIMEOUT_S

    async def start(arm: Arm) -> Server:
        config = folder / f"{arm.name}.yaml"
        settings = {"models": [model], "engines": {"heartbeat_s": _HEARTBEAT_S}, **arm.settings}
        # JSON is YAML too.
        config.write_bytes(msgspec.json.encode(settings))
        arguments = ("--config", str(config), "--policy", arm.policy)
        server = await start_gateway(*arguments, name=arm.name, timeout_s=timeout_s)
        stack.push_async_callback(server.stop)
        return server

    started = await asyncio.gather(*map(start, arms), return_exceptions=True)
    clients = {}
    for arm, server in zip(arms, started, strict=True):
        if isinstance(server, BaseException):
            raise server
        client = GatewayClient(server.url, fleet.name)
        clients[arm.name] = await stack.enter_async_context(client)
    return clients


async def run_counted(
    client: GatewayClient, workload: Workload, way: Way
) -> tuple[RunResult, Work]:
    """Run a workload, a session for each job where the way has sessions, and count the work.

    Each session is deleted at the end of its job.

    Raises:
        BenchmarkError: a call failed, or the engines send no counters.
    """
    session = f"bench-{secrets.token_hex(8)}"
    before = await _counters(client)
    result = await run_workload(
        client, workload, way, session, session_per_job=True, forget_jobs=True
    )
    after = await _counters(client)
    return result, Work(**{name: after[name] - before[name] for name in after})


async def _counters(client: GatewayClient) -> dict[str, Any]:
    """By the fields of `Work`: sums over all engines, of counters younger than this call."""
    began = time.monotonic()
    while True:
        engines = (await client.health())["engines"]
        elapsed_s = time.monotonic() - began
        if all(engine["stats_age_s"] < elapsed_s for engine in engines):
            return {
                name: sum(engine["stats"][name] for engine in engines)
                for name in Work.__struct_fields__
            }
        if elapsed_s > _STATS_TIMEOUT_S:
            raise BenchmarkError(f"{client.base_url}: its engines send no counters.")
        await asyncio.sleep(0.1)


async def run_rounds(
    arms: Sequence[Arm],
    clients: Mapping[str, GatewayClient],
    workloads: Sequence[Workload],
    progress: Callable[[str], None],
    title: str,
    ends_by: float = math.inf,
) -> dict[str, list[tuple[RunResult, Work]]]:
    """Each workload in all arms, by the arms' names; see `alternate`.

    Raises:
        BenchmarkError: a call failed.
    """
    ways = {arm.name: arm.way for arm in arms}

    async def run(name: str, number: int) -> tuple[RunResult, Work]:
        return await run_counted(clients[name], workloads[number], ways[name])

    return await alternate(list(ways), len(workloads), run, progress, title, ends_by=ends_by)


def salt_of(app: str, load: float, seed: int, number: int) -> str:
    """Of a round at a load; all salts have one length."""
    draw = random.Random(f"{app} {load:g} {seed} {number}")
    return f"Copy {draw.randrange(10**12):012d}."


def at_load(workload: Workload, load: float) -> Workload:
    """The same with jobs that arrive so many times as fast."""
    jobs = tuple(replace(job, arrives_s=job.arrives_s / load) for job in workload.jobs)
    return replace(workload, jobs=jobs)


def salted(workload: Workload, salt: str) -> Workload:
    """The same with a salt in front of each call's first message: no cache knows its prompts."""

    def with_salt(call: Call) -> Call:
        if not call.history:
            return replace(call, prompt=(f"{salt}\n", *call.prompt))
        first, *others = call.history
        first = Message(first.role, (f"{salt}\n", *first.content))
        return replace(call, history=(first, *others))

    jobs = tuple(replace(job, calls=tuple(map(with_salt, job.calls))) for job in workload.jobs)
    return replace(workload, jobs=jobs)


def differing(runs: Mapping[str, Sequence[RunResult]]) -> list[str]:
    """Texts that are not the same in all arms: the call, its round, and from which character on."""
    found = []
    for number, round_ in enumerate(zip(*runs.values(), strict=True), 1):
        for jobs in zip(*(run.jobs for run in round_), strict=True):
            for name, *texts in zip(jobs[0].job.finals, *(job.texts for job in jobs), strict=True):
                if len(set(texts)) > 1:
                    at = _first_difference(texts)
                    arms = ", ".join(
                        arm for arm, text in zip(runs, texts, strict=True) if text != texts[0]
                    )
                    found.append(
                        f"{name}, round {number}: {arms} from character {at} of {len(texts[0])} on"
                    )
    return found


def _first_difference(texts: Sequence[str]) -> int:
    """The first place at which not all texts have the same character."""
    places = zip(*texts, strict=False)
    shortest = min(map(len, texts))
    return next((at for at, each in enumerate(places) if len(set(each)) > 1), shortest)


def check_memory(engines: int) -> None:
    """Refuse to start more engines than there is memory for.

    Raises:
        BenchmarkError: there is too little.
    """
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    sizes = {name: int(rest.split()[0]) for name, _, rest in (x.partition(":") for x in lines)}
    free = sizes.get("MemAvailable", 0) * 1024
    if free and free < engines * _ENGINE_BYTES:
        raise BenchmarkError(
            f"{engines} engines take about {engines * _ENGINE_BYTES >> 20:,} MiB, and "
            f"{free >> 20:,} MiB of memory are available: take fewer engines or policies."
        )
