"""Predicted times on the engines that a task was not placed on: for explanations, never decisions.

Computed after the choice, before the engine's columns count the task.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

from parrot_scheduler.actions import Alternative
from parrot_scheduler.engines.pool import EnginePool
from parrot_scheduler.engines.table import rows_of
from parrot_scheduler.placement.cached import cached_on
from parrot_scheduler.placement.prediction import predict_row
from parrot_scheduler.policy import EngineChoice
from parrot_scheduler.task_state import Application, TaskState

#: Pools of up to this many engines are examined whole; engines listed beside the chosen one.
_FEW = 8
_TOLD = 3
_FINISH = attrgetter("finish_s")


def alternatives(
    state: TaskState, application: Application, pool: EnginePool, choice: EngineChoice
) -> tuple[Alternative, ...]:
    """Return the chosen engine, then up to `_TOLD` others, the earliest predicted end first.

    With more than a few engines, the others are those that the policy compared.
    """
    chosen = (choice.row, choice.expected_cached_tokens)
    others: Iterable[tuple[int, float]] = choice.compared
    if pool.accepting.bit_count() <= _FEW:
        others = (
            (row, cached_on(state, application, pool, row)) for row in rows_of(pool.accepting)
        )
    told = [_on(state, pool, row, cached) for row, cached in others if row != choice.row]
    told.sort(key=_FINISH)
    return (_on(state, pool, *chosen), *told[:_TOLD])


def _on(state: TaskState, pool: EnginePool, row: int, cached: float) -> Alternative:
    """Predict the task's times on one engine that caches `cached` prompt tokens."""
    scalars = pool.table.scalars
    prefill = scalars.pending_prefill[row] + state.task.prompt_tokens - cached
    return Alternative(
        pool.table.ids[row],
        int(cached),
        int(scalars.batch[row]),
        predict_row(state, prefill, scalars, row).finish_s,
        pool.has_room(state, row),
    )
