"""Prefix affinity times load, as published: LMetric, arXiv 2603.15202."""

from __future__ import annotations

import numpy as np

from parrot_scheduler.engines.pool import Pool
from parrot_scheduler.placement.common import any_of, cached_tokens, candidates
from parrot_scheduler.policy import Application, Choice
from parrot_scheduler.task_state import Entry


class LMetric:
    """`argmin P_new x (B + 1)`: tokens to prefill, queued ones included, times sequences.

    A product needs no weight between its two parts. Its known weakness is kept: where nearly all
    is cached and nothing queued, it nearly vanishes, however many sequences run there.
    """

    name = "lmetric"
    late_binding = False

    def place(
        self, entry: Entry, application: Application, pool: Pool, now: float
    ) -> Choice | None:
        """The engine with the smallest product, ties to the fewest sequences."""
        mask = candidates(entry, pool)
        if not any_of(mask):
            return None
        table = pool.table
        cached = cached_tokens(entry, application, pool)
        prefill = table.pending_prefill + entry.task.prompt_tokens - cached
        cost = np.where(mask, prefill * (table.batch + 1), np.inf)
        tied = cost == cost.min()
        row = int(np.argmin(np.where(tied, table.batch, np.inf)))
        return Choice(
            row=row,
            decided_by="prefix" if cached[row] else "load",
            expected_cached_tokens=int(cached[row]),
            candidates=int(np.count_nonzero(mask)),
            cost=float(cost[row]),
            details={"prefill_tokens": float(prefill[row]), "batch": float(table.batch[row])},
        )

    def placed(self, entry: Entry, choice: Choice, pool: Pool, now: float) -> None:
        """Nothing is remembered of a placement."""

    def ended(self, entry: Entry, pool: Pool, now: float) -> None:
        """Nothing is remembered of a task."""
