"""Options on a handful of engines, one by one in plain floats."""

from __future__ import annotations

import math

from parrot_scheduler.engines.pool import Pool
from parrot_scheduler.engines.prefix_claims import Reach
from parrot_scheduler.engines.prefix_index import depth_of
from parrot_scheduler.placement.candidates import HOLDER_SHARE, Classes, Limit, Options
from parrot_scheduler.task_state import Entry


class Few(Options):
    """For pools whose engines all have blocks of one size; `rows` take work.

    `rows` are all engines that may have room. What is left of them, in order, is `self.rows`: empty
    where none has any.
    """

    def __init__(self, entry: Entry, pool: Pool, target: float, rows: list[int]) -> None:
        super().__init__(entry, pool, target)
        # What was asked for once is asked for again.
        self._new: dict[int, float] = {}
        self._reach: Reach = []
        self._holders = 0
        prefix = entry.task.prefix
        claimed = pool.prefixes.claimed_reach(prefix)
        self.rows = self._with_room(rows, claimed)
        if not self.rows:
            return
        self._reach = pool.prefixes.reach(prefix, claimed)
        accepting = pool.accepting
        for bits, depth in reversed(self._reach):
            if bits & accepting:
                self.best_cached = self._tokens(depth)
                break
        least = self.best_cached * HOLDER_SHARE
        for bits, depth in self._reach:
            if depth * pool.common_block >= least:
                self._holders = bits & accepting
                break

    def _tokens(self, depth: int) -> float:
        """What so many cached blocks spare; at least one token stays to be computed."""
        return float(max(min(depth * self.pool.common_block, self.entry.task.prompt_tokens - 1), 0))

    def _with_room(self, rows: list[int], claimed: Reach) -> list[int]:
        """Those with room for its working set; blocks that tasks there need already are free."""
        task, pool, cells = self.entry.task, self.pool, self.pool.table.cells
        need = float(task.prompt_tokens + self.entry.expected_output)
        tight: list[int] = []
        roomy: list[int] = []
        for row in rows:
            if cells.batch[row] + task.num_sequences > cells.max_batch[row]:
                continue
            used = cells.working_set[row] + need
            limit = cells.capacity[row] * self.target
            if claimed:
                used -= depth_of(claimed, row) * pool.common_block
            if used <= limit:
                tight.append(row)
                if used + cells.kept[row] <= limit:
                    roomy.append(row)
        if tight:
            # What paused applications left yields to running work, but only where it must.
            return roomy or tight
        idle = [row for row in rows if cells.batch[row] == 0]
        if pool.largest_accepting >= need:
            return [row for row in idle if cells.capacity[row] >= need]
        return idle

    @property
    def num_rows(self) -> int:
        """Engines that are left."""
        return len(self.rows)

    def may(self, row: int) -> bool:
        """Whether this one is left."""
        return row in self.rows

    def cached(self, row: int) -> float:
        """Prompt tokens that it holds or is about to hold."""
        return self._tokens(depth_of(self._reach, row))

    def new(self, row: int) -> float:
        """Prompt tokens that would have to be computed there, one block at least."""
        new = self._new.get(row)
        if new is None:
            new = self._new[row] = super().new(row)
        return new

    def keep_promises(self) -> bool:
        """See `Options`. A promise that even an idle engine would break binds nobody."""
        cells = self.pool.table.cells
        added = float(self.entry.task.prompt_tokens + self.entry.expected_output)
        keeping: list[int] = []
        for row in self.rows:
            fixed_s = cells.weights_s[row] + cells.overhead_s[row]
            step_s = fixed_s + (cells.working_set[row] + added) * cells.context_token_s[row]
            if step_s <= cells.step_limit_s[row] or fixed_s > cells.step_limit_s[row]:
                keeping.append(row)
        self.rows = keeping or self.rows
        return bool(keeping)

    def keep_within(self, limit: Limit) -> None:
        """See `Options`."""
        field, seconds = limit
        meeting = [row for row in self.rows if getattr(self.predict(row), field) <= seconds]
        self.rows = meeting or self.rows

    def keep_soon(self, slack: float) -> None:
        """See `Options`."""
        if len(self.rows) > 1:
            finish_s = [self.predict(row).finish_s for row in self.rows]
            latest_s = min(finish_s) * slack
            self.rows = [
                row for row, end_s in zip(self.rows, finish_s, strict=True) if end_s <= latest_s
            ]

    def is_holder(self, row: int) -> bool:
        """Whether it has a good part of the best hit."""
        return bool(self._holders >> row & 1)

    def cheapest(self) -> Classes:
        """By cost, ties to the first row."""
        holder = other = -1
        least_held = least = math.inf
        for row in self.rows:
            cost = self.cost(row)
            if self._holders >> row & 1:
                if cost < least_held:
                    holder, least_held = row, cost
            elif cost < least:
                other, least = row, cost
        return Classes(holder, other)

    def full_holders(self) -> int:
        """See `Options`."""
        full = self._holders
        for row in self.rows:
            full &= ~(1 << row)
        return full

    def roomiest(self, members: int, rather: int) -> int:
        """See `Options`."""
        if len(self.rows) == 1:
            return rather
        entry, cells = self.entry, self.pool.table.cells
        fitting = {
            row: min(
                (cells.max_batch[row] - cells.batch[row]) // max(entry.task.num_sequences, 1),
                (cells.capacity[row] * self.target - cells.working_set[row])
                // (self.new(row) + entry.expected_output),
                members,
            )
            for row in self.rows
        }
        most = max(fitting.values())
        if fitting[rather] == most:
            return rather
        return min((row for row in self.rows if fitting[row] == most), key=self.cost)
