"""Few candidate engines, scored one by one in plain floats."""

from __future__ import annotations

import math

from parrot_scheduler.engines.pool import EnginePool
from parrot_scheduler.placement.candidates import (
    HOLDER_SHARE,
    CheapestRows,
    EngineCandidates,
    Limit,
)
from parrot_scheduler.prefix_index.holders import PrefixHolders, depth_of
from parrot_scheduler.task_state import TaskState


class ScalarCandidates(EngineCandidates):
    """Candidates among `rows`: all engines that take work and may have room.

    `self.rows` are those left, in order; empty where none has room. All engines of the pool must
    have blocks of one size.
    """

    def __init__(self, state: TaskState, pool: EnginePool, target: float, rows: list[int]) -> None:
        super().__init__(state, pool, target)
        self._new: dict[int, float] = {}
        self._prefix_holders: PrefixHolders = []
        # Rows with a good part of the best hit, bit r for row r.
        self._holders = 0
        prefix = state.task.prefix
        claimed = pool.prefixes.claimed_holders(prefix)
        self.rows = self._with_room(rows, claimed)
        if not self.rows:
            return
        self._prefix_holders = pool.prefixes.holders(prefix, claimed)
        accepting = pool.accepting
        for bits, depth in reversed(self._prefix_holders):
            if bits & accepting:
                self.best_cached = self._tokens(depth)
                break
        least = self.best_cached * HOLDER_SHARE
        for bits, depth in self._prefix_holders:
            if depth * pool.common_block >= least:
                self._holders = bits & accepting
                break

    def _tokens(self, depth: int) -> float:
        """Prompt tokens that so many cached blocks save; at least one stays to be computed."""
        return float(max(min(depth * self.pool.common_block, self.state.task.prompt_tokens - 1), 0))

    def _with_room(self, rows: list[int], claimed: PrefixHolders) -> list[int]:
        """Rows with room for its working set; blocks that tasks there need already cost nothing."""
        task, pool, scalars = self.state.task, self.pool, self.pool.table.scalars
        need = float(task.prompt_tokens + self.state.expected_output)
        tight: list[int] = []
        roomy: list[int] = []
        for row in rows:
            if scalars.batch[row] + task.num_sequences > scalars.max_batch[row]:
                continue
            used = scalars.working_set[row] + need
            limit = scalars.capacity[row] * self.target
            if claimed:
                used -= depth_of(claimed, row) * pool.common_block
            if used <= limit:
                tight.append(row)
                if used + scalars.retained[row] <= limit:
                    roomy.append(row)
        if tight:
            # KV retained for paused applications yields to running work, but only where it must.
            return roomy or tight
        idle = [row for row in rows if scalars.batch[row] == 0]
        if pool.largest_accepting >= need:
            return [row for row in idle if scalars.capacity[row] >= need]
        return idle

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    def has(self, row: int) -> bool:
        return row in self.rows

    def cached_tokens(self, row: int) -> float:
        return self._tokens(depth_of(self._prefix_holders, row))

    def new_tokens(self, row: int) -> float:
        new = self._new.get(row)
        if new is None:
            new = self._new[row] = super().new_tokens(row)
        return new

    def filter_by_step_limits(self) -> bool:
        scalars = self.pool.table.scalars
        added = float(self.state.task.prompt_tokens + self.state.expected_output)
        keeping: list[int] = []
        for row in self.rows:
            fixed_s = scalars.weights_s[row] + scalars.overhead_s[row]
            step_s = fixed_s + (scalars.working_set[row] + added) * scalars.context_token_s[row]
            if step_s <= scalars.step_limit_s[row] or fixed_s > scalars.step_limit_s[row]:
                keeping.append(row)
        self.rows = keeping or self.rows
        return bool(keeping)

    def filter_by_objective(self, limit: Limit) -> None:
        field, seconds = limit
        meeting = [row for row in self.rows if getattr(self.predict(row), field) <= seconds]
        self.rows = meeting or self.rows

    def filter_by_finish(self, slack: float) -> None:
        if len(self.rows) > 1:
            finish_s = [self.predict(row).finish_s for row in self.rows]
            latest_s = min(finish_s) * slack
            self.rows = [
                row for row, end_s in zip(self.rows, finish_s, strict=True) if end_s <= latest_s
            ]

    def is_holder(self, row: int) -> bool:
        return bool(self._holders >> row & 1)

    def cheapest(self) -> CheapestRows:
        holder = other = -1
        least_held = least = math.inf
        for row in self.rows:
            cost = self.cost(row)
            if self._holders >> row & 1:
                if cost < least_held:
                    holder, least_held = row, cost
            elif cost < least:
                other, least = row, cost
        return CheapestRows(holder, other)

    def holders_without_room(self) -> int:
        full = self._holders
        for row in self.rows:
            full &= ~(1 << row)
        return full

    def best_for_group(self, members: int, default: int) -> int:
        if len(self.rows) == 1:
            return default
        state, scalars = self.state, self.pool.table.scalars
        fitting = {
            row: min(
                (scalars.max_batch[row] - scalars.batch[row]) // max(state.task.num_sequences, 1),
                (scalars.capacity[row] * self.target - scalars.working_set[row])
                // (self.new_tokens(row) + state.expected_output),
                members,
            )
            for row in self.rows
        }
        most = max(fitting.values())
        if fitting[default] == most:
            return default
        return min((row for row in self.rows if fitting[row] == most), key=self.cost)
