"""The five applications that policies are compared by, each with three loads and two figures.

Loads are set for each kind of engine: from where engines are hardly shared to about what four of
them bear. Arrivals last some seconds, so that a whole table takes minutes. Other engines with an
H200 have the loads of an 8B model in bf16 times how much more they do: the geometric mean of how
many times as fast they fill prompts and take a step of 64 sequences, both measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean

from parrot_bench.applications.figures import SUMMARY_GAPS_S
from parrot_bench.simulator.experiments.definitions import OWN
from parrot_bench.simulator.metrics import Figure, Metric
from parrot_bench.simulator.profiles import DEFAULT_PROFILE
from parrot_bench.simulator.workloads import Generator, build


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
#: How much more engines with an H200 do than H200-8B: 38,437 tokens a second, 6.07 ms a step.
H200_SPEED: Mapping[str, float] = {
    DEFAULT_PROFILE: 1.0,
    "H200-8B-FP8": 1.3,  # 54,962 and 5.13
    "H200-8B-INT4": 0.99,  # 41,654 and 6.68
    "H200x2-8B": 1.64,  # 64,938 and 3.82
}
#: What this project's own engine does beyond a modern one, by profile; a CPU's does so as it is.
OWN_ENGINE: Mapping[str, Mapping[str, object]] = {**dict.fromkeys(H200_SPEED, OWN), CPU: {}}


def _loads(h200: Loads, cpu: Loads) -> Mapping[str, Loads]:
    """Loads of H200-8B for all engines with an H200 by their speed, and those of a CPU."""

    def scaled(speed: float) -> Loads:
        low, middle, high = (round(value * speed, 0 if value >= 4 else 2) for value in h200.values)
        return replace(h200, values=(low, middle, high))

    return {**{name: scaled(speed) for name, speed in H200_SPEED.items()}, CPU: cpu}


APPLICATIONS: tuple[Application, ...] = (
    Application(
        "gpts",
        "gpts",
        "calls/s",
        _gpts,
        _mean_and_tail("ms_per_token", "ms/token"),
        _loads(Loads((30, 60, 90)), Loads((4, 8, 16), 30, 0.2)),
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
        _loads(Loads((30, 50, 75)), Loads((4, 8, 14), 30, 0.25)),
    ),
    Application(
        "agents",
        "agents",
        "agents",
        _agents,
        _mean_and_tail("call_s", "s a call"),
        _loads(
            Loads((80, 160, 320), more={"pause_max_s": 20}),
            Loads((32, 64, 128), scale=0.05, more={"pause_max_s": 2}),
        ),
    ),
    Application(
        "multi-agent",
        "multi-agent",
        "jobs/s",
        _multi_agent,
        _mean_and_tail("job_s", "s"),
        _loads(Loads((0.1, 0.2, 0.4), 60), Loads((0.1, 0.2, 0.4), 60, 0.125)),
    ),
    Application(
        "map-reduce",
        "mapreduce-fleet",
        "jobs/s",
        _map_reduce,
        _mean_and_tail("job_s", "s"),
        _loads(Loads((4, 8, 12)), Loads((1, 2, 4), 20, 0.25)),
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
