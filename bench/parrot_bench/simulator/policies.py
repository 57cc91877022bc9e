"""Policies side by side: five applications at three loads, the same calls for all policies.

Every policy runs on the same engines, is told the same of applications (their graphs), and gets
the same arrivals. So only its own decisions differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from parrot_scheduler.config import SchedulerConfig

from parrot_bench.simulator.applications import ENGINES, OWN_ENGINE, Application
from parrot_bench.simulator.metrics import Results
from parrot_bench.simulator.profiles import PROFILES
from parrot_bench.simulator.simulation import simulate
from parrot_bench.tables import markdown, number

#: Set-ups that are compared; the first is compared with the others.
POLICIES = ("parrot", "lmetric", "prefix-linear", "session-affinity", "paper", "round-robin")
DEFAULT_SEEDS = 3
#: A ratio above this is not behind.
TOLERANCE = 0.99


@dataclass(frozen=True, slots=True)
class PolicyFigure:
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
        """The best other policy's figure over the first one's: above 1 the first is ahead."""
        return self.values[self.best_other] / next(iter(self.values.values()))


def run(
    applications: Sequence[Application],
    policies: Mapping[str, SchedulerConfig],
    *,
    profile: str,
    seeds: int = DEFAULT_SEEDS,
    engines: int = ENGINES,
    ordinary: bool = False,
    loads: Sequence[int] = (0, 1, 2),
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[PolicyFigure]:
    """The figures of each application at each load, two at a time.

    Args:
        applications: what to run.
        policies: by name, two at least.
        profile: of `PROFILES`.
        seeds: repetitions.
        engines: in number.
        ordinary: without what this project's own engine does beyond a modern one.
        loads: which of an application's three.
        progress: called before each run.

    Raises:
        ValueError: an application has no loads for the profile.
    """
    kind = PROFILES[profile].with_(**({} if ordinary else OWN_ENGINE.get(profile, {})))
    for application in applications:
        known = application.loads_of(profile)
        for load in [known.values[index] for index in loads]:
            found: dict[str, list[Results]] = {}
            for name, config in policies.items():
                progress(f"{application.name}, {load:g} {application.unit}: {name}")
                found[name] = [
                    simulate(
                        application.plans(load, known, seed),
                        kind,
                        engines=engines,
                        config=replace(config, seed=seed),
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


def behind(figures: Sequence[PolicyFigure]) -> list[tuple[str, float]]:
    """Applications and loads at which the first policy is behind the best other in both figures."""
    worst: dict[tuple[str, float], float] = {}
    for figure in figures:
        place = (figure.application, figure.load)
        worst[place] = max(worst.get(place, 0.0), figure.ratio)
    return [place for place, ratio in worst.items() if ratio < TOLERANCE]


def policies_table(figures: Sequence[PolicyFigure]) -> str:
    """One row for each figure at each load, and where the first policy is behind in both."""
    first, *others = figures[0].values
    rows = []
    for figure in figures:
        cells = [
            f"**{number(value)}**" if value == min(figure.values.values()) else number(value)
            for value in figure.values.values()
        ]
        where = (figure.application, f"{figure.load:g} {figure.unit}", figure.figure)
        rows.append((*where, *cells, figure.best_other, f"{figure.ratio:.2f}x"))
    head = ("application", "load", "figure", first, *others, "best other", f"{first} over it")
    found = behind(figures)
    lost = ", ".join(f"{application} at {load:g}" for application, load in found)
    if lost:
        end = f"at {len(found)} of {len(figures) // 2} loads: {lost}."
        note = f"{first} is behind the best other policy in both figures {end}"
    else:
        note = f"{first} is nowhere behind the best other policy in both figures."
    return f"{markdown(head, rows, texts=3)}\n\n{note}"
