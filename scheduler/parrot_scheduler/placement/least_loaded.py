"""The engine with the fewest sequences."""

from __future__ import annotations

import numpy as np

from parrot_scheduler.application import Application
from parrot_scheduler.engines.pool import EnginePool
from parrot_scheduler.placement.common import Mask, any_of, choice, eligible_rows
from parrot_scheduler.policy import EngineChoice, PlacementPolicy
from parrot_scheduler.task_state import TaskState


def least_loaded_row(mask: Mask, pool: EnginePool) -> int:
    """Fewest sequences, then fewest prompt tokens to prefill, then the first; -1 without any."""
    if not any_of(mask):
        return -1
    batch = np.where(mask, pool.table.batch, np.inf)
    tied = batch == batch.min()
    return int(np.argmin(np.where(tied, pool.table.pending_prefill, np.inf)))


class LeastLoaded(PlacementPolicy):
    """Fewest sequences placed there, then fewest prompt tokens that wait to be prefilled."""

    name = "least-loaded"

    def place(
        self, state: TaskState, application: Application, pool: EnginePool, now: float
    ) -> EngineChoice | None:
        """The least loaded engine; None without engines."""
        mask = eligible_rows(state, pool)
        row = least_loaded_row(mask, pool)
        if row < 0:
            return None
        load = float(pool.table.batch[row])
        return choice(state, application, pool, row, "load", candidates=mask, cost=load)
