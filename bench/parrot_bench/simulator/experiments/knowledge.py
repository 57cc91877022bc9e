"""Experiments on the value of knowledge: what clients declare or links reveal, piece by piece."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parrot_bench.simulator.experiments.definitions import MODERN, OWN, Arm, Experiment, Point
from parrot_bench.simulator.experiments.fleet import mixed_load
from parrot_bench.simulator.plan import Knowledge

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
        # `max_tokens` far above the lengths: otherwise there is nothing to predict.
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
