"""Retention: what becomes of a task's KV once it has ended? One small file for each policy."""

from __future__ import annotations

from parrot_scheduler.policy import KeepFactory
from parrot_scheduler.retention.hazard import KeepHazard
from parrot_scheduler.retention.none import KeepNone

POLICIES: dict[str, KeepFactory] = {
    "hazard": lambda config, rng: KeepHazard(config),
    "none": lambda config, rng: KeepNone(),
}
