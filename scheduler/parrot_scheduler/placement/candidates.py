"""The engines that `Parrot` chooses from for one task, and what the task would cost on each.

Two classes implement this: `ScalarCandidates` scores engines one by one in plain floats, which is
far faster where only a few engines have room, as mostly; `VectorCandidates` scores all engines by
numpy columns. Both give the same figures for every row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, NamedTuple

from parrot_scheduler.engines.pool import FEW_ROWS, EnginePool
from parrot_scheduler.placement.prediction import Prediction, further_steps, predict_row
from parrot_scheduler.prefix_index.holders import rows_of, unpack
from parrot_scheduler.task_state import TaskState

#: Prompt tokens to compute count as at least so many: one block.
BLOCK_TOKENS = 16.0
#: An engine counts as a holder of the prompt's prefix with this share of the best hit.
HOLDER_SHARE = 0.5


class Limit(NamedTuple):
    """A bound in seconds on one field of `Prediction`, from a task's own objective."""

    field: Literal["finish_s", "ttft_s", "step_s"]
    seconds: float


class CheapestRows(NamedTuple):
    """Rows of the cheapest holder and of the cheapest other engine; -1: there is none."""

    holder: int
    other: int


class EngineCandidates(ABC):
    """Engines with room for a task, narrowed down by filters.

    Args:
        state: the task.
        pool: the engines.
        target: share of its tokens of KV that an engine is filled up to.
    """

    def __init__(self, state: TaskState, pool: EnginePool, target: float) -> None:
        self.state = state
        self.pool = pool
        self.target = target
        #: Whether it should keep out of the way of latency tasks that are placed.
        self.yields = pool.latency_sequences > 0 and not state.objective.is_latency
        #: Most prompt tokens cached on any engine that takes work, with room or without.
        self.best_cached = 0.0
        # Each is needed several times.
        self._predicted: dict[int, Prediction] = {}

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """Engines that are left."""

    @abstractmethod
    def has(self, row: int) -> bool:
        """Whether this engine is left."""

    @abstractmethod
    def cached_tokens(self, row: int) -> float:
        """Prompt tokens that an engine caches or is about to cache."""

    @abstractmethod
    def filter_by_step_limits(self) -> bool:
        """Keep engines where decode steps stay within the times promised to tasks there.

        False, and no change: there is none. A limit that even an idle engine would break is void.
        """

    @abstractmethod
    def filter_by_objective(self, limit: Limit) -> None:
        """Keep engines that meet the task's own objective, if any does."""

    @abstractmethod
    def filter_by_finish(self, slack: float) -> None:
        """Keep engines where the task takes at most `slack` (>= 1) times the shortest time."""

    @abstractmethod
    def is_holder(self, row: int) -> bool:
        """Whether an engine caches at least `HOLDER_SHARE` of the best hit."""

    @abstractmethod
    def cheapest(self) -> CheapestRows:
        """By cost, ties to the first row. To be called after the last filter."""

    @abstractmethod
    def holders_without_room(self) -> int:
        """Holders that take work and are not left, bit r for row r."""

    def busiest_holder_without_room(self) -> int:
        """The one of these with most sequences, ties to the first row; -1: there is none."""
        full, table = self.holders_without_room(), self.pool.table
        if full.bit_count() <= FEW_ROWS:
            return max(rows_of(full), key=table.scalars.batch.__getitem__, default=-1)
        sequences = (table.batch + 1.0) * unpack(full, len(table.batch))
        return int(sequences.argmax())

    @abstractmethod
    def best_for_group(self, members: int, default: int) -> int:
        """The cheapest engine with room for most of so many such tasks; `default` among equals."""

    def new_tokens(self, row: int) -> float:
        """Prompt tokens that would have to be computed there, at least one block."""
        new = self.state.task.prompt_tokens - self.cached_tokens(row)
        return new if new > BLOCK_TOKENS else BLOCK_TOKENS

    def cost(self, row: int) -> float:
        """What the task costs all tasks on this row: smaller is better; only to be compared.

        Tokens to compute, queued ones included, times sequences (LMetric). For a task that yields:
        seconds, see `yielding_cost_s`.
        """
        if self.yields:
            return self.yielding_cost_s(row)
        scalars = self.pool.table.scalars
        return (scalars.pending_prefill[row] + self.new_tokens(row)) * (scalars.batch[row] + 1.0)

    def yielding_cost_s(self, row: int) -> float:
        """Seconds of the task itself, and what it takes from each latency sequence on that row.

        LMetric's product counts prefill queued there once for each sequence, and so spreads prefill
        evenly: every engine is busy with it, and no chat can avoid it. In fact a task takes from
        others only what it computes itself, wherever in the queue that is, and the queue delays
        only the task. So throughput tasks go where few latency tasks run, latency tasks avoid those
        engines by the product, and both kinds stay apart as far as load allows.
        """
        scalars, state = self.pool.table.scalars, self.state
        predicted = self.predict(row)
        steps = further_steps(state)
        slower_s = steps * state.working_set * scalars.context_token_s[row]
        return predicted.finish_s + scalars.latency_batch[row] * (predicted.fill_s + slower_s)

    def predict(self, row: int) -> Prediction:
        """The task's times if it is placed there now."""
        predicted = self._predicted.get(row)
        if predicted is None:
            predicted = predict_row(self.state, self.new_tokens(row), self.pool.table, row)
            self._predicted[row] = predicted
        return predicted
