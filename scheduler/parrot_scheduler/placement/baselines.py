"""Placement as other gateways do it, for comparison: by turn, load, session or cached prefix.

None of these waits for room: a task goes to an engine's own queue at once.
"""

from __future__ import annotations

import numpy as np

from parrot_scheduler.application import Application
from parrot_scheduler.engines.pool import EnginePool
from parrot_scheduler.placement.common import (
    Mask,
    any_of,
    cached_tokens,
    choice,
    eligible_rows,
)
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


class SessionAffinity(PlacementPolicy):
    """The engine of the application's last task, however loaded; else the least loaded one."""

    name = "session-affinity"

    def place(
        self, state: TaskState, application: Application, pool: EnginePool, now: float
    ) -> EngineChoice | None:
        """Its last engine while that takes work; None without engines."""
        mask = eligible_rows(state, pool)
        row, decided_by = pool.row_of(application.last_engine), "session"
        if row < 0 or not mask[row]:
            row, decided_by = least_loaded_row(mask, pool), "load"
        if row < 0:
            return None
        load = float(pool.table.batch[row])
        return choice(state, application, pool, row, decided_by, candidates=mask, cost=load)

    def placed(self, state: TaskState, choice: EngineChoice, pool: EnginePool, now: float) -> None:
        """The application itself remembers its engine."""


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
