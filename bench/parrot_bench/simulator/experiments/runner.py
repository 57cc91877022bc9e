"""Runs experiments and compares their arms.

Every arm of a point sees the same applications at the same times, for each of several seeds; what
is compared is the mean over the seeds. A ratio is how many times better the experiment's `base`
is: another arm's time over its.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import Any

from parrot_scheduler.config import PRESETS

from parrot_bench.simulator.experiments.definitions import Arm, Experiment, Point
from parrot_bench.simulator.experiments.fleet import FLEET
from parrot_bench.simulator.experiments.knowledge import KNOWLEDGE
from parrot_bench.simulator.experiments.paper import PAPER
from parrot_bench.simulator.metrics import Results
from parrot_bench.simulator.options import Network, SimulationOptions
from parrot_bench.simulator.plan import ApplicationPlan, Workload
from parrot_bench.simulator.profiles import PROFILES
from parrot_bench.simulator.simulation import simulate
from parrot_bench.simulator.workloads import Changed, build

#: Experiments by their figure's name.
EXPERIMENTS = {experiment.figure: experiment for experiment in (*PAPER, *FLEET)}
DEFAULT_SEEDS = 3


class Plain:
    """A dataclass with slots that can be plain data."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Its fields, for JSON; what is not a number is None."""
        names: Iterable[str] = self.__slots__
        plain = {name: getattr(self, name) for name in names}
        return {
            name: None if isinstance(value, float) and math.isnan(value) else value
            for name, value in plain.items()
        }


@dataclass(frozen=True, slots=True)
class ArmResult(Plain):
    """One arm at one point: means over the seeds. Times in the metric's unit (s, or ms a token)."""

    figure: str
    point: str
    arm: str
    mean: float
    p50: float
    p99: float
    #: Smallest and largest mean of one seed.
    low: float
    high: float
    #: Mean seconds of an application, over all kinds.
    job_s: float
    #: Applications within their goals, per second; NaN without goals.
    goodput: float
    #: Of the kind that is measured: the share within their goals (NaN without), the share of prompt
    #: tokens found in a cache, and applications that failed.
    good_share: float
    hit_rate: float
    failed: int
    #: Further figures that the experiment names, by `kind metric`.
    besides: dict[str, float]


def select(figures: Iterable[str]) -> list[Experiment]:
    """Experiments by figure (`12a`, or `12` for both), `paper`, `fleet`; all without any.

    Raises:
        ValueError: an unknown name; lists the known ones.
    """
    found: dict[str, Experiment] = {}
    for name in figures:
        group = {"paper": PAPER, "fleet": FLEET}.get(name)
        matches = [
            e
            for e in group or EXPERIMENTS.values()
            if group or name == e.figure or name == e.figure.rstrip("ab")
        ]
        if not matches:
            raise ValueError(
                f"no figure {name!r}; there are {', '.join(EXPERIMENTS)}, paper, fleet"
            )
        found |= {experiment.figure: experiment for experiment in matches}
    return list(found.values()) or list(EXPERIMENTS.values())


def select_knowledge(names: Iterable[str]) -> list[Experiment]:
    """Experiments of what knowledge is worth, by name; all without any.

    Raises:
        ValueError: an unknown name; lists the known ones.
    """
    known = {experiment.points[0].label: experiment for experiment in KNOWLEDGE}
    wanted = list(names)
    for name in wanted:
        if name not in known:
            raise ValueError(f"no experiment {name!r}; there are {', '.join(known)}")
    return [known[name] for name in wanted] or list(KNOWLEDGE)


def quick(experiment: Experiment) -> Experiment:
    """The experiment with its first and last points only."""
    points = experiment.points
    return replace(experiment, points=points if len(points) < 3 else (points[0], points[-1]))


def run(
    experiment: Experiment,
    *,
    seeds: int = DEFAULT_SEEDS,
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[ArmResult]:
    for point in experiment.points:
        for arm in experiment.arms:
            progress(f"figure {experiment.figure}, {point.label}: {arm.name}")
            results = [run_once(experiment, point, arm, seed) for seed in range(seeds)]
            yield _outcome(experiment, point, arm, results)


def run_once(experiment: Experiment, point: Point, arm: Arm, seed: int) -> Results:
    """One simulation of an experiment."""
    parameters: dict[str, str | float] = {**point.parameters, "seed": seed}
    if experiment.repetition is not None:
        parameters[experiment.repetition] = seed % 10
    workload: Workload = build(experiment.workload, parameters)
    if experiment.max_tokens is not None:
        workload = asking_for(workload, experiment.max_tokens)
    return run_arm(
        workload,
        arm,
        profile=experiment.profile,
        engines=experiment.engines,
        network=experiment.network,
        seed=seed,
    )


def run_arm(
    workload: Workload, arm: Arm, *, profile: str, engines: int, network: Network, seed: int
) -> Results:
    """One simulation of a workload, as an arm runs it."""
    options = SimulationOptions(
        config=replace(PRESETS[arm.preset], seed=seed, **arm.policy),
        engines=[PROFILES[profile].with_(**arm.engine)] * engines,
        mode=arm.client,
        knowledge=arm.knowledge,
        network=network,
        seed=seed,
    )
    return simulate(workload, options)


def asking_for(workload: Workload, max_tokens: int) -> Workload:
    """The workload with calls that ask for so many tokens at least, whatever they generate."""

    def change(plan: ApplicationPlan) -> ApplicationPlan:
        calls = (replace(c, max_tokens=max(c.max_tokens, max_tokens)) for c in plan.calls)
        return replace(plan, calls=tuple(calls))

    return Changed(workload, change)


def _outcome(
    experiment: Experiment, point: Point, arm: Arm, results: Sequence[Results]
) -> ArmResult:
    shown = [r.measures_of(experiment.kind) for r in results]
    found = [r.distribution(experiment.kind, experiment.metric) for r in results]
    means = [sketch.mean * unit for sketch, unit in found]
    besides = {}
    for kind, metric in experiment.besides:
        sketches = [r.distribution(kind, metric) for r in results]
        besides[f"{kind or 'all'} {metric}"] = fmean(s.mean * unit for s, unit in sketches)
    with_goal = sum(m.with_goal for m in shown)
    return ArmResult(
        figure=experiment.figure,
        point=point.label,
        arm=arm.name,
        mean=fmean(means),
        p50=fmean(sketch.quantile(0.5) * unit for sketch, unit in found),
        p99=fmean(sketch.quantile(0.99) * unit for sketch, unit in found),
        low=min(means),
        high=max(means),
        job_s=fmean(r.total.job_s.mean for r in results),
        goodput=fmean(r.goodput for r in results),
        good_share=sum(m.good for m in shown) / with_goal if with_goal else math.nan,
        hit_rate=fmean(m.hit_rate for m in shown),
        failed=sum(m.failed for m in shown),
        besides=besides,
    )


@dataclass(frozen=True, slots=True)
class Comparison(Plain):
    """Another arm beside the base, at one point or in the rate that each allows."""

    figure: str
    point: str
    baseline: str
    theirs: float
    ours: float
    ratio: float
    #: What the paper prints for it; None: nothing.
    printed: float | None


def compare(experiment: Experiment, outcomes: Sequence[ArmResult]) -> list[Comparison]:
    by_place = {(o.point, o.arm): o for o in outcomes}
    found = []
    for point in experiment.points:
        ours = by_place.get((point.label, experiment.base))
        for arm in experiment.arms:
            theirs = by_place.get((point.label, arm.name))
            if ours is None or theirs is None or theirs is ours:
                continue
            found.append(
                Comparison(
                    experiment.figure,
                    point.label,
                    arm.name,
                    theirs.mean,
                    ours.mean,
                    theirs.mean / ours.mean,
                    point.printed.get(arm.name),
                )
            )
    if experiment.rate_at_ms is not None:
        found += _compare_rates(experiment, outcomes)
    return found


#: Printed ratios of rates.
PRINTED_RATES = {"vLLM 2023": 12.0, "ours, ordinary engine": 2.4}


def _compare_rates(experiment: Experiment, outcomes: Sequence[ArmResult]) -> list[Comparison]:
    bound = experiment.rate_at_ms
    assert bound is not None
    rates = {
        arm.name: rate_at(
            [
                (float(point.parameters["rate"]), o.mean)
                for point in experiment.points
                for o in outcomes
                if (o.point, o.arm) == (point.label, arm.name)
            ],
            bound,
        )
        for arm in experiment.arms
    }
    ours = rates[experiment.base]
    return [
        Comparison(
            experiment.figure,
            f"calls/s at {bound:g} ms a token",
            name,
            rate,
            ours,
            ours / rate if rate else math.inf,
            PRINTED_RATES.get(name),
        )
        for name, rate in rates.items()
        if name != experiment.base
    ]


def rate_at(points: Sequence[tuple[float, float]], bound: float) -> float:
    """The rate at which a rising curve (rate, value) crosses `bound`, between the logarithms.

    The largest rate of the curve when it stays below; 0 when it begins above.
    """
    points = sorted(points)
    if not points or points[0][1] > bound:
        return 0.0
    for (rate, value), (next_rate, next_value) in pairwise(points):
        if next_value > bound:
            share = math.log(bound / value) / math.log(next_value / value)
            return rate * math.exp(math.log(next_rate / rate) * share)
    return points[-1][0]
