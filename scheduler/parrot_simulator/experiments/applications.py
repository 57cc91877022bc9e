"""The five applications that policies are compared by, each with three loads and two figures.

Loads are set for each kind of engine: from where engines are hardly shared to about what four of
them bear. Arrivals last some seconds, so that a whole table takes minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean

from parrot_simulator.experiments.definitions import OWN
from parrot_simulator.figures import SUMMARY_GAPS_S
from parrot_simulator.metrics import Figure, Metric
from parrot_simulator.profiles import DEFAULT_PROFILE
from parrot_simulator.workloads import Generator, build


def _mean_and_tail(metric: Metric, unit: str) -> tuple[Figure, Figure]:
    return Figure(f"mean {unit}", metric), Figure(f"p99 {unit}", metric, quantile=0.99)


@dataclass(frozen=True, slots=True)
class Loads:
    """Loads of an application for one kind of engine, four of them, and what suits them."""

    values: tuple[float, float, float]
    #: Seconds of arrivals, where a load is a rate.
    duration_s: float = 10.0
    #: Factor on all lengths.
    scale: float = 1.0
    #: Parameters of the workload besides.
    more: Mapping[str, str | float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Application:
    """One of the five."""

    name: str
    workload: str
    #: What a load is.
    unit: str
    #: Of the workload, for a load and seconds of arrivals.
    parameters: Callable[[float, float], Mapping[str, str | float]]
    #: A policy is behind another one where it is so in both.
    figures: tuple[Figure, Figure]
    #: By the engines' profile.
    loads: Mapping[str, Loads]

    @property
    def means(self) -> tuple[Figure, ...]:
        """Those figures that are means."""
        return tuple(figure for figure in self.figures if figure.quantile is None)

    def loads_of(self, profile: str) -> Loads:
        """The loads for engines of a profile.

        Raises:
            ValueError: none are set; lists the profiles that have some.
        """
        if profile not in self.loads:
            known = ", ".join(self.loads)
            raise ValueError(f"{self.name}: no loads for engines {profile!r}; there are {known}")
        return self.loads[profile]

    def build(self, profile: str, load: float, seed: int, *, share: float = 1.0) -> Generator:
        """The workload; `share`: of the usual seconds of arrivals, where a load is a rate."""
        loads = self.loads_of(profile)
        parameters = self.parameters(load, loads.duration_s * share)
        return build(
            self.workload, {**parameters, **loads.more, "scale": loads.scale, "seed": seed}
        )


def _gpts(rate: float, seconds: float) -> Mapping[str, str | float]:
    return {"rate": rate, "count": max(4, round(rate * seconds))}


def _mixed(rate: float, seconds: float) -> Mapping[str, str | float]:
    """Chats, and a summary for each 27.5 of them; all texts differ."""
    gap_s = 27.5 / rate
    return {
        "rate": rate,
        "count": max(1, round(rate * seconds)),
        "gap_scale": gap_s / fmean(SUMMARY_GAPS_S),
        "summaries": max(1, round(seconds / gap_s)),
        "same_paper": "false",
    }


def _agents(clients: float, seconds: float) -> Mapping[str, str | float]:
    """Agents side by side, with a tenth of the recorded turns; they start within 10 s."""
    return {"clients": clients, "count": clients, "turns_scale": 0.1, "turns_max": 12, "spread": 10}


def _multi_agent(rate: float, seconds: float) -> Mapping[str, str | float]:
    return {"branches": 8, "rate": rate, "count": max(1, round(rate * seconds))}


def _map_reduce(rate: float, seconds: float) -> Mapping[str, str | float]:
    return {"rate": rate, "count": 17 * max(1, round(rate * seconds))}


#: That policies are compared on.
ENGINES = 4
CPU = "cpu-demo"
#: What this project's own engine does beyond a modern one, by profile; a CPU's does so as it is.
OWN_ENGINE: Mapping[str, Mapping[str, object]] = {DEFAULT_PROFILE: OWN, CPU: {}}

APPLICATIONS: tuple[Application, ...] = (
    Application(
        "gpts",
        "gpts",
        "calls/s",
        _gpts,
        _mean_and_tail("ms_per_token", "ms/token"),
        {DEFAULT_PROFILE: Loads((30, 60, 90)), CPU: Loads((4, 8, 16), 30, 0.2)},
    ),
    Application(
        "mixed",
        "mixed",
        "chats/s",
        _mixed,
        (
            Figure("chats, ms/token", "ms_per_token", "chat"),
            Figure("map-reduce, s", "job_s", "map-reduce"),
        ),
        {DEFAULT_PROFILE: Loads((30, 50, 75)), CPU: Loads((4, 8, 14), 30, 0.25)},
    ),
    Application(
        "agents",
        "agents",
        "agents",
        _agents,
        _mean_and_tail("call_s", "s a call"),
        {
            DEFAULT_PROFILE: Loads((80, 160, 320), more={"pause_max_s": 20}),
            CPU: Loads((32, 64, 128), scale=0.05, more={"pause_max_s": 2}),
        },
    ),
    Application(
        "multi-agent",
        "multi-agent",
        "jobs/s",
        _multi_agent,
        _mean_and_tail("job_s", "s"),
        {DEFAULT_PROFILE: Loads((0.1, 0.2, 0.4), 60), CPU: Loads((0.1, 0.2, 0.4), 60, 0.125)},
    ),
    Application(
        "map-reduce",
        "mapreduce-fleet",
        "jobs/s",
        _map_reduce,
        _mean_and_tail("job_s", "s"),
        {DEFAULT_PROFILE: Loads((4, 8, 12)), CPU: Loads((1, 2, 4), 20, 0.25)},
    ),
)


def select(names: Iterable[str]) -> tuple[Application, ...]:
    """Applications by name, in that order; all without any, or with `all`.

    Raises:
        ValueError: an unknown name; lists the known ones.
    """
    known = {application.name: application for application in APPLICATIONS}
    wanted = [name for name in names if name != "all"]
    for name in wanted:
        if name not in known:
            raise ValueError(f"no application {name!r}; there are {', '.join(known)}")
    return tuple(known[name] for name in wanted) or APPLICATIONS
