"""No retention: an engine's own cache policy decides."""

from __future__ import annotations

from collections.abc import Sequence

from parrot_scheduler.actions import Retention
from parrot_scheduler.engines.pool import Pool
from parrot_scheduler.policy import Application
from parrot_scheduler.task_state import Entry


class KeepNone:
    """Every context is treated as any other, and nothing is let go early."""

    name = "none"

    def retention(
        self, entry: Entry, application: Application, pool: Pool, now: float
    ) -> Retention:
        """Always `normal`."""
        return "normal"

    def expired(
        self, applications: Sequence[Application], pool: Pool, now: float
    ) -> list[Application]:
        """Never any."""
        return []
