"""The five applications that policies are compared by, each with three loads and two figures.

Loads are set for each kind of engine: from where engines are hardly shared to about what four of
them bear. Arrivals last some seconds, so that a whole table takes minutes. Other engines with an
H200 have the loads of an 8B model in bf16 times how much more they do: the geometric mean of how
many times as fast they fill prompts and take a step of 64 sequences, both measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import fmean

from parrot_bench.applications.figures import SUMMARY_GAPS_S
from parrot_bench.simulator import workloads
from parrot_bench.simulator.metrics import Figure, Metric
from parrot_bench.simulator.plan import ApplicationPlan
from parrot_bench.simulator.profiles import DEFAULT_PROFILE


def _mean_and_tail(metric: Metric, unit: str) -> tuple[Figure, Figure]:
    return Figure(f"mean {unit}", metric), Figure(f"p99 {unit}", metric, quantile=0.99)


@dataclass(frozen=True, slots=True)
class Loads:
    """Loads of an application for one kind of engine, four of them."""

    values: tuple[float, float, float]
    #: Seconds of arrivals, where a load is a rate.
    duration_s: float = 10.0
    #: Factor on all lengths.
    scale: float = 1.0
    #: Longest pause of agents.
    pause_max_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Application:
    """One of the five."""

    name: str
    #: The unit of a load.
    unit: str
    #: Plans for a load, its settings, and a seed.
    plans: Callable[[float, Loads, int], Iterator[ApplicationPlan]]
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


def _gpts(rate: float, loads: Loads, seed: int) -> Iterator[ApplicationPlan]:
    count = max(4, round(rate * loads.duration_s))
    return workloads.gpts(rate, count, scale=loads.scale, seed=seed)


def _mixed(rate: float, loads: Loads, seed: int) -> Iterator[ApplicationPlan]:
    """Chats, and a summary for each 27.5 of them."""
    gap_s = 27.5 / rate
    count, summaries = (max(1, round(loads.duration_s * each)) for each in (rate, 1 / gap_s))
    gap_scale = gap_s / fmean(SUMMARY_GAPS_S)
    return workloads.mixed(rate, count, summaries, gap_scale, scale=loads.scale, seed=seed)


def _agents(count: float, loads: Loads, seed: int) -> Iterator[ApplicationPlan]:
    return workloads.agents(int(count), loads.pause_max_s, scale=loads.scale, seed=seed)


def _multi_agent(rate: float, loads: Loads, seed: int) -> Iterator[ApplicationPlan]:
    count = max(1, round(rate * loads.duration_s))
    return workloads.multi_agent(rate, count, scale=loads.scale, seed=seed)


def _map_reduce(rate: float, loads: Loads, seed: int) -> Iterator[ApplicationPlan]:
    count = max(1, round(rate * loads.duration_s))
    return workloads.map_reduces(rate, count, scale=loads.scale, seed=seed)


#: Engines that policies are compared on.
ENGINES = 4
CPU = "cpu-demo"
#: How much more engines with an H200 do than H200-8B: 38,437 tokens a second, 6.07 ms a step.
H200_SPEED: Mapping[str, float] = {
    DEFAULT_PROFILE: 1.0,
    "H200-8B-FP8": 1.3,  # 54,962 and 5.13
    "H200-8B-INT4": 0.99,  # 41,654 and 6.68
    "H200x2-8B": 1.64,  # 64,938 and 3.82
}
#: This project's own engine beside a modern one: shared attention, and few tokens of prompts in a
#: step in which something more urgent decodes, as its defaults on a GPU say.
OWN = {"shared_attention": True, "max_background_tokens": 255, "background_burst_tokens": 765}
#: By profile; a CPU's engine is this project's own as it is.
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
        "calls/s",
        _gpts,
        _mean_and_tail("ms_per_token", "ms/token"),
        _loads(Loads((30, 60, 90)), Loads((4, 8, 16), 30, 0.2)),
    ),
    Application(
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
        _agents,
        _mean_and_tail("call_s", "s a call"),
        _loads(
            Loads((80, 160, 320), pause_max_s=20), Loads((32, 64, 128), scale=0.05, pause_max_s=2)
        ),
    ),
    Application(
        "multi-agent",
        "jobs/s",
        _multi_agent,
        _mean_and_tail("job_s", "s"),
        _loads(Loads((0.1, 0.2, 0.4), 60), Loads((0.1, 0.2, 0.4), 60, 0.125)),
    ),
    Application(
        "map-reduce",
        "jobs/s",
        _map_reduce,
        _mean_and_tail("job_s", "s"),
        _loads(Loads((4, 8, 12)), Loads((1, 2, 4), 20, 0.25)),
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
