"""The experiments as data: the Parrot paper's (OSDI '24), a fleet of today's engines, an ablation.

An experiment is a workload at several points, run by several arms on the same engines. An arm is
what differs: how calls reach the scheduler, its policies, and what the engines are able to do.
Three kinds of arms keep the sources of a gain apart:

- the paper's baselines: engines without a prefix cache that fill each prompt whole, with the
  token caps of the experiment, the shortest queue first, and a client that waits for each answer;
- modern baselines: prefix caching and chunked prefill, and placement as of today;
- this project: everything on, and then on an ordinary engine, with a plain client, with neither.

Printed ratios are the paper's, and measured times from its raw logs, in the metric's unit. What
Parrot measured stands beside ours, and what it measured with the paged kernel (a shared prompt held
once and read by each call) beside ours on an ordinary engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp
from statistics import NormalDist
from typing import Any, Literal

from parrot_simulator.metrics import Metric
from parrot_simulator.options import Network
from parrot_simulator.plan import ClientMode, Knowledge
from parrot_simulator.profiles import DEFAULT_PROFILE

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
#: which something more urgent decodes prompts take few tokens, as many as its default on a GPU.
OWN = {"shared_attention": True, "max_background_tokens": 127}

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

#: What admission and retention give: each switched off, and both.
GATES = tuple(
    Arm(name, "parrot", "graph", OWN, "ours", policy)
    for name, policy in (
        ("ours, admission open", {"admission": "open"}),
        ("ours, keep none", {"keep": "none"}),
        ("ours, neither gate nor keep", {"admission": "open", "keep": "none"}),
    )
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


_VLLM = old("vLLM 2023", 4096)
_ALL = (PUBLISHED, *MODERN, OURS, *VARIANTS)
#: On one engine modern placements do the same.
_ONE = (PUBLISHED, MODERN[0], OURS, *VARIANTS)


def _points(
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


def _summaries(
    printed: tuple[float, ...], theirs: tuple[float, ...], ours: tuple[float, ...]
) -> tuple[Point, ...]:
    """Outputs of 25 to 100 tokens at chunks of 1024, then other chunks with outputs of 50."""
    measured = {_VLLM.name: theirs, OURS.name: ours}

    def part(start: int, end: int) -> tuple[dict[str, Any], dict[str, Any]]:
        return (
            {_VLLM.name: printed[start:end]},
            {arm: seconds[start:end] for arm, seconds in measured.items()},
        )

    return (
        *_points(
            (25, 50, 75, 100),
            lambda output: {"chunk_tokens": 1024, "output_tokens": output},
            *part(0, 4),
            unit="output {}",
        ),
        *_points(
            (512, 1536, 2048),
            lambda chunk: {"chunk_tokens": chunk, "output_tokens": 50},
            *part(4, 7),
            unit="chunk {}",
        ),
    )


_CAPS = tuple(old(f"cap {cap}", cap) for cap in (2048, 4096, 6144, 8192, 10240, 12288))

PAPER: tuple[Experiment, ...] = (
    Experiment(
        figure="10",
        title="capacity of an engine for chats",
        workload="calibration",
        points=_points(
            (5, 10, 15, 20, 25),
            lambda rate: {"rate": rate},
            measured={
                arm.name: (None, None, None, None, ms)
                for arm, ms in zip(_CAPS, (20.6, 24.8, 32.3, 39.9, 48.1, 54.7), strict=True)
            },
            unit="{} calls/s",
        ),
        arms=(*_CAPS, OURS),
        profile="A100-13B-2024",
        metric="decode_ms_per_token",
        network=NONE,
        note="Shows how near the simulated engine is to the measured one; there is no scheduling "
        "in it. Measured time per token leaves out the time in the queue, as the paper's does: "
        "its figures grow with the cap.",
    ),
    Experiment(
        figure="11",
        title="chain summaries, one at a time",
        workload="chain",
        points=_summaries(
            (1.38, 1.21, 1.14, 1.11, 1.21, 1.20, 1.19),
            (56.5, 91.0, 125.8, 160.9, 176.3, 63.0, 48.8),
            (40.9, 75.5, 110.3, 145.2, 145.2, 52.6, 41.2),
        ),
        arms=(_VLLM, *_ONE),
        profile="A100-13B-2024",
    ),
    Experiment(
        figure="12a",
        title="a chain beside background calls",
        workload="chain-background",
        points=_points(
            (0, 1, 2, 3, 3.5),
            lambda rate: {"background_rate": rate},
            {_VLLM.name: (1.21, 1.19, 1.31, 1.79, 2.38)},
            {
                _VLLM.name: (91, 108.3, 128.2, 188.4, 270.4),
                OURS.name: (75, 91.0, 98.2, 105.2, 113.5),
            },
            unit="{} calls/s",
        ),
        arms=(_VLLM, *_ONE),
        profile="A100-13B-2024",
        kind="chain",
        repetition="document",
    ),
    Experiment(
        figure="12b",
        title="many chains at once",
        workload="chain-clients",
        points=_points(
            (10, 15, 20, 25),
            lambda clients: {"count": clients},
            {_VLLM.name: (1.38, 1.52, 1.63, 1.68)},
            {_VLLM.name: (112.8, 171.9, 234.7, 292.9), OURS.name: (81.7, 113.3, 143.7, 174.6)},
            unit="{} clients",
        ),
        arms=(_VLLM, *_ONE),
        profile="A100-13B-2024",
        note="Printed ratios and measured times are of the artifact's re-run, which the paper's "
        "1.68x is from.",
    ),
    Experiment(
        figure="13",
        title="map-reduce summaries, one at a time",
        workload="map-reduce",
        points=_summaries(
            (1.70, 2.04, 2.22, 2.37, 1.96, 2.07, 2.16),
            (12.68, 19.60, 26.68, 34.09, 23.27, 18.67, 18.89),
            (7.47, 9.61, 12.03, 14.41, 11.89, 9.04, 8.76),
        ),
        arms=(_VLLM, *_ONE),
        profile="A100-13B-2024",
    ),
    Experiment(
        figure="14",
        title="copilot, recorded outputs",
        workload="copilot",
        points=_points(
            (8, 16, 32, 64),
            lambda batch: {"batch": batch},
            {"no sharing": (1.8, 2.4, None, None), MODERN[0].name: (1.1, 1.3, 1.4, 1.7)},
            {
                "no sharing": (13.6, 23.3, None, None),
                MODERN[0].name: (7.9, 12.1, 18.4, 32.7),
                OURS.name: (7.7, 9.8, 13.3, 20.1),
            },
            unit="batch {}",
        ),
        arms=(old("no sharing", None), *_ONE),
        profile="A100-7B-2024",
        network=NONE,
        note="The paper's second baseline shares KV in memory but reads it once for each call: "
        "here any modern baseline. Without sharing it ran out of memory from batch 32 on; here "
        "prompts queue.",
    ),
    Experiment(
        figure="15",
        title="copilot, fixed outputs",
        workload="copilot",
        points=_points(
            (
                *((32, 200), (32, 400), (32, 600), (32, 800)),
                *((64, 100), (64, 200), (64, 300), (64, 400), (64, 480)),
            ),
            lambda size: {"batch": size[0], "output_tokens": size[1]},
            {MODERN[0].name: (1.37, 1.46, 1.49, 1.50, 1.43, 1.62, 1.72, 1.78, 1.81)},
            {
                MODERN[0].name: (13.8, 24.3, 35.2, 46.8, 16.7, 26.3, 36.1, 46.2, 54.5),
                OURS.name: (10.1, 16.7, 23.7, 31.3, 11.7, 16.3, 21.0, 26.0, 30.1),
            },
            unit="batch {0[0]}, output {0[1]}",
        ),
        arms=(MODERN[0], PUBLISHED, OURS, VARIANTS[0]),
        profile="A100-7B-2024",
        network=NONE,
    ),
    Experiment(
        figure="16",
        title="GPTs: four applications on four engines",
        workload="gpts",
        points=_points(
            (0.25, 0.5, 1, 2, 4, 8, 12, 16, 32),
            lambda rate: {"rate": rate, "count": {0.25: 52, 0.5: 100, 1: 300}.get(rate, 500)},
            measured={
                "vLLM 2023": (47.1, 55.9, 206.7, 546.8, *[None] * 5),
                OURS.name: (None, None, 32.0, 34.7, 42.9, 109.5, None, 329, 564),
                VARIANTS[0].name: (None, 41.8, 59.1, 78.6, 146.2, *[None] * 4),
            },
            unit="{} calls/s",
        ),
        arms=(old("vLLM 2023", 30_000), *_ALL),
        profile="A6000-7B-2024",
        engines=4,
        metric="ms_per_token",
        rate_at_ms=215.0,
        note="Printed: 12x the rate of vLLM near 215 ms a token, 2.4x that of the paged kernel.",
    ),
    Experiment(
        figure="17",
        title="multi-agent coding",
        workload="multi-agent",
        points=_points(
            (4, 8, 12, 16),
            lambda branches: {"branches": branches},
            {
                "vLLM 2023, latency": (2.96, 4.91, 7.20, 11.7),
                "vLLM 2023, throughput": (1.27, 1.59, 2.04, 2.45),
                VARIANTS[0].name: (1.00, 1.04, 1.14, 1.16),
            },
            {
                "vLLM 2023, latency": (554, 963, 1492, 2533),
                "vLLM 2023, throughput": (237, 311, 422, 529),
                OURS.name: (187, 196, 207, 216),
                VARIANTS[0].name: (187, 204, 236, 252),
            },
            unit="{} branches",
        ),
        arms=(old("vLLM 2023, latency", 7096), old("vLLM 2023, throughput", None), *_ONE),
        profile="A100-13B-2024",
    ),
    Experiment(
        figure="18",
        title="chat beside map-reduce on four engines",
        workload="mixed",
        points=(
            Point(
                "as in the paper",
                {},
                {"vLLM 2023, latency": 5.5, "vLLM 2023, throughput": 1.23},
                {"vLLM 2023, latency": 827.6, "vLLM 2023, throughput": 184.6, OURS.name: 149.1},
            ),
        ),
        arms=(old("vLLM 2023, latency", 4096), old("vLLM 2023, throughput", None), *_ALL),
        profile="A6000-7B-2024",
        engines=4,
        kind="chat",
        metric="ms_per_token",
        besides=(("chat", "decode_ms_per_token"), ("map-reduce", "job_s")),
        note="Printed besides: decode 1.72x better than the throughput baseline, map-reduce 3.7x "
        "faster than the latency baseline.",
    ),
)


def mixed_load(load: float) -> dict[str, str | float]:
    """`mixed` for 30 s: 30 chats/s and a summary each 0.9 s, times `load`; all texts differ."""
    return {
        "rate": 30 * load,
        "count": round(30 * 30 * load),
        "gap_scale": 0.25 / load,
        "summaries": round(30 / (11 / 3 * 0.25 / load)),
        "same_paper": "false",
    }


_FLEET_ARMS = (*MODERN, OURS, *VARIANTS)
#: Four engines of today under rising load, for the comparison with modern baselines. The loads
#: were chosen from the engines' step model, from a third of what they can do to beyond it.
FLEET: tuple[Experiment, ...] = (
    Experiment(
        figure="fleet multi-agent",
        title="multi-agent coding, many applications",
        workload="multi-agent",
        points=_points(
            (0.05, 0.1, 0.2, 0.3), lambda rate: {"rate": rate, "count": 40}, unit="{} jobs/s"
        ),
        arms=_FLEET_ARMS,
        engines=4,
    ),
    Experiment(
        figure="fleet gpts",
        title="GPTs at today's speed",
        workload="gpts",
        points=_points(
            (15, 30, 45, 60, 75), lambda rate: {"rate": rate, "count": 20 * rate}, unit="{} calls/s"
        ),
        arms=_FLEET_ARMS,
        engines=4,
    ),
    Experiment(
        figure="fleet mixed",
        title="chat beside map-reduce at today's speed",
        workload="mixed",
        points=_points((1.0, 2.0, 3.0), mixed_load, unit="load {:g}"),
        arms=_FLEET_ARMS,
        engines=4,
        besides=(("chat", "job_s"), ("map-reduce", "job_s")),
    ),
    Experiment(
        figure="fleet agents",
        title="coding agents with tool pauses, on one engine",
        workload="agents",
        points=_points(
            (16, 48, 96, 144),
            lambda clients: {"clients": clients, "count": clients, "turns_scale": 0.3},
            unit="{} agents",
        ),
        arms=(MODERN[0], MODERN[2], OURS, *VARIANTS),
        metric="call_s",
        note="Agents have 0.3 of the recorded number of turns, to keep the runs short.",
    ),
    Experiment(
        figure="fleet working-set",
        title="coding agents with short pauses, whose contexts outgrow one engine's memory",
        workload="agents",
        points=_points(
            (0.5, 1.0, 1.5, 2.0),
            lambda share: {
                "clients": round(20 * share),
                "count": round(60 * share),
                "turns_scale": 0.5,
                "turns_max": 40,
                "pause_max_s": 60,
                "goal_s": 30,
                "spread": 30,
            },
            unit="{:g}x memory",
        ),
        arms=(MODERN[0], OURS, *GATES),
        profile="H200-8B-long",
        metric="call_s",
        note="An agent's context is 45,000 tokens on average: 20 fill the engine's 900,000. "
        "Pauses are cut to 60 s (median 10 s).",
    ),
)

#: As `--figure` takes the search of `goodput`.
GOODPUT = "fleet goodput"

# The ablation: one point of load for each workload, the same for all switches

#: What is switched off, by the name of the row: fields of the scheduler's configuration.
SWITCHES: Mapping[str, Mapping[str, Any]] = {
    "all on": {},
    "admission: open": {"admission": "open"},
    "order: fcfs": {"order": "fcfs"},
    "place: lmetric": {"place": "lmetric"},
    "place: least-loaded": {"place": "least-loaded"},
    "keep: none": {"keep": "none"},
    "groups off": {"group_tasks": False},
    "prediction off": {"predict_lengths": False},
}

SWITCHED: tuple[Arm, ...] = tuple(
    Arm(switch, "parrot", "graph", OWN, "ours", changes) for switch, changes in SWITCHES.items()
)


def _ablation(
    workload: str,
    parameters: Mapping[str, str | float],
    *,
    capacity_tokens: int | None = None,
    **more: Any,
) -> Experiment:
    engine = OWN if capacity_tokens is None else {**OWN, "capacity_tokens": capacity_tokens}
    return Experiment(
        figure=f"ablation {workload}",
        title="each policy switched off in turn",
        workload=workload,
        points=(Point(workload, parameters),),
        arms=tuple(replace(arm, engine=engine) for arm in SWITCHED),
        base="all on",
        # `max_tokens` far above the lengths: otherwise there is nothing to predict.
        max_tokens=2048,
        **more,
    )


ABLATION: tuple[Experiment, ...] = (
    _ablation(
        "agents", {"clients": 96, "count": 96, "turns_scale": 0.2, "spread": 30}, metric="call_s"
    ),
    # Room for some 25 calls where twice as many would run.
    _ablation("backlog", {}, capacity_tokens=40_000),
    _ablation("gpts", {"rate": 60, "count": 1200}, engines=4),
    _ablation(
        "mixed",
        {"rate": 60, "count": 900, "gap_scale": 0.125, "summaries": 33, "same_paper": "false"},
        engines=4,
    ),
    _ablation("multi-agent", {"rate": 0.2, "count": 16}, engines=4),
    # Engines with room for 40,000 tokens, so that the flood makes tasks wait.
    _ablation("tenants", {"duration_s": 40}, capacity_tokens=40_000, kind="tenant"),
)

# What knowledge is worth to calls of plain clients

_INFERRED = Knowledge(sessions=True, groups=True, lengths=True, inferred=True)
#: Nothing is known, each piece alone, all that links tell (with their errors, and with very many),
#: and all that clients could declare.
KNOWN: tuple[Arm, ...] = tuple(
    Arm(name, "parrot", "plain", OWN, "ours", knowledge=knowledge)
    for name, knowledge in (
        ("none", Knowledge()),
        ("sessions", Knowledge(sessions=True)),
        ("groups", Knowledge(groups=True)),
        ("lengths", Knowledge(lengths=True)),
        ("successors", Knowledge(successors=True)),
        ("declared", Knowledge(sessions=True, groups=True, lengths=True, successors=True)),
        ("inferred", _INFERRED),
        ("inferred, a fifth wrong", replace(_INFERRED, recall=0.8, precision=0.8)),
    )
)


def _knowledge(
    name: str,
    workload: str,
    parameters: Mapping[str, str | float],
    *,
    capacity_tokens: int | None = None,
    **more: Any,
) -> Experiment:
    engine = OWN if capacity_tokens is None else {**OWN, "capacity_tokens": capacity_tokens}
    return Experiment(
        figure=f"knowledge {name}",
        title="what is known of plain calls",
        workload=workload,
        points=(Point(name, parameters),),
        # Others' policies on the same engines; session affinity knows the sessions.
        arms=tuple(replace(arm, engine=engine) for arm in (*MODERN, *KNOWN)),
        base="inferred",
        # As in the ablation.
        max_tokens=2048,
        **more,
    )


#: On engines whose caches and memory are known: what placement by prefixes, and keeping KV during
#: pauses, add to all that can be declared; and that without any of it.
PIECES: tuple[Arm, ...] = (
    *(arm for arm in KNOWN if not (arm.knowledge and arm.knowledge.inferred)),
    replace(
        next(arm for arm in KNOWN if arm.name == "declared"),
        name="declared, prefixes unused",
        policy={"place": "least-loaded"},
    ),
    replace(
        next(arm for arm in KNOWN if arm.name == "declared"),
        name="declared, pauses unused",
        policy={"keep": "none"},
    ),
)

_AGENTS: Mapping[str, str | float] = {"turns_scale": 0.2, "spread": 30, "pause_max_s": 60}
KNOWLEDGE: tuple[Experiment, ...] = (
    _knowledge(
        "mixed",
        "mixed",
        mixed_load(2.0),
        engines=4,
        besides=(("chat", "job_s"), ("map-reduce", "job_s")),
    ),
    _knowledge("multi-agent", "multi-agent", {"rate": 0.2, "count": 16}, engines=4),
    _knowledge("map-reduce", "mapreduce-fleet", {"rate": 6, "count": 2550}, engines=4),
    _knowledge("gpts", "gpts", {"rate": 60, "count": 1200}, engines=4),
    _knowledge("backlog", "backlog", {}, capacity_tokens=40_000),
    # One engine, contexts of 1.5 times its memory.
    _knowledge(
        "working-set",
        "agents",
        {**_AGENTS, "clients": 30, "count": 90, "turns_scale": 0.5, "turns_max": 40},
        profile="H200-8B-long",
        metric="call_s",
    ),
    # 200 and 300 sessions behind one shared system prompt.
    *(
        _knowledge(
            f"sessions-{clients}",
            "agents",
            {**_AGENTS, "clients": clients, "count": clients},
            engines=4,
            metric="call_s",
        )
        for clients in (200, 300)
    ),
)
