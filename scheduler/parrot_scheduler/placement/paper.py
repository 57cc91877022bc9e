"""Parrot's algorithm 1 as published (OSDI 2024, sections 5.2 to 5.4), for comparison."""

from __future__ import annotations

import numpy as np

from parrot_scheduler.config import SchedulerConfig
from parrot_scheduler.engines.pool import EnginePool
from parrot_scheduler.placement.common import (
    GroupPlacements,
    Mask,
    argmin,
    cached_tokens,
    eligible_rows,
    group_size,
)
from parrot_scheduler.policy import EngineChoice, PlacementPolicy
from parrot_scheduler.task_state import Application, TaskState

#: Tokens that an engine may hold while a latency task runs there: 40 ms a token for a 13B model
#: on an A100 (figure 10 of the paper).
LATENCY_TOKENS = 6144


class Paper(PlacementPolicy):
    """A group on one engine; else where the prompt's beginning is; else anywhere.

    Engines have a capacity in tokens, which a latency task cuts down to `latency_tokens` for as
    long as it runs there. Among engines that can take a task, the one is taken where the least
    capacity is lost for others, ties to the emptiest. Tasks wait while no engine has room: that of
    their group, and for a group's first member one that could take all of it.

    Kept as published: a holder of the prefix wins whatever else it has to do, a group never
    splits, and a member of a group counts as a throughput task.
    """

    name = "paper"
    late_binding = True

    def __init__(self, config: SchedulerConfig, latency_tokens: int = LATENCY_TOKENS) -> None:
        self._group_tasks = config.group_tasks
        self._latency_tokens = latency_tokens
        self._group_placements = GroupPlacements()

    def place(
        self, state: TaskState, application: Application, pool: EnginePool, now: float
    ) -> EngineChoice | None:
        table, task = pool.table, state.task
        size = group_size(state) if self._group_tasks else 1
        # What counts of a group is its last member: it is batched as large as it gets.
        is_latency = state.objective.is_latency and size == 1
        cached = cached_tokens(state, application, pool)
        now_capacity = np.where(
            table.latency_batch > 0,
            np.minimum(table.capacity, self._latency_tokens),
            table.capacity,
        )
        capacity = np.minimum(table.capacity, self._latency_tokens) if is_latency else now_capacity
        need = task.prompt_tokens + state.expected_output - cached
        idle = table.batch == 0
        fits = (table.batch + task.num_sequences <= table.max_batch) & (
            table.working_set + need <= capacity
        )
        fits = eligible_rows(state, pool) & (fits | idle)

        decided_by = "load"
        homes = self._group_placements.rows(state, pool) if size > 1 else []
        homes = [row for row in homes if table.accepts[row]]
        if homes:
            some, decided_by = _only(fits, homes[:1]), "group"
        elif size > 1:
            room = (table.batch + size * task.num_sequences <= table.max_batch) & (
                table.working_set + cached + size * need <= capacity
            )
            some, decided_by = fits & (room | idle), "group"
        else:
            holders = fits & (cached > 0)
            some = holders if holders.any() else fits
            decided_by = "prefix" if holders.any() else "load"
        if not some.any():
            return None
        lost = now_capacity - capacity
        harm = np.where(some, lost, np.inf)
        row = argmin(harm, table.working_set)
        return EngineChoice(
            row=row,
            decided_by=decided_by,
            expected_cached_tokens=int(cached[row]),
            candidates=int(np.count_nonzero(some)),
            cost=float(harm[row]),
            details={"capacity": float(capacity[row])},
        )

    def placed(self, state: TaskState, choice: EngineChoice, pool: EnginePool, now: float) -> None:
        if self._group_tasks and group_size(state) > 1:
            self._group_placements.add(state, choice.row, pool)


def _only(mask: Mask, rows: list[int]) -> Mask:
    some = np.zeros_like(mask)
    some[rows] = mask[rows]
    return some
