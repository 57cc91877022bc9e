"""Retention: what becomes of a task's KV once it has ended?"""

from __future__ import annotations

from parrot_scheduler.policy import RetentionFactory
from parrot_scheduler.retention.hazard import HazardRetention
from parrot_scheduler.retention.none import NoRetention

POLICIES: dict[str, RetentionFactory] = {
    "hazard": lambda config, rng: HazardRetention(config),
    "none": lambda config, rng: NoRetention(),
}
