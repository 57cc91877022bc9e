"""Compares policies of placement: a gateway with engines of its own for each, the same workload.

Prompts of a round begin with a salt of its own, the same for all policies, so that every cache
starts cold. Clients use semantic variables where the application allows them, and a session for
each job. A first round of each application is not timed. A round takes the next of the seeds, which
draw lengths, arrivals and texts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import fmean, median
from typing import Any

import msgspec

from parrot_bench.apps.arms import (
    Arm,
    Fleet,
    Work,
    at_load,
    check_memory,
    differing,
    run_rounds,
    salt_of,
    salted,
    start_arms,
)
from parrot_bench.apps.measure import (
    MAX_DIFFERENCES,
    Plan,
    Summary,
    characters_per_token,
    p99,
    samples_by_kind,
)
from parrot_bench.apps.recipes import BY_POLICY, WITH_TOOLS
from parrot_bench.apps.runner import GatewayClient, RunResult
from parrot_bench.apps.workload import NAMED, SEMANTIC, Size, Workload

#: Rounds that differ by more say little.
NOISE = 0.10


@dataclass(frozen=True, slots=True)
class PoliciesPlan:
    """What to run; see `Plan`.

    Attributes:
        policies: as `serve --policy` takes them; the first is compared with each other.
        engines: of each gateway.
        loads: how many times as fast as by themselves jobs arrive, one after the other.
        seeds: of lengths, arrivals and texts; each is run in `plan.rounds` rounds.
        time_limit_s: of an application at a load: a round that would take longer is not begun.
        settings: of the model, as in a gateway's `models`.
    """

    plan: Plan
    policies: Sequence[str]
    engines: int
    loads: Sequence[float] = (1.0,)
    seeds: Sequence[int] = (0,)
    time_limit_s: float = math.inf
    settings: Mapping[str, Any] = field(default_factory=dict)


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


class Verdict(msgspec.Struct, frozen=True):
    """One figure of an application under the first policy beside the best of the others."""

    kind: str
    #: `mean`, or `p99` where there is one kind of job only.
    figure: str
    unit: str
    ours: float
    best: float
    #: The policy that has it.
    policy: str
    #: `best` over `ours`, and the smallest and the largest of a round.
    ratio: float
    least: float
    largest: float

    @property
    def is_noise(self) -> bool:
        """Whether rounds differ by more than `NOISE`, or say both that it is ahead and behind."""
        spread = (self.largest - self.least) / self.ratio
        return spread > NOISE or self.least < 1.0 < self.largest


class PoliciesOutcome(msgspec.Struct, frozen=True):
    app: str
    #: What `count` counts.
    what: str
    count: int
    scale: float
    load: float
    #: Of each round.
    seeds: list[int]
    engines: int
    jobs: int
    calls: int
    tokens: int
    same_texts: bool
    #: Final texts of all rounds, and those that are not the same in all arms.
    texts: int
    different: int
    #: The first of these, if any.
    differences: list[str]
    policies: list[PolicyOutcome]
    speed_ups: list[SpeedUp]
    verdicts: list[Verdict]


async def compare_policies(
    plan: PoliciesPlan, progress: Callable[[str], None]
) -> list[PoliciesOutcome]:
    """Run applications (keys of `BY_POLICY`) under all policies, at all loads.

    Args:
        plan: what to run.
        progress: called with what is being measured.

    Raises:
        BenchmarkError: there is too little memory, a gateway did not start, or a call failed.
    """
    check_memory(plan.engines * len(plan.policies))
    fleet = Fleet(plan.plan.model, plan.engines, plan.settings)
    found: list[PoliciesOutcome] = []
    async with AsyncExitStack() as stack:
        progress(f"starting {plan.engines} engines each for {len(plan.policies)} gateways")
        policies = [Arm(policy, SEMANTIC, policy=policy) for policy in plan.policies]
        clients = await start_arms(stack, policies, fleet)
        density = await characters_per_token(clients[plan.policies[0]])
        for app in plan.plan.apps:
            recipe = BY_POLICY[app]
            size = Size(plan.plan.count or recipe.count, plan.plan.scale or recipe.scale, density)
            way = NAMED if app in WITH_TOOLS else SEMANTIC
            arms = [replace(arm, way=way) for arm in policies]
            found += [
                await _compare(app, plan, arms, clients, size, load, progress)
                for load in plan.loads
            ]
    return found


async def _compare(
    app: str,
    plan: PoliciesPlan,
    arms: Sequence[Arm],
    clients: Mapping[str, GatewayClient],
    size: Size,
    load: float,
    progress: Callable[[str], None],
) -> PoliciesOutcome:
    ends_by = time.monotonic() + plan.time_limit_s
    seeds = [*plan.seeds] * plan.plan.rounds

    def workload(seed: int, number: int) -> Workload:
        salt = salt_of(app, load, seed, number)
        built = BY_POLICY[app].build(replace(size, seed=seed), salt)
        return at_load(salted(built, salt), load)

    workloads = [workload(seed, number) for number, seed in enumerate(seeds, 1)]
    title = f"{app}, load {load:g}"
    if load == plan.loads[0]:
        await run_rounds(arms, clients, [workload(seeds[0], 0)], progress, f"{title}, not timed")
    runs = await run_rounds(arms, clients, workloads, progress, title, ends_by)
    outcomes = [
        outcome(policy, workloads[0], [run for run, _ in each], [work for _, work in each])
        for policy, each in runs.items()
    ]
    different = differing({policy: [run for run, _ in each] for policy, each in runs.items()})
    rounds = len(outcomes[0].work)
    return PoliciesOutcome(
        app=app,
        what=BY_POLICY[app].what,
        count=size.count,
        scale=size.scale,
        load=load,
        seeds=seeds[:rounds],
        engines=plan.engines,
        jobs=len(workloads[0].jobs),
        calls=len(workloads[0].calls),
        tokens=workloads[0].tokens,
        same_texts=not different,
        texts=sum(len(job.finals) for each in workloads[:rounds] for job in each.jobs),
        different=len(different),
        differences=different[:MAX_DIFFERENCES],
        policies=outcomes,
        speed_ups=speed_ups(outcomes),
        verdicts=verdicts(outcomes),
    )


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


def verdicts(outcomes: Sequence[PolicyOutcome]) -> list[Verdict]:
    """The first against the best of the others, in each figure; none without others."""
    ours, *others = outcomes
    figures: list[tuple[str, Callable[[list[float]], float]]] = [("mean", fmean)]
    if len(ours.times) == 1:
        figures.append(("p99", p99))
    found = []
    for times in ours.times:
        factor = 1000.0 if times.unit == "ms/token" else 1.0
        for figure, value_of in figures:
            values = {
                each.policy: factor * value_of([*chain.from_iterable(each.samples[times.kind])])
                for each in outcomes
            }
            best = min(others, key=lambda each: values[each.policy], default=None)
            if best is None:
                continue
            rounds = zip(best.samples[times.kind], ours.samples[times.kind], strict=True)
            ratios = [value_of(theirs) / value_of(mine) for theirs, mine in rounds]
            found.append(
                Verdict(
                    *(times.kind, figure, times.unit),
                    ours=values[ours.policy],
                    best=values[best.policy],
                    policy=best.policy,
                    ratio=values[best.policy] / values[ours.policy],
                    least=min(ratios),
                    largest=max(ratios),
                )
            )
    return found


def to_dict(outcome: PoliciesOutcome) -> dict[str, Any]:
    content: dict[str, Any] = msgspec.to_builtins(outcome)
    for plain, policy in zip(content["policies"], outcome.policies, strict=True):
        plain["prefilled_tokens"] = policy.prefilled()
    for plain, verdict in zip(content["verdicts"], outcome.verdicts, strict=True):
        plain["noise"] = verdict.is_noise
    return content
