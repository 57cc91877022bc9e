"""Compares policies of placement: a gateway with engines of its own for each, the same workload.

All gateways stay up and run one after the other; the first in one round is the last in the next.
Prompts of a round begin with a fresh salt, the same for all policies, so that every cache starts
cold. Clients use semantic variables, a session for each job. A first round, not timed, shows that
all policies give the same texts.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec

from parrot_gateway.bench.apps.applications import RECIPES
from parrot_gateway.bench.apps.measure import (
    Plan,
    Summary,
    alternate,
    characters_per_token,
    p99,
    salt,
    samples_by_kind,
)
from parrot_gateway.bench.apps.runner import GatewayClient, RunResult, run_workload, session_of
from parrot_gateway.bench.apps.workload import NAMED, SEMANTIC, Size, Way, Workload
from parrot_gateway.bench.servers import BenchmarkError, start_gateway

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


class Times(msgspec.Struct, frozen=True):
    """One kind of job under one policy, over all rounds."""

    kind: str
    #: `s` for jobs, `ms/token` where the time is counted per token of the answer.
    unit: str
    p50: float
    p99: float
    mean: float
    #: The smallest and the largest mean of a round.
    least_mean: float
    largest_mean: float
    #: Jobs, those of all rounds together.
    jobs: int
    #: Seconds from end to end, whatever the unit.
    end_to_end_p50_s: float
    end_to_end_p99_s: float


class PolicyOutcome(msgspec.Struct, frozen=True):
    policy: str
    times: list[Times]
    #: Of each round.
    work: list[Work]
    #: By kind and round, the jobs' seconds (per token, where so counted).
    samples: dict[str, list[list[float]]]

    def prefilled(self) -> float:
        """Tokens that were computed in a round, the median."""
        return median(work.prefilled_tokens for work in self.work)


class SpeedUp(msgspec.Struct, frozen=True):
    """The first policy against another, in the same rounds."""

    kind: str
    against: str
    #: Median over the rounds of the other's median, or mean, over the first's.
    p50: float
    mean: float
    #: The mean of all the other's jobs over that of all the first's, and the smallest and the
    #: largest ratio of the two means of a round: what lies between them is within the noise.
    of_all: float
    least: float
    largest: float


class PoliciesOutcome(msgspec.Struct, frozen=True):
    app: str
    count: int
    scale: float
    engines: int
    calls: int
    tokens: int
    same_texts: bool
    policies: list[PolicyOutcome]
    speed_ups: list[SpeedUp]


async def compare_policies(
    plan: Plan, policies: Sequence[str], engines: int, progress: Callable[[str], None]
) -> list[PoliciesOutcome]:
    """Run applications under all policies.

    Args:
        plan: the applications.
        policies: as `serve --policy` takes them; the first is compared with each other.
        engines: of each gateway.
        progress: called with what is being measured.

    Raises:
        BenchmarkError: there is too little memory, a gateway did not start, or a call failed.
    """
    check_memory(engines * len(policies))
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-policies-")))
        config = folder / "config.yaml"
        # JSON is YAML too.
        models = [{"model": plan.model, "engines": engines}]
        config.write_bytes(msgspec.json.encode({"models": models}))
        clients: dict[str, GatewayClient] = {}
        for policy in policies:
            progress(f"starting {engines} engines for {policy}")
            server = await start_gateway("--config", str(config), "--policy", policy, name=policy)
            stack.push_async_callback(server.stop)
            client = GatewayClient(server.url, plan.model)
            clients[policy] = await stack.enter_async_context(client)
        density = await characters_per_token(clients[policies[0]])
        return [
            await _compare(app, clients, plan.size(app, density), engines, plan.rounds, progress)
            for app in plan.apps
        ]


async def _compare(
    app: str,
    clients: dict[str, GatewayClient],
    size: Size,
    engines: int,
    rounds: int,
    progress: Callable[[str], None],
) -> PoliciesOutcome:
    workload = RECIPES[app].build(size, salt())
    texts: set[tuple[tuple[str, ...], ...]] = set()
    for policy, client in clients.items():
        progress(f"{app}: same texts, {policy}")
        result, _ = await run_counted(client, workload, SEMANTIC)
        texts.add(tuple(job.texts for job in result.jobs))
    workloads = [RECIPES[app].build(size, salt()) for _ in range(rounds)]

    async def timed(policy: str, number: int) -> tuple[RunResult, Work]:
        return await run_counted(clients[policy], workloads[number], SEMANTIC)

    runs = await alternate(list(clients), rounds, timed, progress, app)
    outcomes = [
        outcome(policy, workload, [run for run, _ in each], [work for _, work in each])
        for policy, each in runs.items()
    ]
    return PoliciesOutcome(
        app=app,
        count=size.count,
        scale=size.scale,
        engines=engines,
        calls=len(workload.calls),
        tokens=workload.tokens,
        same_texts=len(texts) == 1,
        policies=outcomes,
        speed_ups=speed_ups(outcomes),
    )


async def run_counted(
    client: GatewayClient, workload: Workload, way: Way, *, forget_jobs: bool = False
) -> tuple[RunResult, Work]:
    """Run a workload, a session for each job where the way has sessions, and count the work.

    Sessions are deleted at the end of the run, with `forget_jobs` each at the end of its job.

    Raises:
        BenchmarkError: a call failed, or the engines send no counters.
    """
    session = f"bench-{secrets.token_hex(8)}"
    before = await _counters(client)
    try:
        result = await run_workload(
            client, workload, way, session, session_per_job=True, forget_jobs=forget_jobs
        )
    finally:
        if way in (SEMANTIC, NAMED) and not forget_jobs:
            names = (session_of(session, job) for job in workload.jobs)
            await asyncio.gather(*(client.forget(name) for name in names))
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


def outcome(
    policy: str, workload: Workload, results: Sequence[RunResult], work: Sequence[Work]
) -> PolicyOutcome:
    samples = samples_by_kind(workload, results)
    times = []
    for kind, rounds in samples.items():
        summary = Summary.of(workload, kind, rounds)
        means = [Summary.of(workload, kind, [each]).mean for each in rounds]
        whole = [done.seconds for run in results for done in run.jobs if done.job.kind == kind]
        times.append(
            Times(
                kind,
                *summary,
                least_mean=min(means),
                largest_mean=max(means),
                jobs=len(whole),
                end_to_end_p50_s=median(whole),
                end_to_end_p99_s=p99(whole),
            )
        )
    return PolicyOutcome(policy, times, list(work), samples)


def speed_ups(outcomes: Sequence[PolicyOutcome]) -> list[SpeedUp]:
    """The first against each other, round by round."""
    ours, *others = outcomes
    found = []
    for kind, rounds in ours.samples.items():
        for other in others:
            pairs = list(zip(other.samples[kind], rounds, strict=True))
            means = [fmean(theirs) / fmean(mine) for theirs, mine in pairs]
            of_all = [fmean(chain.from_iterable(side)) for side in zip(*pairs, strict=True)]
            found.append(
                SpeedUp(
                    kind=kind,
                    against=other.policy,
                    p50=median(median(theirs) / median(mine) for theirs, mine in pairs),
                    mean=median(means),
                    of_all=of_all[0] / of_all[1],
                    least=min(means),
                    largest=max(means),
                )
            )
    return found


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


def to_dict(outcome: PoliciesOutcome) -> dict[str, Any]:
    content: dict[str, Any] = msgspec.to_builtins(outcome)
    for plain, policy in zip(content["policies"], outcome.policies, strict=True):
        plain["prefilled_tokens"] = policy.prefilled()
    return content
