"""The five applications that policies are compared by, each with three loads and two figures.

Loads are set for each kind of engine: from where engines are hardly shared to about what four of
them bear. What arrives is short (10 s on the fast engines), so that a whole table takes minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from parrot_simulator.experiments.definitions import mixed_load
from parrot_simulator.metrics import Metric, Results
from parrot_simulator.profiles import DEFAULT_PROFILE
from parrot_simulator.workloads import Generator, build


@dataclass(frozen=True, slots=True)
class Figure:
    """What is measured of an application: the mean or a quantile of a metric of a kind."""

    label: str
    metric: Metric
    #: None: of all kinds.
    kind: str | None = None
    #: None: the mean.
    quantile: float | None = None

    def of(self, results: Results) -> float:
        """In the metric's unit; NaN where nothing was measured."""
        distribution, unit = results.distribution(self.kind, self.metric)
        if self.quantile is None:
            return distribution.mean * unit
        return distribution.quantile(self.quantile) * unit


def _mean_and_tail(metric: Metric, unit: str) -> tuple[Figure, Figure]:
    return Figure(f"mean {unit}", metric), Figure(f"p99 {unit}", metric, quantile=0.99)


@dataclass(frozen=True, slots=True)
class Loads:
    """Loads of an application for one kind of engine, four of them, and the lengths it has."""

    values: tuple[float, float, float]
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Application:
    """One of the five."""

    name: str
    workload: str
    #: What a load is.
    unit: str
    parameters: Callable[[float], Mapping[str, str | float]]
    #: A policy is behind another one where it is so in both.
    figures: tuple[Figure, Figure]
    #: By the engines' profile.
    loads: Mapping[str, Loads]

    def loads_of(self, profile: str) -> Loads:
        """The loads for engines of a profile.

        Raises:
            ValueError: none are set; lists the profiles that have some.
        """
        if profile not in self.loads:
            known = ", ".join(self.loads)
            raise ValueError(f"{self.name}: no loads for engines {profile!r}; there are {known}")
        return self.loads[profile]

    def build(self, profile: str, load: float, seed: int) -> Generator:
        scale = self.loads_of(profile).scale
        return build(self.workload, {**self.parameters(load), "scale": scale, "seed": seed})


def _mixed(load: float) -> Mapping[str, str | float]:
    return {**mixed_load(load), "count": round(300 * load), "summaries": round(11 * load)}


APPLICATIONS: tuple[Application, ...] = (
    Application(
        "gpts",
        "gpts",
        "calls/s",
        lambda rate: {"rate": rate, "count": round(10 * rate)},
        _mean_and_tail("ms_per_token", "ms/token"),
        {DEFAULT_PROFILE: Loads((30, 60, 90))},
    ),
    Application(
        "mixed",
        "mixed",
        "x 30 chats/s and 1.09 summaries/s",
        _mixed,
        (
            Figure("chats, ms/token", "ms_per_token", "chat"),
            Figure("map-reduce, s", "job_s", "map-reduce"),
        ),
        {DEFAULT_PROFILE: Loads((1, 1.75, 2.5))},
    ),
    Application(
        "agents",
        "agents",
        "agents at once",
        lambda clients: {
            "clients": clients,
            "count": clients,
            "turns_scale": 0.1,
            "turns_max": 12,
            "spread": 10,
            "pause_max_s": 20,
        },
        _mean_and_tail("call_s", "s a call"),
        {DEFAULT_PROFILE: Loads((80, 160, 320))},
    ),
    Application(
        "multi-agent",
        "multi-agent",
        "jobs/s",
        lambda rate: {"branches": 8, "rate": rate, "count": 12},
        _mean_and_tail("job_s", "s"),
        {DEFAULT_PROFILE: Loads((0.1, 0.2, 0.4))},
    ),
    Application(
        "map-reduce",
        "mapreduce-fleet",
        "jobs/s",
        lambda rate: {"rate": rate, "count": round(17 * 10 * rate)},
        _mean_and_tail("job_s", "s"),
        {DEFAULT_PROFILE: Loads((4, 8, 12))},
    ),
)


def select(names: Iterable[str]) -> tuple[Application, ...]:
    """Applications by name, in that order; all without any.

    Raises:
        ValueError: an unknown name; lists the known ones.
    """
    known = {application.name: application for application in APPLICATIONS}
    wanted = list(names)
    for name in wanted:
        if name not in known:
            raise ValueError(f"no application {name!r}; there are {', '.join(known)}")
    return tuple(known[name] for name in wanted) or APPLICATIONS
