"""Rounds that alternate between arms, and times by kind of application."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import chain
from statistics import fmean, median
from typing import NamedTuple, TypeVar

from parrot_bench.apps import book
from parrot_bench.apps.runner import GatewayClient, RunResult
from parrot_bench.apps.workload import Size, Workload
from parrot_bench.load import Spread

T = TypeVar("T")
Name = TypeVar("Name", bound=str)


async def characters_per_token(client: GatewayClient) -> float:
    """The book's density by the model's tokenizer; a usual one where the server counts none."""
    sample = book.passage(20_000)
    count = await client.count_tokens(sample)
    return len(sample) / count if count else Size(0, 0).characters_per_token


async def alternate(
    names: Sequence[Name],
    rounds: int,
    run: Callable[[Name, int], Awaitable[T]],
    progress: Callable[[str], None],
    title: str,
    *,
    ends_by: float = math.inf,
) -> dict[Name, list[T]]:
    """Collect the results of `run(name, round)`, by name.

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
    #: The longest of fewer than a hundred.
    p99: float
    mean: float

    @classmethod
    def of(cls, workload: Workload, kind: str, rounds: Sequence[Sequence[float]]) -> Summary:
        unit, factor = ("ms/token", 1000.0) if kind in workload.per_token else ("s", 1.0)
        times = [seconds * factor for seconds in chain.from_iterable(rounds)]
        return cls(unit, median(times), Spread.of(times).p99 / 1000, fmean(times))


def salt() -> str:
    """The beginning of a run's prompts; all salts have one length."""
    return f"Copy {secrets.randbelow(10**12):012d}."
