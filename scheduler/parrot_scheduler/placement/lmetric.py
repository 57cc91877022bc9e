"""Prefix affinity times load, as published: LMetric, arXiv 2603.15202."""

from __future__ import annotations

import numpy as np

from parrot_scheduler.application import Application
from parrot_scheduler.engines.pool import EnginePool
from parrot_scheduler.placement.common import any_of, cached_tokens, eligible_rows
from parrot_scheduler.policy import EngineChoice, PlacementPolicy
from parrot_scheduler.task_state import TaskState


class LMetric(PlacementPolicy):
    """`argmin P_new x (B + 1)`: tokens to prefill, queued ones included, times sequences.

    A product needs no weight between its two parts. Its known weakness is kept: where nearly all is
    cached and nothing queued, it nearly vanishes, however many sequences run there.
    """

    name = "lmetric"

    def place(
        self, state: TaskState, application: Application, pool: EnginePool, now: float
    ) -> EngineChoice | None:
        """The engine with the smallest product, ties to the fewest sequences."""
        mask = eligible_rows(state, pool)
        if not any_of(mask):
            return None
        table = pool.table
        cached = cached_tokens(state, application, pool)
        prefill = table.pending_prefill + state.task.prompt_tokens - cached
        cost = np.where(mask, prefill * (table.batch + 1), np.inf)
        tied = cost == cost.min()
        row = int(np.argmin(np.where(tied, table.batch, np.inf)))
        return EngineChoice(
            row=row,
            decided_by="prefix" if cached[row] else "load",
            expected_cached_tokens=int(cached[row]),
            candidates=int(np.count_nonzero(mask)),
            cost=float(cost[row]),
            details={"prefill_tokens": float(prefill[row]), "batch": float(table.batch[row])},
        )
