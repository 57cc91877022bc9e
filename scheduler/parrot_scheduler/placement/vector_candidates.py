"""Options on any number of engines, by columns."""

from __future__ import annotations

import numpy as np

from parrot_scheduler.engines.pool import Pool
from parrot_scheduler.engines.prefix_index import as_column, pack
from parrot_scheduler.engines.table import Column
from parrot_scheduler.placement.candidates import (
    BLOCK_TOKENS,
    HOLDER_SHARE,
    Classes,
    Limit,
    Options,
)
from parrot_scheduler.placement.common import Mask, any_of, cached_tokens, candidates
from parrot_scheduler.placement.prediction import further_steps, predict_all
from parrot_scheduler.policy import Application
from parrot_scheduler.task_state import Entry


class Many(Options):
    """All engines; `mask` are those that are left, and None where none has room."""

    def __init__(self, entry: Entry, application: Application, pool: Pool, target: float) -> None:
        super().__init__(entry, pool, target)
        room = self._with_room()
        self.has_room = room is not None
        if room is None:
            return
        self._mask = room
        self._cached = cached_tokens(entry, application, pool)
        self._new: Column = np.maximum(entry.task.prompt_tokens - self._cached, BLOCK_TOKENS)
        self.best_cached = float(self._cached.item(self._cached.argmax()))
        self._holders: Mask = self._cached >= self.best_cached * HOLDER_SHARE
        if self.best_cached == 0:
            self._holders = np.zeros_like(room)

    def _with_room(self) -> Mask | None:
        """Rows with room for its working set; blocks that tasks there need already are free."""
        pool, entry, table, task = self.pool, self.entry, self.pool.table, self.entry.task
        used = table.working_set + float(task.prompt_tokens + entry.expected_output)
        shared = as_column(pool.prefixes.claimed_reach(task.prefix), len(used))
        if shared is not None:
            used -= shared * table.block_tokens
        target = table.capacity * self.target
        free = table.accepts & (table.batch + task.num_sequences <= table.max_batch)
        # What paused applications left yields to running work, but only where it must.
        room: Mask = free & (used + table.kept <= target)
        if any_of(room):
            return room
        room = free & (used <= target)
        if any_of(room):
            return room
        room = candidates(entry, pool) & (table.batch == 0)
        return room if any_of(room) else None

    @property
    def num_rows(self) -> int:
        """Engines that are left."""
        return int(np.count_nonzero(self._mask))

    def may(self, row: int) -> bool:
        """Whether this one is left."""
        return bool(self._mask.item(row))

    def cached(self, row: int) -> float:
        """Prompt tokens that it holds or is about to hold."""
        return float(self._cached.item(row))

    def keep_promises(self) -> bool:
        """See `Options`. A promise that even an idle engine would break binds nobody."""
        table = self.pool.table
        fixed_s = table.weights_s + table.overhead_s
        added = float(self.entry.task.prompt_tokens + self.entry.expected_output)
        step_s = fixed_s + (table.working_set + added) * table.context_token_s
        keeping: Mask = self._mask & (
            (step_s <= table.step_limit_s) | (fixed_s > table.step_limit_s)
        )
        if not any_of(keeping):
            return False
        self._mask = keeping
        return True

    def keep_within(self, limit: Limit) -> None:
        """See `Options`."""
        field, seconds = limit
        predicted: Column = getattr(predict_all(self.entry, self._new, self.pool.table), field)
        meeting: Mask = self._mask & (predicted <= seconds)
        if any_of(meeting):
            self._mask = meeting

    def keep_soon(self, slack: float) -> None:
        """See `Options`."""
        predicted = predict_all(self.entry, self._new, self.pool.table)
        finish_s = np.where(self._mask, predicted.finish_s, np.inf)
        self._mask = self._mask & (finish_s <= finish_s.min() * slack)

    def is_holder(self, row: int) -> bool:
        """Whether it has a good part of the best hit."""
        return bool(self._holders.item(row))

    def cheapest(self) -> Classes:
        """By cost, ties to the first row."""
        cost = self._costs()
        np.putmask(cost, ~self._mask, np.inf)
        first = int(cost.argmin())
        is_holder = bool(self._holders.item(first))
        np.putmask(cost, self._holders if is_holder else ~self._holders, np.inf)
        second = int(cost.argmin())
        second = -1 if cost.item(second) == np.inf else second
        return Classes(first, second) if is_holder else Classes(second, first)

    def _costs(self) -> Column:
        """`cost` of every row."""
        table, entry = self.pool.table, self.entry
        if not self.yields:
            return (table.pending_prefill + self._new) * (table.batch + 1.0)
        predicted = predict_all(entry, self._new, table)
        steps = further_steps(entry)
        slower_s = steps * entry.working_set * table.context_token_s
        return predicted.finish_s + table.latency_batch * (predicted.fill_s + slower_s)

    def full_holders(self) -> int:
        """See `Options`."""
        return pack(self._holders & ~self._mask) & self.pool.accepting

    def roomiest(self, members: int, rather: int) -> int:
        """See `Options`."""
        table, entry = self.pool.table, self.entry
        fitting = np.minimum(
            (table.max_batch - table.batch) // max(entry.task.num_sequences, 1),
            (table.capacity * self.target - table.working_set)
            // (self._new + entry.expected_output),
        )
        fitting = np.where(self._mask, np.minimum(fitting, members), -np.inf)
        most = fitting.max()
        if fitting[rather] == most:
            return rather
        cost = self._costs()
        return int(np.where(fitting == most, cost, np.inf).argmin())
