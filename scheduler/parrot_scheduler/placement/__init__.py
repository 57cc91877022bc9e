"""Placement: on which engine does a task run? One small file for each policy."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeAlias

from parrot_scheduler.config import SchedulerConfig
from parrot_scheduler.placement.least_loaded import LeastLoaded
from parrot_scheduler.placement.lmetric import LMetric
from parrot_scheduler.placement.round_robin import RoundRobin
from parrot_scheduler.policy import PlacePolicy

#: Makes a policy for one pool.
Factory: TypeAlias = Callable[[SchedulerConfig, random.Random], PlacePolicy]

POLICIES: dict[str, Factory] = {
    "round-robin": lambda config, rng: RoundRobin(),
    "least-loaded": lambda config, rng: LeastLoaded(),
    "lmetric": lambda config, rng: LMetric(),
}
