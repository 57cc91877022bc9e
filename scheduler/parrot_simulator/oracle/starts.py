"""Schedules to begin a search with, made from what the applications are known to take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from parrot_scheduler.task import THROUGHPUT, Task

from parrot_simulator.options import SimulationOptions
from parrot_simulator.oracle.pacing import latency_first, paced
from parrot_simulator.oracle.schedule import (
    PRIORITY_STEP,
    CallKey,
    FixedWorkload,
    Placement,
    Schedule,
)
from parrot_simulator.plan import ApplicationPlan, CallPlan
from parrot_simulator.profiles import EngineProfile

#: Tokens that engines have to fill at most, in schedules that hold prompts back.
_LIMITS = (256, 512, 1024)


def starts(
    workload: FixedWorkload, profile: EngineProfile, engines: int
) -> Iterator[dict[CallKey, Placement]]:
    """Calls by application, by beginning, and each by itself; apart by objective; short first."""
    cost = _cost_of(profile)
    groupings: tuple[Callable[[ApplicationPlan, CallPlan], object], ...] = (
        lambda plan, call: plan.id,
        lambda plan, call: call.prompt[0],
        lambda plan, call: (plan.id, call.after),
        lambda plan, call: (plan.id, call.index),
    )
    for grouping in groupings:
        spread = _balanced(workload, cost, engines, grouping, lambda plan, call: range(engines))
        yield spread
        yield _short_first(spread, workload, cost)
    if len({_is_job(plan) for plan in workload.plans}) == 2:
        for first in range(1, engines):
            yield apart(workload, profile, engines, first)


def apart(
    workload: FixedWorkload, profile: EngineProfile, engines: int, for_jobs: int
) -> dict[CallKey, Placement]:
    """Applications that nobody waits for call by call on so many engines, others on the rest."""

    def rows(plan: ApplicationPlan, call: CallPlan) -> range:
        return range(for_jobs) if _is_job(plan) else range(for_jobs, engines)

    def each(plan: ApplicationPlan, call: CallPlan) -> object:
        return plan.id, call.index

    return _balanced(workload, _cost_of(profile), engines, each, rows)


def paced_starts(
    workload: FixedWorkload, options: SimulationOptions, schedules: Iterable[Schedule]
) -> Iterator[dict[CallKey, Placement]]:
    """The schedules, and one with engines of its own choice, with prompts held back."""
    cost = _cost_of(options.engines[0])
    total = {plan.id: sum(map(cost, plan.calls)) for plan in workload.plans}

    def short_first(key: CallKey, task: Task) -> float:
        return total[key.application]

    for limit in _LIMITS:
        for rank in (latency_first, short_first):
            yield paced(workload, options, None, limit, rank)
        for schedule in schedules:
            yield paced(workload, options, schedule, limit, latency_first)


def _is_job(plan: ApplicationPlan) -> bool:
    return any(call.objective == THROUGHPUT for call in plan.calls)


def _cost_of(profile: EngineProfile) -> Callable[[CallPlan], float]:
    """Roughly the seconds of an engine that a call takes from others."""
    model = profile.step_model

    def cost(call: CallPlan) -> float:
        tokens = sum(segment.tokens for segment in call.prompt)
        read_s = (tokens + call.output_tokens / 2) * model.context_token_s + model.sequence_s
        return tokens * model.prefill_token_s + call.output_tokens * read_s

    return cost


def _balanced(
    workload: FixedWorkload,
    cost: Callable[[CallPlan], float],
    engines: int,
    grouping: Callable[[ApplicationPlan, CallPlan], object],
    rows: Callable[[ApplicationPlan, CallPlan], range],
) -> dict[CallKey, Placement]:
    """Groups of calls, as they come, each to the engine with the least that is expected there."""
    work = [0.0] * engines
    homes: dict[object, int] = {}
    schedule: dict[CallKey, Placement] = {}
    for plan in workload.plans:
        for call in plan.calls:
            group = grouping(plan, call)
            if group not in homes:
                homes[group] = min(rows(plan, call), key=work.__getitem__)
            engine = homes[group]
            work[engine] += cost(call)
            priority = 2 * PRIORITY_STEP if call.objective == THROUGHPUT else 0
            schedule[CallKey(plan.id, call.index)] = Placement(
                engine, priority, order=len(schedule)
            )
    return schedule


def _short_first(
    schedule: Mapping[CallKey, Placement],
    workload: FixedWorkload,
    cost: Callable[[CallPlan], float],
) -> dict[CallKey, Placement]:
    """The schedule with short applications' calls first, in eighths of all."""
    total = {plan.id: sum(map(cost, plan.calls)) for plan in workload.plans}
    ranks = {name: rank for rank, name in enumerate(sorted(total, key=total.__getitem__))}
    return {
        key: replace(placement, priority=8 * ranks[key.application] // len(ranks))
        for key, placement in schedule.items()
    }
