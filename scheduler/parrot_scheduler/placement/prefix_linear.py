"""Prefix affinity plus load, weighted: the linear cost of Dynamo and llm-d."""

from __future__ import annotations

import numpy as np

from parrot_scheduler.application import Application
from parrot_scheduler.engines.pool import EnginePool
from parrot_scheduler.placement.common import any_of, cached_tokens, eligible_rows
from parrot_scheduler.policy import EngineChoice, PlacementPolicy
from parrot_scheduler.task_state import TaskState


class PrefixLinear(PlacementPolicy):
    """`argmin weight x (tokens to prefill, queued ones included) + tokens that decodes will read`.

    Dynamo counts both in blocks of one size, which makes no difference. A weight of 1 is its
    default.
    """

    name = "prefix-linear"

    def __init__(self, weight: float = 1.0) -> None:
        self._weight = weight

    def place(
        self, state: TaskState, application: Application, pool: EnginePool, now: float
    ) -> EngineChoice | None:
        """The engine with the smallest sum, ties to the first; None without engines."""
        mask = eligible_rows(state, pool)
        if not any_of(mask):
            return None
        table, prompt = pool.table, state.task.prompt_tokens
        cached = cached_tokens(state, application, pool)
        prefill = table.pending_prefill + prompt - cached
        cost = np.where(mask, self._weight * prefill + table.working_set + prompt, np.inf)
        row = int(np.argmin(cost))
        return EngineChoice(
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
