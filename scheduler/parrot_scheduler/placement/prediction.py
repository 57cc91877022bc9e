"""Times of a task on engines, predicted from their step models; all in seconds."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

from parrot_scheduler.engines.table import Column, EngineTable, TableScalars
from parrot_scheduler.task_state import TaskState

#: Of one row, or of all: rows without an engine get figures without meaning.
Seconds = TypeVar("Seconds", float, Column)


class Prediction(NamedTuple, Generic[Seconds]):
    """If the task is placed there now."""

    #: Up to the first token: the prefill before it, the task's own, one step.
    ttft_s: Seconds
    #: One decode step, with every task placed there decoding.
    step_s: Seconds
    #: Up to its end.
    finish_s: Seconds


def predict_all(state: TaskState, prefill_tokens: Column, table: EngineTable) -> Prediction[Column]:
    """For every row, where `prefill_tokens` are computed before the task has its first token."""
    fixed_s = table.weights_s + table.overhead_s
    step_s = fixed_s + (table.working_set + float(state.working_set)) * table.context_token_s
    return _prediction(state, prefill_tokens * table.prefill_token_s, step_s)


def predict_row(
    state: TaskState, prefill_tokens: float, scalars: TableScalars, row: int
) -> Prediction[float]:
    """For one row."""
    fixed_s = scalars.weights_s[row] + scalars.overhead_s[row]
    context = scalars.working_set[row] + state.working_set
    step_s = fixed_s + context * scalars.context_token_s[row]
    return _prediction(state, prefill_tokens * scalars.prefill_token_s[row], step_s)


def _prediction(state: TaskState, fill_s: Seconds, step_s: Seconds) -> Prediction[Seconds]:
    ttft_s = fill_s + step_s
    steps = max(state.expected_output / max(state.task.num_sequences, 1) - 1.0, 0.0)
    return Prediction(ttft_s, step_s, ttft_s + step_s * steps)
