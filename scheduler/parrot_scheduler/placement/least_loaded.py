"""The engine with the fewest sequences."""

from __future__ import annotations

import numpy as np

from parrot_scheduler.engines.pool import Pool
from parrot_scheduler.placement.common import Mask, any_of, candidates, choice
from parrot_scheduler.policy import Application, Choice
from parrot_scheduler.task_state import Entry


def least_loaded_row(mask: Mask, pool: Pool) -> int:
    """Fewest sequences, then fewest prompt tokens to prefill, then the first; -1 without any."""
    if not any_of(mask):
        return -1
    batch = np.where(mask, pool.table.batch, np.inf)
    tied = batch == batch.min()
    return int(np.argmin(np.where(tied, pool.table.pending_prefill, np.inf)))


class LeastLoaded:
    """Fewest sequences placed there, then fewest prompt tokens that wait to be prefilled."""

    name = "least-loaded"
    late_binding = False

    def place(
        self, entry: Entry, application: Application, pool: Pool, now: float
    ) -> Choice | None:
        """The least loaded engine; None without engines."""
        mask = candidates(entry, pool)
        row = least_loaded_row(mask, pool)
        if row < 0:
            return None
        load = float(pool.table.batch[row])
        return choice(entry, application, pool, row, "load", candidates=mask, cost=load)

    def placed(self, entry: Entry, choice: Choice, pool: Pool, now: float) -> None:
        """Nothing is remembered of a placement."""

    def ended(self, entry: Entry, pool: Pool, now: float) -> None:
        """Nothing is remembered of a task."""
