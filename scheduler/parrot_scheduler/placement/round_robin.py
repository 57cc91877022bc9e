"""Each engine in turn."""

from __future__ import annotations

import numpy as np

from parrot_scheduler.engines.pool import Pool
from parrot_scheduler.placement.common import candidates, choice
from parrot_scheduler.policy import Application, Choice
from parrot_scheduler.task_state import Entry


class RoundRobin:
    """The next engine that takes work, whatever it holds or does."""

    name = "round-robin"
    late_binding = False

    def __init__(self) -> None:
        self._last = -1

    def place(
        self, entry: Entry, application: Application, pool: Pool, now: float
    ) -> Choice | None:
        """The next one after the last placement; None without engines."""
        mask = candidates(entry, pool)
        rows = np.flatnonzero(mask)
        if not len(rows):
            return None
        after = int(np.searchsorted(rows, self._last, side="right"))
        row = int(rows[after % len(rows)])
        return choice(entry, application, pool, row, "turn", candidates=mask, cost=0.0)

    def placed(self, entry: Entry, choice: Choice, pool: Pool, now: float) -> None:
        """The turn goes on from there."""
        self._last = choice.row

    def ended(self, entry: Entry, pool: Pool, now: float) -> None:
        """Nothing is remembered of a task."""
