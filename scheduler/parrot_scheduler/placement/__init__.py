"""Placement: on which engine does a task run?"""

from __future__ import annotations

from parrot_scheduler.placement.baselines import (
    LeastLoaded,
    LMetric,
    PrefixLinear,
    RoundRobin,
    SessionAffinity,
)
from parrot_scheduler.placement.paper import Paper
from parrot_scheduler.placement.parrot import Parrot
from parrot_scheduler.policy import PlacementFactory

POLICIES: dict[str, PlacementFactory] = {
    "parrot": lambda config, rng: Parrot(config),
    "paper": lambda config, rng: Paper(config),
    "round-robin": lambda config, rng: RoundRobin(),
    "least-loaded": lambda config, rng: LeastLoaded(),
    "session-affinity": lambda config, rng: SessionAffinity(),
    "prefix-linear": lambda config, rng: PrefixLinear(),
    "lmetric": lambda config, rng: LMetric(),
}
