"""The experiments of the Parrot paper (OSDI '24), and a fleet of today's engines, as data.

An experiment is a workload at several points, run by several arms on the same engines. An arm is
what differs: how calls reach the scheduler, its policies, and what the engines are able to do.
Three kinds of arms keep the sources of a gain apart:

- the paper's baselines: engines without a prefix cache that fill each prompt whole, with the
  token caps of the experiment, the shortest queue first, and a client that waits for each answer;
- modern baselines: prefix caching and chunked prefill, and placement as of today;
- this project: everything on, and then on an ordinary engine, with a plain client, with neither.

Printed ratios are the paper's, from its raw logs where the text gives none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import exp
from statistics import NormalDist
from typing import Any, Literal, TypeAlias

from parrot_simulator.clients import Network
from parrot_simulator.plan import ClientMode

#: `job_s`: seconds from arrival to the last answer at the client; `ms_per_token`: that time over
#: all output tokens of the application, in ms; `decode_ms_per_token`: between its first and last
#: token; `call_s`: seconds of one call, so that the pauses between calls do not count.
Metric: TypeAlias = Literal["job_s", "ms_per_token", "decode_ms_per_token", "call_s"]

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


#: What the engines of the paper's baselines lack.
_OLD = {"prefix_caching": False, "chunked_prefill": False}
_SHARED = {"shared_attention": True}
#: What this project's own engine does beyond a modern one: `shared_attention`, and in a step in
#: which something more urgent decodes prompts take a quarter of the usual tokens, its default.
_OWN = {"shared_attention": True, "max_background_tokens": 2048}

#: The paper's own algorithm, on an engine like its own.
PUBLISHED = Arm("Parrot as published", "paper", "graph", _SHARED, "paper")

MODERN = (
    Arm("LMetric", "lmetric"),
    Arm("prefix-linear", "prefix-linear"),
    Arm("session affinity", "session-affinity", "session"),
)
OURS = Arm("ours", "parrot", "graph", _OWN, "ours")
VARIANTS = (
    Arm("ours, ordinary engine", "parrot", "graph", {}, "ours"),
    Arm("ours, plain client", "parrot", "plain", _OWN, "ours"),
    Arm("ours, neither", "parrot", "plain", {}, "ours"),
)

#: What the door and retention give: each switched off, and both.
GATES = (
    Arm("ours, admission open", "parrot", "graph", _OWN, "ours", {"admission": "open"}),
    Arm("ours, keep none", "parrot", "graph", _OWN, "ours", {"keep": "none"}),
    Arm(
        "ours, neither gate nor keep",
        "parrot",
        "graph",
        _OWN,
        "ours",
        {"admission": "open", "keep": "none"},
    ),
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
    """One figure."""

    figure: str
    title: str
    workload: str
    points: tuple[Point, ...]
    arms: tuple[Arm, ...]
    #: Of `PROFILES`.
    profile: str
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
    #: What the experiment leaves out or does differently.
    note: str = ""


_VLLM = old("vLLM 2023", 4096)
_ALL = (PUBLISHED, *MODERN, OURS, *VARIANTS)
#: On one engine modern placements do the same.
_ONE = (PUBLISHED, MODERN[0], OURS, *VARIANTS)


def _summaries(baseline: str, outputs: dict[int, float], chunks: dict[int, float]) -> list[Point]:
    return [
        *(
            Point(f"output {o}", {"chunk_tokens": 1024, "output_tokens": o}, {baseline: ratio})
            for o, ratio in outputs.items()
        ),
        *(
            Point(f"chunk {c}", {"chunk_tokens": c, "output_tokens": 50}, {baseline: ratio})
            for c, ratio in chunks.items()
        ),
    ]


def _calibration(rate: float, measured: tuple[float, ...] = ()) -> Point:
    names = [arm.name for arm in _CAPS]
    return Point(
        f"{rate:g} calls/s", {"rate": rate}, measured=dict(zip(names, measured, strict=False))
    )


_CAPS = tuple(old(f"cap {cap}", cap) for cap in (2048, 4096, 6144, 8192, 10240, 12288))

PAPER: tuple[Experiment, ...] = (
    Experiment(
        figure="10",
        title="capacity of an engine for chats",
        workload="calibration",
        points=(
            *(_calibration(rate) for rate in (5, 10, 15, 20)),
            _calibration(25, (20.6, 24.8, 32.3, 39.9, 48.1, 54.7)),
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
        points=tuple(
            _summaries(
                _VLLM.name,
                {25: 1.38, 50: 1.21, 75: 1.14, 100: 1.11},
                {512: 1.21, 1536: 1.20, 2048: 1.19},
            )
        ),
        arms=(_VLLM, *_ONE),
        profile="A100-13B-2024",
    ),
    Experiment(
        figure="12a",
        title="a chain beside background calls",
        workload="chain-background",
        points=tuple(
            Point(f"{rate:g} calls/s", {"background_rate": rate}, {_VLLM.name: ratio})
            for rate, ratio in ((0, 1.21), (1, 1.19), (2, 1.31), (3, 1.79), (3.5, 2.38))
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
        points=tuple(
            Point(f"{n} clients", {"count": n}, {_VLLM.name: ratio})
            for n, ratio in ((10, 1.38), (15, 1.52), (20, 1.63), (25, 1.68))
        ),
        arms=(_VLLM, *_ONE),
        profile="A100-13B-2024",
        note="Printed ratios are of the artifact's re-run, which the paper's 1.68x is from.",
    ),
    Experiment(
        figure="13",
        title="map-reduce summaries, one at a time",
        workload="map-reduce",
        points=tuple(
            _summaries(
                _VLLM.name,
                {25: 1.70, 50: 2.04, 75: 2.22, 100: 2.37},
                {512: 1.96, 1536: 2.07, 2048: 2.16},
            )
        ),
        arms=(_VLLM, *_ONE),
        profile="A100-13B-2024",
    ),
    Experiment(
        figure="14",
        title="copilot, recorded outputs",
        workload="copilot",
        points=tuple(
            Point(
                f"batch {batch}",
                {"batch": batch},
                {"no sharing": without, "LMetric": paged} if without else {"LMetric": paged},
            )
            for batch, without, paged in (
                (8, 1.8, 1.1),
                (16, 2.4, 1.3),
                (32, 0, 1.4),
                (64, 0, 1.7),
            )
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
        points=tuple(
            Point(
                f"batch {batch}, output {output}",
                {"batch": batch, "output_tokens": output},
                {"LMetric": ratio},
            )
            for batch, output, ratio in (
                *((32, 200, 1.37), (32, 400, 1.46), (32, 600, 1.49), (32, 800, 1.50)),
                *((64, 100, 1.43), (64, 200, 1.62), (64, 300, 1.72), (64, 400, 1.78)),
                (64, 480, 1.81),
            )
        ),
        arms=(MODERN[0], PUBLISHED, OURS, VARIANTS[0]),
        profile="A100-7B-2024",
        network=NONE,
    ),
    Experiment(
        figure="16",
        title="GPTs: four applications on four engines",
        workload="gpts",
        points=tuple(
            Point(f"{rate:g} calls/s", {"rate": rate, "count": count})
            for rate, count in (
                *((0.25, 52), (0.5, 100), (1, 300), (2, 500), (4, 500)),
                *((8, 500), (12, 500), (16, 500), (32, 500)),
            )
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
        points=tuple(
            Point(
                f"{branches} branches",
                {"branches": branches},
                {"vLLM 2023, latency": latency, "vLLM 2023, throughput": throughput},
            )
            for branches, latency, throughput in (
                (4, 2.96, 1.27),
                (8, 4.91, 1.59),
                (12, 7.20, 2.04),
                (16, 11.7, 2.45),
            )
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


#: Four engines of today under rising load, for the comparison with modern baselines. The loads
#: were chosen from the engines' step model, from a third of what they can do to beyond it.
FLEET: tuple[Experiment, ...] = (
    Experiment(
        figure="fleet multi-agent",
        title="multi-agent coding, many applications",
        workload="multi-agent",
        points=tuple(
            Point(f"{rate:g} jobs/s", {"rate": rate, "count": 40}) for rate in (0.05, 0.1, 0.2, 0.3)
        ),
        arms=(*MODERN, OURS, *VARIANTS),
        profile="H200-8B",
        engines=4,
    ),
    Experiment(
        figure="fleet gpts",
        title="GPTs at today's speed",
        workload="gpts",
        points=tuple(
            Point(f"{rate:g} calls/s", {"rate": rate, "count": 20 * rate})
            for rate in (15, 30, 45, 60, 75)
        ),
        arms=(*MODERN, OURS, *VARIANTS),
        profile="H200-8B",
        engines=4,
    ),
    Experiment(
        figure="fleet mixed",
        title="chat beside map-reduce at today's speed",
        workload="mixed",
        points=tuple(Point(f"load {load:g}", mixed_load(load)) for load in (1.0, 2.0, 3.0)),
        arms=(*MODERN, OURS, *VARIANTS),
        profile="H200-8B",
        engines=4,
        besides=(("chat", "job_s"), ("map-reduce", "job_s")),
    ),
    Experiment(
        figure="fleet agents",
        title="coding agents with tool pauses, on one engine",
        workload="agents",
        points=tuple(
            Point(
                f"{clients} agents",
                {"clients": clients, "count": clients, "turns_scale": 0.3},
            )
            for clients in (16, 48, 96, 144)
        ),
        arms=(MODERN[0], MODERN[2], OURS, *VARIANTS),
        profile="H200-8B",
        metric="call_s",
        note="Agents have 0.3 of the recorded number of turns, to keep the runs short.",
    ),
    Experiment(
        figure="fleet working-set",
        title="coding agents with short pauses, whose contexts outgrow one engine's memory",
        workload="agents",
        points=tuple(
            Point(
                f"{share:g}x memory",
                {
                    "clients": round(20 * share),
                    "count": round(60 * share),
                    "turns_scale": 0.5,
                    "turns_max": 40,
                    "pause_max_s": 60,
                    "goal_s": 30,
                    "spread": 30,
                },
            )
            for share in (0.5, 1.0, 1.5, 2.0)
        ),
        arms=(MODERN[0], OURS, *GATES),
        profile="H200-8B-long",
        metric="call_s",
        note="An agent's context is 45,000 tokens on average: 20 fill the engine's 900,000. "
        "Pauses are cut to 60 s (median 10 s).",
    ),
)
