"""Retention: what becomes of a task's KV once it has ended? One small file for each policy."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeAlias

from parrot_scheduler.config import SchedulerConfig
from parrot_scheduler.keep.none import KeepNone
from parrot_scheduler.policy import KeepPolicy

#: Makes a policy for one pool.
Factory: TypeAlias = Callable[[SchedulerConfig, random.Random], KeepPolicy]

POLICIES: dict[str, Factory] = {
    "none": lambda config, rng: KeepNone(),
}
