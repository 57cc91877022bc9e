"""Each engine in turn."""

from __future__ import annotations

import numpy as np

from parrot_scheduler.application import Application
from parrot_scheduler.engines.pool import EnginePool
from parrot_scheduler.placement.common import choice, eligible_rows
from parrot_scheduler.policy import EngineChoice, PlacementPolicy
from parrot_scheduler.task_state import TaskState


class RoundRobin(PlacementPolicy):
    """The next engine that takes work, whatever it holds or does."""

    name = "round-robin"

    def __init__(self) -> None:
        self._last = -1

    def place(
        self, state: TaskState, application: Application, pool: EnginePool, now: float
    ) -> EngineChoice | None:
        """The next one after the last placement; None without engines."""
        mask = eligible_rows(state, pool)
        rows = np.flatnonzero(mask)
        if not len(rows):
            return None
        after = int(np.searchsorted(rows, self._last, side="right"))
        row = int(rows[after % len(rows)])
        return choice(state, application, pool, row, "turn", candidates=mask, cost=0.0)

    def placed(self, state: TaskState, choice: EngineChoice, pool: EnginePool, now: float) -> None:
        """The turn goes on from there."""
        self._last = choice.row
