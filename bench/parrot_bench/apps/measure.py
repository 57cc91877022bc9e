"""Compares ways of running a workload: alternating rounds on one server, times and speed-ups.

NOTE: a timed run must not profit from what another left in the prefix cache: the prompts of each
begin with a fresh salt of the same form. A first round, not timed, with one salt for all, shows
that the ways give the same texts.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import chain
from statistics import fmean, median
from typing import Any, NamedTuple, TypeVar

import msgspec

from parrot_bench.apps import book
from parrot_bench.apps.recipes import BY_WAY as RECIPES
from parrot_bench.apps.runner import GatewayClient, RunResult, run_workload
from parrot_bench.apps.workload import SEMANTIC, Size, Way, Workload, round_trips
from parrot_bench.load import Spread
from parrot_bench.servers import start_gateway

#: Speed-ups to reach: application, client, round trip of the network at least so many
#: milliseconds, at least so many steps or chunks.
AIMS = {("chain", "one by one"): (3.0, 250, 20), ("map-reduce", "one by one"): (2.0, 250, 16)}
#: Without a network, and for the clients that have no aim of their own.
NEVER_SLOWER = 0.98
#: Texts that differ are listed up to so many.
MAX_DIFFERENCES = 5

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Plan:
    """What a comparison runs; `count` and `scale` are the application's own when not given."""

    apps: Sequence[str]
    model: str
    rounds: int
    count: int | None = None
    scale: float | None = None

    def size(self, app: str, characters_per_token: float) -> Size:
        recipe = RECIPES[app]
        return Size(self.count or recipe.count, self.scale or recipe.scale, characters_per_token)


class Comparison(msgspec.Struct, frozen=True):
    """One kind of job, one client against semantic variables, at one network delay."""

    app: str
    kind: str
    #: `s` for jobs, `ms/token` where the time is counted per token of the answer.
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
    #: Seconds (per token, where so counted) of each job: delay, way, kind, round.
    samples: dict[str, dict[str, dict[str, list[list[float]]]]]


async def compare_ways(
    plan: Plan,
    delays_ms: Sequence[float],
    base_url: str | None,
    api_key: str | None,
    progress: Callable[[str], None],
) -> list[AppOutcome]:
    """Run applications in all ways, on the server at `base_url` or a gateway started for it.

    Raises:
        BenchmarkError: the server did not start, or a call failed.
    """
    async with AsyncExitStack() as stack:
        if base_url is None:
            progress("starting the gateway")
            server = await start_gateway("--model", plan.model)
            stack.push_async_callback(server.stop)
            base_url = server.url
        client = await stack.enter_async_context(GatewayClient(base_url, plan.model, api_key))
        density = await characters_per_token(client)
        return [
            await measure(client, app, plan.size(app, density), delays_ms, plan.rounds, progress)
            for app in plan.apps
        ]


async def characters_per_token(client: GatewayClient) -> float:
    """Of the model's tokenizer on the book; a usual value where the server does not count."""
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
    """Run one application (a key of `RECIPES`), all ways.

    Args:
        client: of a server that is ready.
        app: a key of `RECIPES`.
        size: of the workload.
        delays_ms: round trips of the simulated network.
        rounds: timed runs for each delay and way, in turn.
        progress: called with what is being measured.

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

    async def timed(way: Way, _round: int) -> RunResult:
        return await _run(client, build(size, salt()), way)

    for delay_ms in delays_ms:
        client.round_trip_s = delay_ms / 1000
        runs = await alternate(ways, rounds, timed, progress, f"{app}: {delay_ms:g} ms")
        times: dict[str, dict[str, list[list[float]]]] = {
            way: samples_by_kind(workload, each) for way, each in runs.items()
        }
        samples[f"{delay_ms:g}"] = times
        comparisons += _compare(app, workload, size, delay_ms, times)
    return AppOutcome(
        app=app,
        count=size.count,
        scale=size.scale,
        calls=len(workload.calls),
        tokens=workload.tokens,
        requests={way: run.requests for way, run in firsts.items()},
        same_texts=not unequal,
        differences=unequal[:MAX_DIFFERENCES],
        comparisons=comparisons,
        samples=samples,
    )


Name = TypeVar("Name", bound=str)


async def alternate(
    names: Sequence[Name],
    rounds: int,
    run: Callable[[Name, int], Awaitable[T]],
    progress: Callable[[str], None],
    title: str,
    *,
    ends_by: float = math.inf,
) -> dict[Name, list[T]]:
    """What `run(name, round)` gives, by name.

    The order of the names turns by one place every two rounds and is mirrored in every other
    round, so that each name comes first, last and in between equally often. A further round is not
    begun where it would not end by `ends_by` (of `time.monotonic`) if it took as long as those
    before.
    """
    results: dict[Name, list[T]] = {name: [] for name in names}
    began = time.monotonic()
    for number in range(rounds):
        now = time.monotonic()
        if number and now + (now - began) / number > ends_by:
            break
        for name in in_round(names, number):
            progress(f"{title}, round {number + 1} of {rounds}, {name}")
            results[name].append(await run(name, number))
    return results


def in_round(names: Sequence[Name], number: int) -> list[Name]:
    """The order of the names in a round."""
    turn = number // 2 % len(names)
    order = [*names[turn:], *names[:turn]]
    return order[::-1] if number % 2 else order


async def _run(client: GatewayClient, workload: Workload, way: Way) -> RunResult:
    session = f"bench-{secrets.token_hex(8)}"
    try:
        return await run_workload(client, workload, way, session)
    finally:
        if way == SEMANTIC:
            await client.forget(session)


def samples_by_kind(
    workload: Workload, results: Iterable[RunResult]
) -> dict[str, list[list[float]]]:
    """By kind and round the seconds of each job, per token of its answer where so counted."""
    found: dict[str, list[list[float]]] = {}
    for result in results:
        seconds: dict[str, list[float]] = {}
        for done in result.jobs:
            per = done.job.tokens if done.job.kind in workload.per_token else 1
            seconds.setdefault(done.job.kind, []).append(done.seconds / per)
        for kind, each in seconds.items():
            found.setdefault(kind, []).append(each)
    return found


class Summary(NamedTuple):
    """One kind of job over all rounds: in seconds, or in milliseconds a token."""

    unit: str
    p50: float
    p99: float
    mean: float

    @classmethod
    def of(cls, workload: Workload, kind: str, rounds: Sequence[Sequence[float]]) -> Summary:
        unit, factor = ("ms/token", 1000.0) if kind in workload.per_token else ("s", 1.0)
        times = [seconds * factor for seconds in chain.from_iterable(rounds)]
        return cls(unit, median(times), p99(times), fmean(times))


def _compare(
    app: str,
    workload: Workload,
    size: Size,
    delay_ms: float,
    times: dict[str, dict[str, list[list[float]]]],
) -> list[Comparison]:
    found = []
    for kind, rounds in times[SEMANTIC].items():
        semantic = Summary.of(workload, kind, rounds)
        job = next(job for job in workload.jobs if job.kind == kind)
        for client in workload.clients:
            theirs = Summary.of(workload, kind, times[client][kind])
            ratios = [
                median(a) / median(b) for a, b in zip(times[client][kind], rounds, strict=True)
            ]
            found.append(
                Comparison(
                    *(app, kind, semantic.unit, delay_ms, client),
                    *(theirs.p50, theirs.p99, theirs.mean),
                    *(semantic.p50, semantic.p99, semantic.mean),
                    speedup=median(ratios),
                    client_round_trips=round_trips(job, client),
                    semantic_round_trips=round_trips(job, SEMANTIC),
                    at_least=aim(app, client, delay_ms, size.count),
                )
            )
    return found


def p99(times: list[float]) -> float:
    """The longest of fewer than a hundred."""
    return Spread.of(times).p99 / 1000


def aim(app: str, client: str, delay_ms: float, count: int) -> float | None:
    """The speed-up to reach, if there is one."""
    if delay_ms == 0:
        return NEVER_SLOWER
    target, from_ms, from_count = AIMS.get((app, client), (0.0, 0, 0))
    return target if target and delay_ms >= from_ms and count >= from_count else None


def differences(runs: dict[Way, RunResult]) -> list[str]:
    """Where texts of other ways differ from those of the first way."""
    (first, reference), *others = runs.items()
    return [
        f"{name}: {first}: {a[:60]!r}…, {way}: {b[:60]!r}…"
        for way, run in others
        for theirs, ours in zip(reference.jobs, run.jobs, strict=True)
        for name, a, b in zip(theirs.job.finals, theirs.texts, ours.texts, strict=True)
        if a != b
    ]


def salt() -> str:
    """The beginning of a run's prompts; all salts have one length."""
    return f"Copy {secrets.randbelow(10**12):012d}."


def to_dict(outcome: AppOutcome) -> dict[str, Any]:
    content: dict[str, Any] = msgspec.to_builtins(outcome)
    for plain, comparison in zip(content["comparisons"], outcome.comparisons, strict=True):
        plain["met"] = comparison.met
    return content
