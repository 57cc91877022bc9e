"""How much anybody could gain: policies beside a search that knows everything, and a lower bound.

The search gets the same calls on the same engines, and knows lengths, arrivals and graphs ahead. It
begins with what each policy decided, so it is nowhere worse than the best of them; how near it
comes to the best possible schedule is between it and the bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from parrot_scheduler.config import PRESETS

from parrot_simulator.experiments.applications import ENGINES, OWN_ENGINE, Application
from parrot_simulator.experiments.policies import POLICIES
from parrot_simulator.experiments.runner import Plain
from parrot_simulator.metrics import Results
from parrot_simulator.options import SimulationOptions
from parrot_simulator.oracle.bounds import lower_bound
from parrot_simulator.oracle.schedule import CallKey, FixedWorkload, Placement, record
from parrot_simulator.oracle.search import Found, Problem, local_search
from parrot_simulator.oracle.starts import paced_starts, starts
from parrot_simulator.profiles import PROFILES

#: Changes that local search tries, and the share of the usual arrivals that it gets.
ITERATIONS = 300
SHARE = 0.4


@dataclass(frozen=True, slots=True)
class OracleFigure(Plain):
    """One mean of an application at one load, as policies and the search have it."""

    application: str
    load: float
    unit: str
    figure: str
    #: By policy.
    values: dict[str, float]
    #: Of the best schedule that was found: its mean, and the bound below which none is.
    oracle: float
    bound: float
    #: By policy, how many times as long as with the best schedule it takes: of all means of the
    #: application together, for of two one may be bought with the other.
    distances: dict[str, float]
    #: Schedules that were tried.
    tried: int

    @property
    def best_policy(self) -> str:
        """The one with the smallest distance."""
        return min(self.distances, key=self.distances.__getitem__)


def run(
    applications: Sequence[Application],
    *,
    profile: str,
    policies: Sequence[str] = POLICIES,
    engines: int = ENGINES,
    ordinary: bool = False,
    loads: Sequence[int] = (0, 1, 2),
    iterations: int = ITERATIONS,
    share: float = SHARE,
    seed: int = 0,
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[OracleFigure]:
    """The means of each application at each load.

    Args:
        applications: what to run.
        profile: of `PROFILES`.
        policies: of `PRESETS`.
        engines: in number.
        ordinary: without what this project's own engine does beyond a modern one.
        loads: which of an application's three.
        iterations: changes that the search tries for each.
        share: of the usual seconds of arrivals, where loads are rates.
        seed: of the workloads and of the search.
        progress: called before each policy, and now and then by the search.

    Raises:
        ValueError: an application has no loads for the profile.
    """
    kind = PROFILES[profile].with_(**({} if ordinary else OWN_ENGINE[profile]))
    for application in applications:
        values = application.loads_of(profile).values
        for load in [values[number] for number in loads]:
            place = f"{application.name}, {load:g} {application.unit}"
            plans = application.build(profile, load, seed, share=share).arrivals()
            workload = FixedWorkload(application.workload, plans)
            options = SimulationOptions(engines=[kind] * engines, seed=seed)
            ran: dict[str, Results] = {}
            recorded: list[dict[CallKey, Placement]] = []
            for policy in policies:
                progress(f"{place}: {policy}")
                config = replace(PRESETS[policy], seed=seed)
                results, schedule = record(workload, replace(options, config=config))
                ran[policy] = results
                if not results.total.failed:
                    recorded.append(schedule)
            figures = application.means
            problem = Problem(
                workload,
                options,
                figures,
                [min(figure.of(r) for r in ran.values()) for figure in figures],
            )

            def show(tried: int, score: float, place: str = place) -> None:
                if tried % 20 == 0:
                    progress(f"{place}: {tried} schedules, {score:.3f} of the best policy's")

            found = local_search(
                problem,
                [
                    *recorded,
                    *starts(workload, kind, engines),
                    *paced_starts(workload, options, recorded),
                ],
                iterations=iterations,
                seed=seed,
                progress=show,
            )
            best = _better(problem, found, ran)
            for figure in figures:
                yield OracleFigure(
                    application=application.name,
                    load=load,
                    unit=application.unit,
                    figure=figure.label,
                    values={policy: figure.of(results) for policy, results in ran.items()},
                    oracle=figure.of(best),
                    bound=lower_bound(workload.plans, kind, engines, figure.metric, figure.kind),
                    distances={
                        policy: problem.score(results) / problem.score(best)
                        for policy, results in ran.items()
                    },
                    tried=found.tried,
                )


def _better(problem: Problem, found: Found, ran: dict[str, Results]) -> Results:
    """What was found, or a policy's run where following its schedule came out worse than it."""
    return min((found.results, *ran.values()), key=problem.score)


def mean_distance(figures: Sequence[OracleFigure], policy: str) -> float:
    """The mean distance of a policy over applications and loads."""
    places = {(figure.application, figure.load): figure for figure in figures}
    return fmean(figure.distances[policy] for figure in places.values())
