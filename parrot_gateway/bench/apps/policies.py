"""Compares policies of placement: a gateway with engines of its own for each, the same workload.

All gateways stand at the same time, and run one after the other; whoever is first in one round is
last in the next. A round has a salt of its own at the beginning of its prompts, the same for all
policies: each finds its caches without it, and nothing else differs. Clients use semantic
variables, a session for each job. A first round, not timed, shows that all policies give the same
texts.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from itertools import chain
from pathlib import Path
from statistics import fmean, median

import msgspec

from parrot_gateway.bench.apps.applications import RECIPES
from parrot_gateway.bench.apps.measure import characters_per_token, p99, salt, seconds_by_kind
from parrot_gateway.bench.apps.runner import GatewayClient, RunResult, run_workload, session_of
from parrot_gateway.bench.apps.workload import SEMANTIC, Size, Workload
from parrot_gateway.bench.servers import BenchmarkError, Server

#: Counters that come with heartbeats are waited for so long.
_NEWS_TIMEOUT_S = 15.0
#: What a process of the demo model takes.
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
    #: `s` for jobs, `ms/token` where the time is told per token of the answer.
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
    """One policy."""

    policy: str
    times: list[Times]
    #: Of each round.
    work: list[Work]
    #: By kind and round, the jobs' seconds (per token, where so told).
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
    """One application."""

    app: str
    count: int
    scale: float
    engines: int
    calls: int
    tokens: int
    same_texts: bool
    policies: list[PolicyOutcome]
    speed_ups: list[SpeedUp]


async def compare(
    apps: Sequence[str],
    policies: Sequence[str],
    *,
    engines: int,
    model: str,
    count: int | None,
    scale: float | None,
    rounds: int,
    progress: Callable[[str], None] = lambda _: None,
) -> list[PoliciesOutcome]:
    """Run applications under all policies.

    Args:
        apps: keys of `RECIPES`.
        policies: as `serve --policy` takes them; the first is compared with each other.
        engines: of each gateway.
        model: what they run.
        count: of the workload; None for its own.
        scale: the same.
        rounds: timed runs under each policy.
        progress: is told what is being measured.

    Raises:
        BenchmarkError: there is too little memory, a gateway did not start, or a call failed.
    """
    _check_memory(engines * len(policies))
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-policies-")))
        config = folder / "config.yaml"
        # JSON is YAML too.
        config.write_bytes(msgspec.json.encode({"models": [{"model": model, "engines": engines}]}))
        clients: dict[str, GatewayClient] = {}
        for policy in policies:
            progress(f"starting {engines} engines for {policy}")
            command = [sys.executable, "-m", "parrot_gateway", "serve", "--port", "0"]
            command += ["--config", str(config), "--policy", policy]
            server = await Server.start(policy, command, r"ready at (http://\S+/v1)")
            stack.push_async_callback(server.stop)
            client = GatewayClient(server.url, model)
            clients[policy] = await stack.enter_async_context(client)
        density = await characters_per_token(clients[policies[0]])
        outcomes = []
        for app in apps:
            recipe = RECIPES[app]
            size = Size(count or recipe.count, scale or recipe.scale, density)
            outcomes.append(await _compare(app, clients, size, engines, rounds, progress))
        return outcomes


async def _compare(
    app: str,
    clients: dict[str, GatewayClient],
    size: Size,
    engines: int,
    rounds: int,
    progress: Callable[[str], None],
) -> PoliciesOutcome:
    policies = list(clients)
    workload = RECIPES[app].build(size, salt())
    texts: dict[str, tuple[tuple[str, ...], ...]] = {}
    for policy in policies:
        progress(f"{app}: same texts, {policy}")
        result, _ = await _run(clients[policy], workload)
        texts[policy] = tuple(job.texts for job in result.jobs)
    results: dict[str, list[RunResult]] = {policy: [] for policy in policies}
    work: dict[str, list[Work]] = {policy: [] for policy in policies}
    for number in range(rounds):
        workload = RECIPES[app].build(size, salt())
        # Whoever is first in one round is last in the next.
        for policy in policies if number % 2 == 0 else reversed(policies):
            progress(f"{app}: round {number + 1} of {rounds}, {policy}")
            result, done = await _run(clients[policy], workload)
            results[policy].append(result)
            work[policy].append(done)
    outcomes = [outcome(policy, workload, results[policy], work[policy]) for policy in policies]
    return PoliciesOutcome(
        app=app,
        count=size.count,
        scale=size.scale,
        engines=engines,
        calls=len(workload.calls),
        tokens=sum(call.tokens for call in workload.calls),
        same_texts=len(set(texts.values())) == 1,
        policies=outcomes,
        speed_ups=speed_ups(outcomes),
    )


async def _run(client: GatewayClient, workload: Workload) -> tuple[RunResult, Work]:
    """One run, and what the engines did for it."""
    session = f"bench-{secrets.token_hex(8)}"
    before = await _work(client)
    try:
        result = await run_workload(client, workload, SEMANTIC, session, session_per_job=True)
    finally:
        await asyncio.gather(*(client.forget(session_of(session, job)) for job in workload.jobs))
    after = await _work(client)
    differences = {
        name: getattr(after, name) - getattr(before, name) for name in Work.__struct_fields__
    }
    return result, Work(**differences)


async def _work(client: GatewayClient) -> Work:
    """The sum over all engines, of counters that are younger than this call."""
    began = time.monotonic()
    while True:
        engines = (await client.health())["engines"]
        now = time.monotonic()
        if all(engine["stats_age_s"] < now - began for engine in engines):
            return Work(
                **{
                    name: sum(engine["stats"][name] for engine in engines)
                    for name in Work.__struct_fields__
                }
            )
        if now - began > _NEWS_TIMEOUT_S:
            raise BenchmarkError(f"{client.base_url}: its engines send no counters.")
        await asyncio.sleep(0.1)


def outcome(
    policy: str, workload: Workload, results: Sequence[RunResult], work: Sequence[Work]
) -> PolicyOutcome:
    """What all rounds of one policy come to."""
    samples: dict[str, list[list[float]]] = {}
    whole: dict[str, list[float]] = {}
    for result in results:
        for kind, seconds in seconds_by_kind(workload, result).items():
            samples.setdefault(kind, []).append(seconds)
        for done in result.jobs:
            whole.setdefault(done.job.kind, []).append(done.seconds)
    times = []
    for kind, rounds in samples.items():
        unit, factor = ("ms/token", 1000.0) if kind in workload.per_token else ("s", 1.0)
        seconds = list(chain.from_iterable(rounds))
        times.append(
            Times(
                kind=kind,
                unit=unit,
                p50=median(seconds) * factor,
                p99=p99(seconds) * factor,
                mean=fmean(seconds) * factor,
                least_mean=min(map(fmean, rounds)) * factor,
                largest_mean=max(map(fmean, rounds)) * factor,
                jobs=len(seconds),
                end_to_end_p50_s=median(whole[kind]),
                end_to_end_p99_s=p99(whole[kind]),
            )
        )
    return PolicyOutcome(policy, times, list(work), samples)


def speed_ups(outcomes: Sequence[PolicyOutcome]) -> list[SpeedUp]:
    """The first against each other, round by round."""
    ours, *others = outcomes
    found = []
    for kind, rounds in ours.samples.items():
        for other in others:
            theirs_of_all = other.samples[kind]
            pairs = list(zip(theirs_of_all, rounds, strict=True))
            means = [fmean(theirs) / fmean(mine) for theirs, mine in pairs]
            found.append(
                SpeedUp(
                    kind=kind,
                    against=other.policy,
                    p50=median(median(theirs) / median(mine) for theirs, mine in pairs),
                    mean=median(means),
                    of_all=fmean(chain.from_iterable(theirs_of_all))
                    / fmean(chain.from_iterable(rounds)),
                    least=min(means),
                    largest=max(means),
                )
            )
    return found


def _check_memory(engines: int) -> None:
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
