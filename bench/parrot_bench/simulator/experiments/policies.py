"""Policies side by side: five applications at three loads, the same calls for all policies.

Every policy runs on the same engines, is told the same of applications (their graphs), and gets
the same arrivals. So what differs is what it decides alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from parrot_bench.simulator.experiments.applications import ENGINES, OWN_ENGINE, Application
from parrot_bench.simulator.experiments.definitions import NONE, Arm
from parrot_bench.simulator.experiments.runner import DEFAULT_SEEDS, Plain, asking_for, run_arm
from parrot_bench.simulator.metrics import Results
from parrot_bench.simulator.plan import Workload

#: As `--policy` takes them; the first is compared with the others.
POLICIES = ("parrot", "lmetric", "prefix-linear", "session-affinity", "paper", "round-robin")
#: A ratio above this is not behind.
TOLERANCE = 0.99


@dataclass(frozen=True, slots=True)
class PolicyFigure(Plain):
    """One figure of an application at one load: means over the seeds, by policy; less is better."""

    application: str
    load: float
    unit: str
    figure: str
    values: dict[str, float]
    #: By policy, the smallest and the largest value of a seed.
    ranges: dict[str, tuple[float, float]]

    @property
    def best_other(self) -> str:
        """The best policy but for the first."""
        return min(list(self.values)[1:], key=self.values.__getitem__)

    @property
    def ratio(self) -> float:
        """How many times better the first policy is than the best other: above 1 it is ahead."""
        return self.values[self.best_other] / next(iter(self.values.values()))


def arms_of(policies: Sequence[str]) -> tuple[Arm, ...]:
    """Policies that know the graphs of applications."""
    return tuple(Arm(policy, policy, "graph") for policy in policies)


def run(
    applications: Sequence[Application],
    *,
    profile: str,
    arms: Sequence[Arm] = arms_of(POLICIES),
    seeds: int = DEFAULT_SEEDS,
    engines: int = ENGINES,
    ordinary: bool = False,
    loads: Sequence[int] = (0, 1, 2),
    asked: float | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[PolicyFigure]:
    """The figures of each application at each load, two at a time.

    Args:
        applications: what to run.
        profile: of `PROFILES`.
        arms: what is compared, two at least; the engines are the same for all.
        seeds: repetitions.
        engines: in number.
        ordinary: without what this project's own engine does beyond a modern one.
        loads: which of an application's three.
        asked: tokens that calls ask for at least, whatever they generate, before they are scaled
            as all lengths are; None: for what they generate.
        progress: called before each run.

    Raises:
        ValueError: an application has no loads for the profile.
    """
    for application in applications:
        values = application.loads_of(profile).values
        for load in [values[number] for number in loads]:
            found: dict[str, list[Results]] = {}
            for arm in arms:
                progress(f"{application.name}, {load:g} {application.unit}: {arm.name}")
                found[arm.name] = [
                    run_arm(
                        _workload(application, profile, load, seed, asked),
                        replace(arm, engine={} if ordinary else OWN_ENGINE[profile]),
                        profile=profile,
                        engines=engines,
                        network=NONE,
                        seed=seed,
                    )
                    for seed in range(seeds)
                ]
            for figure in application.figures:
                each = {name: [figure.of(r) for r in results] for name, results in found.items()}
                yield PolicyFigure(
                    application=application.name,
                    load=load,
                    unit=application.unit,
                    figure=figure.label,
                    values={name: fmean(values) for name, values in each.items()},
                    ranges={name: (min(values), max(values)) for name, values in each.items()},
                )


def _workload(
    application: Application, profile: str, load: float, seed: int, asked: float | None
) -> Workload:
    workload = application.build(profile, load, seed)
    if asked is None:
        return workload
    return asking_for(workload, round(asked * workload.scale))


def behind(figures: Sequence[PolicyFigure]) -> list[tuple[str, float]]:
    """Applications and loads at which the first policy is behind the best other in both figures."""
    worst: dict[tuple[str, float], float] = {}
    for figure in figures:
        place = (figure.application, figure.load)
        worst[place] = max(worst.get(place, 0.0), figure.ratio)
    return [place for place, ratio in worst.items() if ratio < TOLERANCE]
