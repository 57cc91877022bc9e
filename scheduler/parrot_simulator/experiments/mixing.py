"""What latency and throughput work on the same engines cost each other.

Steps first: how long one takes with so many decodes and so many tokens of prompts beside them.
Then chats beside map-reduce jobs on some engines: all together, and apart, with one engine or more
for throughput tasks alone. LMetric places them, on all engines or on those of their side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
from parrot_scheduler.config import PRESETS, SchedulerConfig
from parrot_scheduler.placement.baselines import LMetric, Request
from parrot_scheduler.policy import EngineChoice
from parrot_scheduler.scheduler import Scheduler, policies_of

from parrot_simulator.experiments.applications import ENGINES, OWN_ENGINE, select
from parrot_simulator.experiments.runner import DEFAULT_SEEDS, Plain
from parrot_simulator.metrics import Results
from parrot_simulator.options import SimulationOptions
from parrot_simulator.profiles import PROFILES, EngineProfile
from parrot_simulator.simulation import simulate
from parrot_simulator.workloads import build

#: Decodes of a step, and shares of the tokens that a step takes which are filled beside them.
DECODES = (0, 1, 8, 32, 64)
_FILLED = (0.0, 1 / 64, 1 / 16, 1 / 4, 1.0)
#: Tokens of context of each decode, before they are scaled as all lengths are.
_CONTEXT = 576
#: Times as many jobs for each chat as usual.
JOBS = (0.5, 1.0, 2.0)
TOGETHER = "together"


@dataclass(frozen=True, slots=True)
class StepCost(Plain):
    """Seconds of one step."""

    decodes: int
    filled: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ApartFigure(Plain):
    """Means over the seeds, by where the jobs are."""

    load: float
    #: Times as many jobs for each chat as usual.
    jobs_share: float
    #: Of chats, ms a token; of jobs, seconds.
    chats: dict[str, float]
    jobs: dict[str, float]


class _Apart(LMetric):
    """LMetric on the first engines for throughput tasks, and on the others for the rest."""

    name = "apart"

    def __init__(self, for_jobs: int) -> None:
        self._for_jobs = for_jobs

    def choose(self, request: Request) -> EngineChoice:
        is_first = np.arange(len(request.mask)) < self._for_jobs
        is_job = not request.state.objective.is_latency
        side = request.mask & (is_first if is_job else ~is_first)
        return super().choose(request._replace(mask=side) if side.any() else request)


def _apart(config: SchedulerConfig, for_jobs: int) -> Scheduler:
    policies = replace(policies_of(config), placement=lambda config, rng: _Apart(for_jobs))
    return Scheduler(config, policies=policies)


def _engine(profile: str, *, ordinary: bool) -> EngineProfile:
    return PROFILES[profile].with_(**({} if ordinary else OWN_ENGINE[profile]))


def step_costs(profile: str, *, ordinary: bool = False) -> list[StepCost]:
    """What steps of a profile take.

    Raises:
        ValueError: there are no loads for the profile.
    """
    (application,) = select(["mixed"])
    context = round(_CONTEXT * application.loads_of(profile).scale)
    engine = _engine(profile, ordinary=ordinary)
    return [
        StepCost(
            decodes,
            filled,
            engine.step_s(
                prefill_tokens=filled, sequences=decodes, context_tokens=decodes * context
            ),
        )
        for decodes in DECODES
        for filled in (round(share * engine.max_batch_tokens) for share in _FILLED)
    ]


def run(
    profile: str,
    *,
    engines: int = ENGINES,
    ordinary: bool = False,
    seeds: int = DEFAULT_SEEDS,
    share: float = 1.0,
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[ApartFigure]:
    """Chats and jobs together and apart, at three loads with three numbers of jobs.

    Args:
        profile: of `PROFILES`.
        engines: in number.
        ordinary: without what this project's own engine does beyond a modern one.
        seeds: repetitions.
        share: of the usual seconds of arrivals.
        progress: called before each load.

    Raises:
        ValueError: there are no loads for the profile.
    """
    (application,) = select(["mixed"])
    loads = application.loads_of(profile)
    engine = _engine(profile, ordinary=ordinary)
    chats, jobs = application.figures
    for load in loads.values:
        for times in JOBS:
            progress(f"{load:g} {application.unit}, {times:g} times as many jobs")
            found: dict[str, list[Results]] = {}
            for seed in range(seeds):
                parameters = {**application.parameters(load, loads.duration_s * share)}
                parameters["summaries"] = max(1, round(times * float(parameters["summaries"])))
                parameters["gap_scale"] = float(parameters["gap_scale"]) / times
                parameters |= {"scale": loads.scale, "seed": seed}
                config = replace(PRESETS["lmetric"], seed=seed)
                options = SimulationOptions(engines=[engine] * engines, config=config, seed=seed)
                for number in range(engines):
                    name = f"jobs on {number} of {engines}" if number else TOGETHER
                    decider = _apart(config, number) if number else None
                    workload = build(application.workload, parameters)
                    found.setdefault(name, []).append(simulate(workload, options, decider))
            yield ApartFigure(
                load,
                times,
                {name: fmean(map(chats.of, results)) for name, results in found.items()},
                {name: fmean(map(jobs.of, results)) for name, results in found.items()},
            )
