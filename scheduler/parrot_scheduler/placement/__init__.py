"""Placement: on which engine does a task run? One small file for each policy."""

from __future__ import annotations

from parrot_scheduler.placement.least_loaded import LeastLoaded
from parrot_scheduler.placement.lmetric import LMetric
from parrot_scheduler.placement.paper import Paper
from parrot_scheduler.placement.parrot import Parrot
from parrot_scheduler.placement.prefix_linear import PrefixLinear
from parrot_scheduler.placement.round_robin import RoundRobin
from parrot_scheduler.placement.session_affinity import SessionAffinity
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
