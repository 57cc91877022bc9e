"""What there is to choose from for one task, looked at row by row or by columns.

Mostly only a few engines have room, and plain floats are far faster for these than numpy; where
many have, columns are. Both say the same of every row, and `Parrot` asks either.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, NamedTuple

from parrot_scheduler.engines.pool import FEW_ROWS, Pool
from parrot_scheduler.engines.prefix_index import rows_of, unpack
from parrot_scheduler.placement.prediction import Prediction, further_steps, predict_row
from parrot_scheduler.task_state import Entry

#: The least that counts as one block.
BLOCK_TOKENS = 16.0
#: An engine with this share of the best hit counts as a holder.
HOLDER_SHARE = 0.5


class Limit(NamedTuple):
    """Seconds that a prediction must not exceed to meet a task's own objective."""

    field: Literal["finish_s", "ttft_s", "step_s"]
    seconds: float


class Classes(NamedTuple):
    """The cheapest engine with a good part of the best hit, and the cheapest of all others.

    -1: there is none.
    """

    holder: int
    other: int


class Options(ABC):
    """Engines with room for a task, narrowed down step by step."""

    def __init__(self, entry: Entry, pool: Pool, target: float) -> None:
        self.entry = entry
        self.pool = pool
        #: Share of its capacity that an engine is filled up to.
        self.target = target
        #: Whether it should keep out of the way of tasks that somebody waits for.
        self.yields = pool.latency_sequences > 0 and not entry.objective.is_latency
        #: Most prompt tokens that any engine which takes work holds, with room or without.
        self.best_cached = 0.0
        # What was predicted once is asked for again.
        self._predicted: dict[int, Prediction] = {}

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """Engines that are left."""

    @abstractmethod
    def may(self, row: int) -> bool:
        """Whether this one is left."""

    @abstractmethod
    def cached(self, row: int) -> float:
        """Prompt tokens that it holds or is about to hold."""

    @abstractmethod
    def keep_promises(self) -> bool:
        """Only those where no step gets longer than was promised to others; False: none is."""

    @abstractmethod
    def keep_within(self, limit: Limit) -> None:
        """Only those that keep a limit, if any does."""

    @abstractmethod
    def keep_soon(self, slack: float) -> None:
        """Only those where it ends within `slack` times, 1 at least, of what it takes where it ends
        soonest.
        """

    @abstractmethod
    def is_holder(self, row: int) -> bool:
        """Whether it has a good part of the best hit."""

    @abstractmethod
    def cheapest(self) -> Classes:
        """By cost, ties to the first row. Not asked before the last narrowing."""

    @abstractmethod
    def full_holders(self) -> int:
        """The holders that take work and are not left, bit r for row r."""

    def busiest_full_holder(self) -> int:
        """Of the holders that are not left the one with most sequences, ties to the first row; -1:
        there is none.
        """
        full, table = self.full_holders(), self.pool.table
        if full.bit_count() <= FEW_ROWS:
            return max(rows_of(full), key=table.cells.batch.__getitem__, default=-1)
        sequences = (table.batch + 1.0) * unpack(full, len(table.batch))
        return int(sequences.argmax())

    @abstractmethod
    def roomiest(self, members: int, rather: int) -> int:
        """The cheapest of those with room for most of so many such tasks; `rather` if it is one."""

    def new(self, row: int) -> float:
        """Prompt tokens that would have to be computed there, one block at least."""
        new = self.entry.task.prompt_tokens - self.cached(row)
        return new if new > BLOCK_TOKENS else BLOCK_TOKENS

    def cost(self, row: int) -> float:
        """What the task costs all on this row: smaller is better, only to be compared.

        Tokens to compute, queued ones included, times sequences (LMetric). For a task that nobody
        waits for, where others run that somebody waits for: seconds, see `yielding_cost_s`.
        """
        if self.yields:
            return self.yielding_cost_s(row)
        cells = self.pool.table.cells
        return (cells.pending_prefill[row] + self.new(row)) * (cells.batch[row] + 1.0)

    def yielding_cost_s(self, row: int) -> float:
        """Its own time, and what it takes from each sequence there that somebody waits for.

        The product counts what is queued there once for each sequence, and so spreads prefill
        evenly: every engine is busy with it, and no chat can avoid it. In fact a task takes from
        others what it computes itself, wherever in the queue that is, and the queue delays only
        the task. So tasks of this kind go where few would have to wait for them; those that
        somebody waits for avoid these engines by the product; and both keep apart as far as load
        allows.
        """
        cells, entry = self.pool.table.cells, self.entry
        predicted = self.predict(row)
        steps = further_steps(entry)
        slower_s = steps * entry.working_set * cells.context_token_s[row]
        return predicted.finish_s + cells.latency_batch[row] * (predicted.fill_s + slower_s)

    def predict(self, row: int) -> Prediction:
        """What would become of the task there."""
        predicted = self._predicted.get(row)
        if predicted is None:
            predicted = predict_row(self.entry, self.new(row), self.pool.table, row)
            self._predicted[row] = predicted
        return predicted
