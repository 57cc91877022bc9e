"""Placement as others do it, for comparison: by turn, load, session, prefix, or Parrot's paper.

Each is named by its import path, as in `parrot_bench.policies:LMetric`. Benchmarks take the names
in `PRESETS` too. The paper's alone waits for room: with all others a task goes to an
engine's own queue at once.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections import OrderedDict
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from parrot_scheduler import policies
from parrot_scheduler.config import SchedulerConfig
from parrot_scheduler.engines.pool import EnginePool
from parrot_scheduler.engines.table import Column, rows_of
from parrot_scheduler.placement.cached import cached_on
from parrot_scheduler.policy import EngineChoice, PlacementPolicy
from parrot_scheduler.prefix_index.index import chain_of
from parrot_scheduler.task import EngineId
from parrot_scheduler.task_state import Application, TaskState

#: The rest of a set-up that knows nothing of applications.
_PLAIN: dict[str, Any] = {
    "admission": "open",
    "order": "fcfs",
    "keep": "none",
    "predict_lengths": False,
}

Mask = npt.NDArray[np.bool_]


def any_of(mask: Mask) -> bool:
    """Return true if any row is set; faster than `mask.any()` for the usual number of engines."""
    return bool(mask.item(mask.argmax())) if len(mask) else False


def argmin(cost: Column, ties: Column) -> int:
    """The row of the smallest cost, ties to the smallest of `ties`, then to the first row."""
    return int(np.where(cost == cost.min(), ties, np.inf).argmin())


def eligible_rows(state: TaskState, pool: EnginePool) -> Mask:
    """Engines that take work and could hold the task if they were empty.

    Where none could, all that take work: policies refuse no tasks.
    """
    table = pool.table
    large_enough = table.accepts & (
        table.capacity >= state.task.prompt_tokens + state.expected_output
    )
    return large_enough if any_of(large_enough) else table.accepts


def cached_tokens(state: TaskState, application: Application, pool: EnginePool) -> Column:
    """Prompt tokens that each engine caches or is about to cache; 0 for those that take no work."""
    task, prefixes = state.task, pool.prefixes
    tokens = np.zeros(len(pool.table.accepts))
    holders = prefixes.rows_with(task.prefix) | prefixes.rows_with(chain_of(task, 0))
    for row in rows_of(holders & pool.accepting):
        tokens[row] = cached_on(state, application, pool, row)
    return tokens


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

    setup = _PLAIN

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


#: Tokens that an engine may hold while a latency task runs there: 40 ms a token for a 13B model
#: on an A100 (figure 10 of the paper).
LATENCY_TOKENS = 6144


class Paper(PlacementPolicy):
    """Parrot's algorithm 1 as published (OSDI 2024, sections 5.2 to 5.4).

    A group on one engine; else where the prompt's beginning is; else anywhere.

    Engines have a capacity in tokens, which a latency task cuts down to `latency_tokens` for as
    long as it runs there. Among engines that can take a task, the one is taken where the least
    capacity is lost for others, ties to the emptiest. Tasks wait while no engine has room: that of
    their group, and for a group's first member one that could take all of it.

    Kept as published: a holder of the prefix wins whatever else it has to do, a group never
    splits, and a member of a group counts as a throughput task.
    """

    name = "paper"
    late_binding = True
    setup = _PLAIN | {"order": "application-fifo", "group_tasks": True}

    @classmethod
    def make(cls, config: SchedulerConfig, rng: random.Random) -> Self:
        """Return a new one for one model."""
        return cls(config)

    def __init__(self, config: SchedulerConfig, latency_tokens: int = LATENCY_TOKENS) -> None:
        self._group_tasks = config.group_tasks
        self._latency_tokens = latency_tokens
        self._group_placements = GroupPlacements()

    def place(
        self, state: TaskState, application: Application, pool: EnginePool, now: float
    ) -> EngineChoice | None:
        table, task = pool.table, state.task
        size = group_size(state) if self._group_tasks else 1
        # A group counts by its last member: it is batched as large as it gets.
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


class GroupPlacements:
    """Engines where members of each task group were placed, in order; bounded, oldest out first.

    A task in several groups counts with all of them, so that groups that overlap come together as
    far as there is room.
    """

    def __init__(self, max_groups: int = 10_000) -> None:
        self._max_groups = max_groups
        self._engines: OrderedDict[str, list[EngineId]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._engines)

    def rows(self, state: TaskState, pool: EnginePool) -> list[int]:
        """Rows of the engines of a task's groups that are still here, each once."""
        rows: dict[int, None] = {}
        for group in state.groups:
            for engine_id in self._engines.get(group.id, ()):
                row = pool.row_of(engine_id)
                if row >= 0:
                    rows[row] = None
        return list(rows)

    def add(self, state: TaskState, row: int, pool: EnginePool) -> None:
        engine_id = pool.table.ids[row]
        for group in state.groups:
            engines = self._engines.setdefault(group.id, [])
            self._engines.move_to_end(group.id)
            if engine_id not in engines:
                engines.append(engine_id)
        while len(self._engines) > self._max_groups:
            self._engines.popitem(last=False)


def group_size(state: TaskState) -> int:
    """Members of the largest group that the task is in; 1 without one."""
    if not state.groups:
        return 1
    return max(group.size for group in state.groups)


#: Import paths by the names that benchmarks take.
PATHS = {
    each.name: f"{__name__}:{each.__name__}"
    for each in (Paper, RoundRobin, LeastLoaded, SessionAffinity, PrefixLinear, LMetric)
}
#: Whole set-ups by name.
PRESETS = {name: policies.preset_of(PATHS.get(name, name)) for name in (policies.DEFAULT, *PATHS)}


def preset_of(name: str) -> SchedulerConfig:
    """Return a whole set-up by name or import path.

    Raises:
        ValueError: there is no such policy.
    """
    if name in PRESETS:
        return PRESETS[name]
    if ":" not in name:
        raise ValueError(f"there are {', '.join(PRESETS)}, or package.module:Class")
    return policies.preset_of(name)
