"""The best schedule: all of them tried where they are few, local search where they are many.

Local search begins with the best of the schedules that it is given, changes it at random in one
place at a time, and keeps what is no worse. Same seed, same result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product
from math import inf
from random import Random

from parrot_simulator.metrics import Figure, Results
from parrot_simulator.options import SimulationOptions
from parrot_simulator.oracle.schedule import (
    PRIORITY_STEP,
    CallKey,
    FixedWorkload,
    Placement,
    Schedule,
    follow,
    keys_of,
)
from parrot_simulator.plan import ApplicationPlan

#: Priorities that search tries: a scheduler's own three, and some around them.
_PRIORITIES = range(-PRIORITY_STEP, 3 * PRIORITY_STEP + 1)
#: Means of the delays that it tries, in seconds.
_DELAYS_S = (0.01, 0.1, 1.0)
#: Schedules that `exhaustive` tries at most.
MAX_EXHAUSTIVE = 100_000


@dataclass(frozen=True, slots=True)
class Problem:
    """A workload on some engines, and what counts."""

    workload: FixedWorkload
    #: Engines, and how calls reach them; the policies are not used.
    options: SimulationOptions
    #: Means to make small.
    figures: Sequence[Figure]
    #: What each of them is compared with.
    references: Sequence[float]

    def score(self, results: Results) -> float:
        """The mean of the figures in terms of their references; infinite where a call failed."""
        if results.total.failed:
            return inf
        pairs = zip(self.figures, self.references, strict=True)
        return sum(figure.of(results) / reference for figure, reference in pairs) / len(
            self.figures
        )

    def evaluate(self, schedule: Schedule) -> tuple[float, Results]:
        results = follow(self.workload, self.options, schedule)
        return self.score(results), results


@dataclass(frozen=True, slots=True)
class Found:
    """The best schedule that was found."""

    schedule: Schedule
    score: float
    results: Results
    #: Schedules that were tried.
    tried: int


def exhaustive(problem: Problem) -> Found:
    """The best of all assignments to engines, each with all orders of priority.

    Raises:
        ValueError: there are more than `MAX_EXHAUSTIVE`.
    """
    keys = keys_of(problem.workload)
    engines = len(problem.options.engines)
    count = engines ** len(keys)
    for number in range(2, len(keys) + 1):
        count *= number
    if count > MAX_EXHAUSTIVE:
        raise ValueError(f"{len(keys)} calls on {engines} engines have {count} schedules")
    best: Found | None = None
    tried = 0
    for places in product(range(engines), repeat=len(keys)):
        for order in permutations(range(len(keys))):
            tried += 1
            schedule = {
                key: Placement(place, priority, order=priority)
                for key, place, priority in zip(keys, places, order, strict=True)
            }
            score, results = problem.evaluate(schedule)
            if best is None or score < best.score:
                best = Found(schedule, score, results, tried)
    assert best is not None
    return replace(best, tried=tried)


def local_search(
    problem: Problem,
    starts: Iterable[Schedule],
    *,
    iterations: int,
    seed: int = 0,
    progress: Callable[[int, float], None] = lambda tried, score: None,
) -> Found:
    """The best that is found in so many tries, the starts not counted.

    Args:
        problem: what to schedule.
        starts: schedules to begin with; the best of them is changed.
        iterations: changes that are tried.
        seed: of the changes.
        progress: called with schedules tried and the best score after each.
    """
    best: Found | None = None
    tried = 0
    for schedule in starts:
        score, results = problem.evaluate(schedule)
        tried += 1
        if best is None or score < best.score:
            best = Found(schedule, score, results, tried)
        progress(tried, best.score)
    if best is None:
        raise ValueError("local search begins with a schedule at least")
    moves = _Moves(problem, Random(seed))  # noqa: S311 - choices, not secrets
    for _ in range(iterations):
        schedule = moves.change(best.schedule)
        score, results = problem.evaluate(schedule)
        tried += 1
        if score <= best.score:
            best = Found(schedule, score, results, tried)
        progress(tried, best.score)
    return replace(best, tried=tried)


class _Moves:
    """Random changes of a schedule."""

    def __init__(self, problem: Problem, random: Random) -> None:
        self._random = random
        self._engines = len(problem.options.engines)
        plans = problem.workload.plans
        self._singles = [(key,) for key in keys_of(problem.workload)]
        self._applications = [
            tuple(CallKey(plan.id, call.index) for call in plan.calls) for plan in plans
        ]
        self._siblings = [keys for plan in plans for keys in _siblings(plan)]
        #: Calls whose prompts begin alike.
        beginnings: dict[object, list[CallKey]] = {}
        kinds: dict[str, list[CallKey]] = {}
        for plan in plans:
            for call in plan.calls:
                key = CallKey(plan.id, call.index)
                beginnings.setdefault(call.prompt[0], []).append(key)
                kinds.setdefault(f"{plan.kind} {call.objective}", []).append(key)
        self._kinds = [tuple(keys) for keys in (*beginnings.values(), *kinds.values())]

    def change(self, schedule: Schedule) -> dict[CallKey, Placement]:
        random = self._random
        changed = dict(schedule)
        for _ in range(random.choice((1, 1, 2))):
            move = random.choice(
                (self._move, self._move, self._swap, self._prioritise, self._delay, self._spread)
            )
            move(changed)
        return changed

    def _some(self) -> tuple[CallKey, ...]:
        pools = (self._singles, self._applications, self._siblings)
        return self._random.choice(self._random.choice(pools))

    def _move(self, schedule: dict[CallKey, Placement]) -> None:
        """Some calls to another engine."""
        engine = self._random.randrange(self._engines)
        for key in self._some():
            schedule[key] = replace(schedule[key], engine=engine)

    def _swap(self, schedule: dict[CallKey, Placement]) -> None:
        """Two sets of calls change places."""
        one, other = self._some(), self._some()
        here, there = schedule[one[0]].engine, schedule[other[0]].engine
        for keys, engine in ((one, there), (other, here)):
            for key in keys:
                schedule[key] = replace(schedule[key], engine=engine)

    def _spread(self, schedule: dict[CallKey, Placement]) -> None:
        """Calls of one application, one after the other over some engines."""
        random = self._random
        engines = random.sample(range(self._engines), random.randint(1, self._engines))
        for number, key in enumerate(random.choice(self._siblings)):
            schedule[key] = replace(schedule[key], engine=engines[number % len(engines)])

    def _prioritise(self, schedule: dict[CallKey, Placement]) -> None:
        """Some calls, or all of a kind, get another priority."""
        random = self._random
        priority = random.choice(_PRIORITIES)
        for key in random.choice(self._kinds) if random.random() < 0.1 else self._some():
            schedule[key] = replace(schedule[key], priority=priority)

    def _delay(self, schedule: dict[CallKey, Placement]) -> None:
        """Some calls begin later, or at once."""
        random = self._random
        delay_s = 0.0
        if random.random() < 0.5:
            delay_s = random.expovariate(1.0) * random.choice(_DELAYS_S)
        for key in self._some():
            schedule[key] = replace(schedule[key], delay_s=delay_s)


def _siblings(plan: ApplicationPlan) -> Iterator[tuple[CallKey, ...]]:
    """Calls of an application that wait for the same calls."""
    together: dict[tuple[int, ...], list[CallKey]] = {}
    for call in plan.calls:
        together.setdefault(call.after, []).append(CallKey(plan.id, call.index))
    return map(tuple, together.values())
