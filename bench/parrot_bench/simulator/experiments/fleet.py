"""Experiments on engines of today: applications that arrive at rising rates."""

from __future__ import annotations

from parrot_bench.simulator.experiments.definitions import (
    MODERN,
    OURS,
    OWN,
    VARIANTS,
    Arm,
    Experiment,
    points,
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
        points=points(
            (0.05, 0.1, 0.2, 0.3), lambda rate: {"rate": rate, "count": 40}, unit="{} jobs/s"
        ),
        arms=_FLEET_ARMS,
        engines=4,
    ),
    Experiment(
        figure="fleet gpts",
        title="GPTs at today's speed",
        workload="gpts",
        points=points(
            (15, 30, 45, 60, 75), lambda rate: {"rate": rate, "count": 20 * rate}, unit="{} calls/s"
        ),
        arms=_FLEET_ARMS,
        engines=4,
    ),
    Experiment(
        figure="fleet mixed",
        title="chat beside map-reduce at today's speed",
        workload="mixed",
        points=points((1.0, 2.0, 3.0), mixed_load, unit="load {:g}"),
        arms=_FLEET_ARMS,
        engines=4,
        besides=(("chat", "job_s"), ("map-reduce", "job_s")),
    ),
    Experiment(
        figure="fleet agents",
        title="coding agents with tool pauses, on one engine",
        workload="agents",
        points=points(
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
        points=points(
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
