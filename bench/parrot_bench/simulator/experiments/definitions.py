"""Experiments as data: what an experiment is, and the arms that most of them have.

An experiment is a workload at several points, run by several arms on the same engines. An arm is
what differs: how calls reach the scheduler, its policies, and what the engines are able to do.
Three kinds of arms keep the sources of a gain apart:

- the paper's baselines: engines without a prefix cache that fill each prompt whole, with the
  token caps of the experiment, the shortest queue first, and a client that waits for each answer;
- modern baselines: prefix caching and chunked prefill, and placement as of today;
- this project: everything on, and then on an ordinary engine, with a plain client, with neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp
from statistics import NormalDist
from typing import Any, Literal

from parrot_bench.simulator.metrics import Metric
from parrot_bench.simulator.options import Network
from parrot_bench.simulator.plan import ClientMode, Knowledge
from parrot_bench.simulator.profiles import DEFAULT_PROFILE

#: Round trips between client and service. The paper's 100 recorded ones are 218 to 345 ms, mean
#: 244, standard deviation 21: quantiles of a log-normal distribution above 218 with these moments,
#: whose largest is 344.
ROUND_TRIPS_S = tuple(
    0.218 + exp(-3.90 + 0.709 * NormalDist().inv_cdf((i + 0.5) / 100)) for i in range(100)
)
RECORDED = Network(samples_s=ROUND_TRIPS_S)
#: Clients beside the engines.
NONE = Network()


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to run a workload."""

    name: str
    #: Of `PRESETS`.
    preset: str
    client: ClientMode = "plain"
    #: Fields of the engine profile that differ.
    engine: Mapping[str, object] = field(default_factory=dict)
    #: `paper`: its kind of baseline; `modern`; `ours`.
    kind: Literal["paper", "modern", "ours"] = "modern"
    #: Fields of the scheduler's configuration that differ from the preset.
    policy: Mapping[str, Any] = field(default_factory=dict)
    #: What is known of plain clients' calls; None: see `SimulationOptions`.
    knowledge: Knowledge | None = None


#: What the engines of the paper's baselines lack.
_OLD = {"prefix_caching": False, "chunked_prefill": False}
_SHARED = {"shared_attention": True}
#: What this project's own engine does beyond a modern one: `shared_attention`, and in a step in
#: which something more urgent decodes prompts take few tokens, as its defaults on a GPU say.
OWN = {"shared_attention": True, "max_background_tokens": 255, "background_burst_tokens": 765}

#: The paper's own algorithm, on an engine like its own.
PUBLISHED = Arm("Parrot as published", "paper", "graph", _SHARED, "paper")

MODERN = (
    Arm("LMetric", "lmetric"),
    Arm("prefix-linear", "prefix-linear"),
    Arm("session affinity", "session-affinity", "session"),
)
OURS = Arm("ours", "parrot", "graph", OWN, "ours")
VARIANTS = (
    Arm("ours, ordinary engine", "parrot", "graph", {}, "ours"),
    Arm("ours, plain client", "parrot", "plain", OWN, "ours"),
    Arm("ours, neither", "parrot", "plain", {}, "ours"),
)


def old(name: str, token_cap: int | None) -> Arm:
    """A baseline of the paper: shortest queue, no cache, and a cap on tokens that run."""
    return Arm(name, "least-loaded", "plain", {**_OLD, "token_cap": token_cap}, "paper")


@dataclass(frozen=True, slots=True)
class Point:
    """One setting of the workload, and what the paper measured there."""

    label: str
    parameters: Mapping[str, str | float]
    #: By name of a baseline: how many times better Parrot was, in the experiment's metric.
    printed: Mapping[str, float] = field(default_factory=dict)
    #: By name of an arm: what it measured itself, in the metric's unit.
    measured: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Experiment:
    figure: str
    title: str
    workload: str
    points: tuple[Point, ...]
    arms: tuple[Arm, ...]
    #: Of `PROFILES`.
    profile: str = DEFAULT_PROFILE
    engines: int = 1
    #: The kind of application that is measured; None: all of them.
    kind: str | None = None
    metric: Metric = "job_s"
    network: Network = RECORDED
    #: Parameter that the number of a repetition sets besides the seed.
    repetition: str | None = None
    #: Whether the points are rates, to be compared by the rate that a bound allows.
    rate_at_ms: float | None = None
    #: More metrics to show, as (kind, metric).
    besides: tuple[tuple[str | None, Metric], ...] = ()
    #: The arm that the others are compared with.
    base: str = OURS.name
    #: Calls ask for so many tokens at least, whatever they generate; None: for what they generate.
    max_tokens: int | None = None
    #: What the experiment leaves out or does differently.
    note: str = ""


def points(
    labels: Iterable[object],
    parameters: Callable[[Any], Mapping[str, str | float]],
    printed: Mapping[str, Sequence[float | None]] | None = None,
    measured: Mapping[str, Sequence[float | None]] | None = None,
    *,
    unit: str,
) -> tuple[Point, ...]:
    """A point for each value; printed and measured figures by arm, in the order of the values."""

    def at(number: int, figures: Mapping[str, Sequence[float | None]] | None) -> dict[str, float]:
        found = {arm: values[number] for arm, values in (figures or {}).items()}
        return {arm: value for arm, value in found.items() if value is not None}

    return tuple(
        Point(unit.format(value), parameters(value), at(number, printed), at(number, measured))
        for number, value in enumerate(labels)
    )
