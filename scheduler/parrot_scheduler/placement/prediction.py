"""Times of a task on engines, predicted from their step models; all in seconds."""

from __future__ import annotations

from typing import NamedTuple

from parrot_scheduler.engines.table import Column, EngineTable, TableScalars
from parrot_scheduler.task_state import TaskState


class Prediction(NamedTuple):
    """On one row, if the task is placed there now."""

    #: Up to the first token: the prefill before it, the task's own, one step.
    ttft_s: float
    #: One decode step, with every task placed there decoding.
    step_s: float
    #: Up to its end.
    finish_s: float


class Predictions(NamedTuple):
    """`Prediction` of all rows; those without an engine get figures without meaning."""

    ttft_s: Column
    step_s: Column
    finish_s: Column


def predict_all(state: TaskState, prefill_tokens: Column, table: EngineTable) -> Predictions:
    """For every row, where `prefill_tokens` are computed before the task has its first token."""
    fixed_s = table.weights_s + table.overhead_s
    step_s = fixed_s + (table.working_set + float(state.working_set)) * table.context_token_s
    step_s += (table.batch + float(state.task.num_sequences)) * table.sequence_s
    ttft_s = prefill_tokens * table.prefill_token_s + step_s
    return Predictions(ttft_s, step_s, ttft_s + step_s * _further_steps(state))


def predict_row(
    state: TaskState, prefill_tokens: float, scalars: TableScalars, row: int
) -> Prediction:
    """For one row."""
    fixed_s = scalars.weights_s[row] + scalars.overhead_s[row]
    context = scalars.working_set[row] + state.working_set
    step_s = fixed_s + context * scalars.context_token_s[row]
    step_s += (scalars.batch[row] + state.task.num_sequences) * scalars.sequence_s[row]
    ttft_s = prefill_tokens * scalars.prefill_token_s[row] + step_s
    return Prediction(ttft_s, step_s, ttft_s + step_s * _further_steps(state))


def _further_steps(state: TaskState) -> float:
    """Decode steps after the first one."""
    return max(state.expected_output / max(state.task.num_sequences, 1) - 1.0, 0.0)
