"""Any number of candidate engines, scored by numpy columns."""

from __future__ import annotations

import numpy as np

from parrot_scheduler.engines.pool import EnginePool
from parrot_scheduler.engines.table import Column
from parrot_scheduler.placement.candidates import (
    BLOCK_TOKENS,
    HOLDER_SHARE,
    CheapestRows,
    EngineCandidates,
    Limit,
)
from parrot_scheduler.placement.common import Mask, any_of, cached_tokens, eligible_rows
from parrot_scheduler.placement.prediction import further_steps, predict_all
from parrot_scheduler.prefix_index.holders import as_column, pack
from parrot_scheduler.task_state import Application, TaskState


class VectorCandidates(EngineCandidates):
    """Candidates among all engines; `has_room` False: there are none."""

    def __init__(
        self, state: TaskState, application: Application, pool: EnginePool, target: float
    ) -> None:
        super().__init__(state, pool, target)
        room = self._with_room()
        self.has_room = room is not None
        if room is None:
            return
        self._mask = room
        self._cached = cached_tokens(state, application, pool)
        self._new: Column = np.maximum(state.task.prompt_tokens - self._cached, BLOCK_TOKENS)
        self.best_cached = float(self._cached.item(self._cached.argmax()))
        self._holders: Mask = self._cached >= self.best_cached * HOLDER_SHARE
        if self.best_cached == 0:
            self._holders = np.zeros_like(room)

    def _with_room(self) -> Mask | None:
        """Rows with room for its working set; blocks that tasks there need already cost nothing."""
        pool, state, table, task = self.pool, self.state, self.pool.table, self.state.task
        used = table.working_set + float(task.prompt_tokens + state.expected_output)
        shared = as_column(pool.prefixes.claimed_holders(task.prefix), len(used))
        if shared is not None:
            used -= shared * table.block_tokens
        target = table.capacity * self.target
        free = table.accepts & (table.batch + task.num_sequences <= table.max_batch)
        # KV retained for paused applications yields to running work, but only where it must.
        room: Mask = free & (used + table.retained <= target)
        if any_of(room):
            return room
        room = free & (used <= target)
        if any_of(room):
            return room
        room = eligible_rows(state, pool) & (table.batch == 0)
        return room if any_of(room) else None

    @property
    def num_rows(self) -> int:
        return int(np.count_nonzero(self._mask))

    def has(self, row: int) -> bool:
        return bool(self._mask.item(row))

    def cached_tokens(self, row: int) -> float:
        return float(self._cached.item(row))

    def filter_by_step_limits(self) -> bool:
        table = self.pool.table
        fixed_s = table.weights_s + table.overhead_s
        added = float(self.state.task.prompt_tokens + self.state.expected_output)
        step_s = fixed_s + (table.working_set + added) * table.context_token_s
        keeping: Mask = self._mask & (
            (step_s <= table.step_limit_s) | (fixed_s > table.step_limit_s)
        )
        if not any_of(keeping):
            return False
        self._mask = keeping
        return True

    def filter_by_objective(self, limit: Limit) -> None:
        field, seconds = limit
        predicted: Column = getattr(predict_all(self.state, self._new, self.pool.table), field)
        meeting: Mask = self._mask & (predicted <= seconds)
        if any_of(meeting):
            self._mask = meeting

    def filter_by_finish(self, slack: float) -> None:
        predicted = predict_all(self.state, self._new, self.pool.table)
        finish_s = np.where(self._mask, predicted.finish_s, np.inf)
        self._mask = self._mask & (finish_s <= finish_s.min() * slack)

    def is_holder(self, row: int) -> bool:
        return bool(self._holders.item(row))

    def cheapest(self) -> CheapestRows:
        cost = self._costs()
        np.putmask(cost, ~self._mask, np.inf)
        first = int(cost.argmin())
        is_holder = bool(self._holders.item(first))
        np.putmask(cost, self._holders if is_holder else ~self._holders, np.inf)
        second = int(cost.argmin())
        second = -1 if cost.item(second) == np.inf else second
        return CheapestRows(first, second) if is_holder else CheapestRows(second, first)

    def _costs(self) -> Column:
        """`cost` of every row."""
        table, state = self.pool.table, self.state
        if not self.yields:
            return (table.pending_prefill + self._new) * (table.batch + 1.0)
        predicted = predict_all(state, self._new, table)
        steps = further_steps(state)
        slower_s = steps * state.working_set * table.context_token_s
        return predicted.finish_s + table.latency_batch * (predicted.fill_s + slower_s)

    def holders_without_room(self) -> int:
        return pack(self._holders & ~self._mask) & self.pool.accepting

    def best_for_group(self, members: int, default: int) -> int:
        table, state = self.pool.table, self.state
        fitting = np.minimum(
            (table.max_batch - table.batch) // max(state.task.num_sequences, 1),
            (table.capacity * self.target - table.working_set)
            // (self._new + state.expected_output),
        )
        fitting = np.where(self._mask, np.minimum(fitting, members), -np.inf)
        most = fitting.max()
        if fitting[default] == most:
            return default
        cost = self._costs()
        return int(np.where(fitting == most, cost, np.inf).argmin())
