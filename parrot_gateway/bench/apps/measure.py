"""Compares ways of running a workload: alternating rounds on one server, times and speed-ups.

NOTE: a timed run must not profit from what another left in the prefix cache. Every run has a salt
of its own at the beginning of its prompts, all salts of one form, so that runs differ in nothing
else. That the ways give the same texts is shown in a first round, not timed, with one salt for all.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from itertools import chain
from statistics import fmean, median
from typing import Any

import msgspec

from parrot_gateway.bench.apps import book
from parrot_gateway.bench.apps.applications import RECIPES
from parrot_gateway.bench.apps.runner import GatewayClient, RunResult, run_workload
from parrot_gateway.bench.apps.workload import SEMANTIC, Size, Way, Workload
from parrot_gateway.bench.load import Spread

#: Speed-ups to reach: application, client, round trip of the network at least so many
#: milliseconds, at least so many steps or chunks.
AIMS = {("chain", "one by one"): (3.0, 250, 20), ("map-reduce", "one by one"): (2.0, 250, 16)}
#: Without a network, and for the clients that have no aim of their own.
NEVER_SLOWER = 0.98


class Comparison(msgspec.Struct, frozen=True):
    """One kind of job, one client against semantic variables, at one network delay."""

    app: str
    kind: str
    #: `s` for jobs, `ms/token` where the time is told per token of the answer.
    unit: str
    delay_ms: float
    client: str
    client_p50: float
    client_p99: float
    client_mean: float
    semantic_p50: float
    semantic_p99: float
    semantic_mean: float
    #: Median over the rounds of the client's median over that with semantic variables: what else
    #: the machine does comes and goes between rounds.
    speedup: float
    #: Of one job, one after another.
    client_round_trips: int
    semantic_round_trips: int
    at_least: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the aim is met; None without one."""
        return None if self.at_least is None else self.speedup >= self.at_least


class AppOutcome(msgspec.Struct, frozen=True):
    """One application."""

    app: str
    count: int
    scale: float
    calls: int
    #: Tokens of all answers of one run.
    tokens: int
    #: HTTP requests of one run, each way; the same at every delay.
    requests: dict[str, int]
    #: Whether all ways gave the same texts for the same prompts, lengths and seeds.
    same_texts: bool
    #: First differences, if any.
    differences: list[str]
    comparisons: list[Comparison]
    #: Seconds (per token, where so told) of each job: delay, way, kind, round.
    samples: dict[str, dict[str, dict[str, list[list[float]]]]]


async def characters_per_token(client: GatewayClient) -> float:
    """Of the model's tokenizer on the book; a usual value where the server does not tell."""
    sample = book.passage(20_000)
    count = await client.count_tokens(sample)
    return len(sample) / count if count else Size(0, 0).characters_per_token


async def measure(
    client: GatewayClient,
    app: str,
    size: Size,
    delays_ms: Sequence[float],
    rounds: int,
    progress: Callable[[str], None] = lambda _: None,
) -> AppOutcome:
    """Run one application, all ways.

    Args:
        client: of a server that is ready.
        app: a key of `RECIPES`.
        size: of the workload.
        delays_ms: round trips of the simulated network.
        rounds: timed runs for each delay and way, in turn.
        progress: is told what is being measured.

    Raises:
        BenchmarkError: a call failed.
    """
    build = RECIPES[app].build
    workload = build(size, salt())
    ways: list[Way] = [*workload.clients, SEMANTIC]
    client.round_trip_s = 0.0
    firsts: dict[Way, RunResult] = {}
    for way in ways:
        progress(f"{app}: same texts, {way}")
        firsts[way] = await _run(client, workload, way)
    unequal = differences(firsts)
    samples: dict[str, dict[str, dict[str, list[list[float]]]]] = {}
    comparisons: list[Comparison] = []
    for delay_ms in delays_ms:
        client.round_trip_s = delay_ms / 1000
        times: dict[str, dict[str, list[list[float]]]] = {way: {} for way in ways}
        for number in range(rounds):
            # Whoever is first in one round is last in the next.
            for way in ways if number % 2 == 0 else reversed(ways):
                progress(f"{app}: {delay_ms:g} ms, round {number + 1} of {rounds}, {way}")
                result = await _run(client, build(size, salt()), way)
                for kind, seconds in seconds_by_kind(workload, result).items():
                    times[way].setdefault(kind, []).append(seconds)
        samples[f"{delay_ms:g}"] = times
        comparisons += _compare(app, workload, size, delay_ms, times)
    return AppOutcome(
        app=app,
        count=size.count,
        scale=size.scale,
        calls=len(workload.calls),
        tokens=sum(call.tokens for call in workload.calls),
        requests={way: run.requests for way, run in firsts.items()},
        same_texts=not unequal,
        differences=unequal[:5],
        comparisons=comparisons,
        samples=samples,
    )


async def _run(client: GatewayClient, workload: Workload, way: Way) -> RunResult:
    session = f"bench-{secrets.token_hex(8)}"
    try:
        return await run_workload(client, workload, way, session)
    finally:
        if way == SEMANTIC:
            await client.forget(session)


def seconds_by_kind(workload: Workload, result: RunResult) -> dict[str, list[float]]:
    """The time of each job, per token of its answer where so told."""
    found: dict[str, list[float]] = {}
    for done in result.jobs:
        per = done.job.tokens if done.job.kind in workload.per_token else 1
        found.setdefault(done.job.kind, []).append(done.seconds / per)
    return found


def _compare(
    app: str,
    workload: Workload,
    size: Size,
    delay_ms: float,
    times: dict[str, dict[str, list[list[float]]]],
) -> list[Comparison]:
    found = []
    for kind, rounds in times[SEMANTIC].items():
        semantic = list(chain.from_iterable(rounds))
        job = next(job for job in workload.jobs if job.kind == kind)
        per_token = kind in workload.per_token
        unit, factor = ("ms/token", 1000.0) if per_token else ("s", 1.0)
        for client in workload.clients:
            theirs = list(chain.from_iterable(times[client][kind]))
            ratios = [
                median(a) / median(b) for a, b in zip(times[client][kind], rounds, strict=True)
            ]
            found.append(
                Comparison(
                    app=app,
                    kind=kind,
                    unit=unit,
                    delay_ms=delay_ms,
                    client=client,
                    client_p50=median(theirs) * factor,
                    client_p99=p99(theirs) * factor,
                    client_mean=fmean(theirs) * factor,
                    semantic_p50=median(semantic) * factor,
                    semantic_p99=p99(semantic) * factor,
                    semantic_mean=fmean(semantic) * factor,
                    speedup=median(ratios),
                    client_round_trips=job.round_trips(client),
                    semantic_round_trips=job.round_trips(SEMANTIC),
                    at_least=aim(app, client, delay_ms, size.count),
                )
            )
    return found


def p99(seconds: list[float]) -> float:
    """The longest of fewer than a hundred."""
    return Spread.of(seconds).p99 / 1000


def aim(app: str, client: str, delay_ms: float, count: int) -> float | None:
    """The speed-up to reach, if there is one."""
    if delay_ms == 0:
        return NEVER_SLOWER
    target, from_ms, from_count = AIMS.get((app, client), (0.0, 0, 0))
    return target if target and delay_ms >= from_ms and count >= from_count else None


def differences(runs: dict[Way, RunResult]) -> list[str]:
    """Where texts of other ways differ from those of the first way."""
    (first, reference), *others = runs.items()
    found = []
    for way, run in others:
        for theirs, ours in zip(reference.jobs, run.jobs, strict=True):
            for name, a, b in zip(theirs.job.finals, theirs.texts, ours.texts, strict=True):
                if a != b:
                    found.append(f"{name}: {first}: {a[:60]!r}…, {way}: {b[:60]!r}…")
    return found


def salt() -> str:
    """What prompts of a run begin with: as long as any other: digits."""
    return f"Copy {secrets.randbelow(10**12):012d}."


def to_dict(outcome: AppOutcome) -> dict[str, Any]:
    """All of it as plain types, verdicts included."""
    content: dict[str, Any] = msgspec.to_builtins(outcome)
    for plain, comparison in zip(content["comparisons"], outcome.comparisons, strict=True):
        plain["met"] = comparison.met
    return content
