"""Placement as other gateways do it, for comparison: by turn, load, session or cached prefix.

None of these waits for room: a task goes to an engine's own queue at once.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import numpy as np

from parrot_scheduler.engines.pool import EnginePool
from parrot_scheduler.engines.table import Column
from parrot_scheduler.placement.common import (
    Mask,
    any_of,
    argmin,
    cached_on,
    cached_tokens,
    eligible_rows,
)
from parrot_scheduler.policy import EngineChoice, PlacementPolicy
from parrot_scheduler.task_state import Application, TaskState


class Request(NamedTuple):
    """A task to place, and the rows that could hold it: at least one."""

    state: TaskState
    application: Application
    pool: EnginePool
    mask: Mask

    def choice(self, row: int, decided_by: str, cost: float) -> EngineChoice:
        """A choice made without a look at caches, with what is cached there."""
        cached = cached_on(self.state, self.application, self.pool, row)
        return EngineChoice(row, decided_by, cached, int(np.count_nonzero(self.mask)), cost)

    def choice_by_cache(
        self, row: int, cached: Column, cost: Column, details: dict[str, Column]
    ) -> EngineChoice:
        """A choice by `cost`; `cached` and `details` are columns too."""
        return EngineChoice(
            row=row,
            decided_by="prefix" if cached[row] else "load",
            expected_cached_tokens=int(cached[row]),
            candidates=int(np.count_nonzero(self.mask)),
            cost=float(cost[row]),
            details={name: float(column[row]) for name, column in details.items()},
        )


class Baseline(PlacementPolicy):
    """Chooses among the engines that could hold the task, busy or not."""

    def place(
        self, state: TaskState, application: Application, pool: EnginePool, now: float
    ) -> EngineChoice | None:
        """None without engines."""
        mask = eligible_rows(state, pool)
        return self.choose(Request(state, application, pool, mask)) if any_of(mask) else None

    @abstractmethod
    def choose(self, request: Request) -> EngineChoice:
        """One of the eligible rows."""


class RoundRobin(Baseline):
    """The next engine that takes work, whatever it holds or does."""

    name = "round-robin"

    def __init__(self) -> None:
        self._last = -1

    def choose(self, request: Request) -> EngineChoice:
        rows = np.flatnonzero(request.mask)
        after = int(np.searchsorted(rows, self._last, side="right"))
        return request.choice(int(rows[after % len(rows)]), "turn", 0.0)

    def placed(self, state: TaskState, choice: EngineChoice, pool: EnginePool, now: float) -> None:
        self._last = choice.row


class LeastLoaded(Baseline):
    """Fewest sequences placed there, then fewest prompt tokens that wait to be prefilled."""

    name = "least-loaded"

    def choose(self, request: Request) -> EngineChoice:
        table = request.pool.table
        row = argmin(np.where(request.mask, table.batch, np.inf), table.pending_prefill)
        return request.choice(row, "load", float(table.batch[row]))


class SessionAffinity(LeastLoaded):
    """The engine of the application's last task, however loaded; else the least loaded one."""

    name = "session-affinity"

    def choose(self, request: Request) -> EngineChoice:
        row = request.pool.row_of(request.application.last_engine)
        if row < 0 or not request.mask[row]:
            return super().choose(request)
        return request.choice(row, "session", float(request.pool.table.batch[row]))


class PrefixLinear(Baseline):
    """`argmin weight x (tokens to prefill, queued ones included) + tokens that decodes will read`.

    Ties go to the first row. Dynamo counts both in blocks of one size, which makes no difference.
    A weight of 1 is its default.
    """

    name = "prefix-linear"

    def __init__(self, weight: float = 1.0) -> None:
        self._weight = weight

    def choose(self, request: Request) -> EngineChoice:
        state, application, pool, mask = request
        table, prompt = pool.table, state.task.prompt_tokens
        cached = cached_tokens(state, application, pool)
        prefill = table.pending_prefill + prompt - cached
        cost = np.where(mask, self._weight * prefill + table.working_set + prompt, np.inf)
        details = {"prefill_tokens": prefill, "working_set": table.working_set}
        return request.choice_by_cache(int(cost.argmin()), cached, cost, details)


class LMetric(Baseline):
    """`argmin P_new x (B + 1)`: tokens to prefill, queued ones included, times sequences.

    Ties go to the fewest sequences. A product needs no weight between its two parts. Its known
    weakness is kept: where nearly all is cached and nothing queued, it nearly vanishes, however
    many sequences run there.
    """

    name = "lmetric"

    def choose(self, request: Request) -> EngineChoice:
        state, application, pool, mask = request
        table = pool.table
        cached = cached_tokens(state, application, pool)
        prefill = table.pending_prefill + state.task.prompt_tokens - cached
        cost = np.where(mask, prefill * (table.batch + 1), np.inf)
        details = {"prefill_tokens": prefill, "batch": table.batch}
        return request.choice_by_cache(argmin(cost, table.batch), cached, cost, details)
