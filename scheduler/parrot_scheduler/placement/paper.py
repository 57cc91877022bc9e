"""Parrot's algorithm 1 as published (OSDI 2024, sections 5.2 to 5.4), for comparison."""

from __future__ import annotations

import numpy as np

from parrot_scheduler.config import SchedulerConfig
from parrot_scheduler.engines.pool import Pool
from parrot_scheduler.placement.common import Mask, cached_tokens, candidates
from parrot_scheduler.placement.group_placements import GroupHomes, group_size
from parrot_scheduler.policy import Application, Choice
from parrot_scheduler.task_state import Entry

#: Tokens that an engine may hold while a latency task runs there: 40 ms a token for a 13B model
#: on an A100 (figure 10 of the paper).
LATENCY_TOKENS = 6144


class Paper:
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
        self._homes = GroupHomes()

    def place(
        self, entry: Entry, application: Application, pool: Pool, now: float
    ) -> Choice | None:
        """The first of group, holders and all that has room; None where it has to wait."""
        table, task = pool.table, entry.task
        size = group_size(entry) if self._group_tasks else 1
        # What counts of a group is its last member: it is batched as large as it gets.
        is_latency = entry.objective.is_latency and size == 1
        cached = cached_tokens(entry, application, pool)
        now_capacity = np.where(
            table.latency_batch > 0,
            np.minimum(table.capacity, self._latency_tokens),
            table.capacity,
        )
        capacity = np.minimum(table.capacity, self._latency_tokens) if is_latency else now_capacity
        need = task.prompt_tokens + entry.expected_output - cached
        idle = table.batch == 0
        fits = (table.batch + task.num_sequences <= table.max_batch) & (
            table.working_set + need <= capacity
        )
        fits = candidates(entry, pool) & (fits | idle)

        decided_by = "load"
        homes = self._homes.rows(entry, pool) if size > 1 else []
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
        tied = harm == harm.min()
        row = int(np.argmin(np.where(tied, table.working_set, np.inf)))
        return Choice(
            row=row,
            decided_by=decided_by,
            expected_cached_tokens=int(cached[row]),
            candidates=int(np.count_nonzero(some)),
            cost=float(harm[row]),
            details={"capacity": float(capacity[row])},
        )

    def placed(self, entry: Entry, choice: Choice, pool: Pool, now: float) -> None:
        """The group's home is there."""
        if self._group_tasks and group_size(entry) > 1:
            self._homes.add(entry, choice.row, pool)

    def ended(self, entry: Entry, pool: Pool, now: float) -> None:
        """Homes stay: more members may come."""


def _only(mask: Mask, rows: list[int]) -> Mask:
    some = np.zeros_like(mask)
    some[rows] = mask[rows]
    return some
