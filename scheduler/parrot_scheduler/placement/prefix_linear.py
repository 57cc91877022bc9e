"""Prefix affinity plus load, weighted: the linear cost of Dynamo and llm-d."""

from __future__ import annotations

import numpy as np

from parrot_scheduler.engines.pool import Pool
from parrot_scheduler.placement.common import any_of, cached_tokens, candidates
from parrot_scheduler.policy import Application, Choice
from parrot_scheduler.task_state import Entry


class PrefixLinear:
    """`argmin weight x (tokens to prefill, queued ones included) + tokens that decodes will read`.

    Dynamo counts both in blocks of one size, which makes no difference. A weight of 1 is its
    default.
    """

    name = "prefix-linear"
    late_binding = False

    def __init__(self, weight: float = 1.0) -> None:
        self._weight = weight

    def place(
        self, entry: Entry, application: Application, pool: Pool, now: float
    ) -> Choice | None:
        """The engine with the smallest sum, ties to the first; None without engines."""
        mask = candidates(entry, pool)
        if not any_of(mask):
            return None
        table, prompt = pool.table, entry.task.prompt_tokens
        cached = cached_tokens(entry, application, pool)
        prefill = table.pending_prefill + prompt - cached
        cost = np.where(mask, self._weight * prefill + table.working_set + prompt, np.inf)
        row = int(np.argmin(cost))
        return Choice(
            row=row,
            decided_by="prefix" if cached[row] else "load",
            expected_cached_tokens=int(cached[row]),
            candidates=int(np.count_nonzero(mask)),
            cost=float(cost[row]),
            details={
                "prefill_tokens": float(prefill[row]),
                "working_set": float(table.working_set[row]),
            },
        )

    def placed(self, entry: Entry, choice: Choice, pool: Pool, now: float) -> None:
        """Nothing is remembered of a placement."""

    def ended(self, entry: Entry, pool: Pool, now: float) -> None:
        """Nothing is remembered of a task."""
