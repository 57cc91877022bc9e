"""Times of a task on an engine, predicted from the engine's step model; all in seconds."""

from __future__ import annotations

from typing import NamedTuple

from parrot_scheduler.engines.table import Column, EngineTable
from parrot_scheduler.task_state import TaskState


class Prediction(NamedTuple):
    """On one engine, if the task is placed there now."""

    #: Computing the prompt tokens that are not cached.
    fill_s: float
    #: Up to the first token: the prefill queued there, the task's own, one step.
    ttft_s: float
    #: One decode step, with every task placed there decoding.
    step_s: float
    #: Up to its end.
    finish_s: float
    #: `finish_s` plus `fill_s`: computing its prompt also delays the others there by so much.
    total_cost_s: float


class Predictions(NamedTuple):
    """`Prediction` for every row."""

    fill_s: Column
    ttft_s: Column
    step_s: Column
    finish_s: Column
    total_cost_s: Column


def predict_row(state: TaskState, new_tokens: float, table: EngineTable, row: int) -> Prediction:
    """For one engine, where `new_tokens` of the prompt are not cached."""
    scalars = table.scalars
    prefill_token_s = scalars.prefill_token_s[row]
    context = scalars.working_set[row] + state.working_set
    fill_s = new_tokens * prefill_token_s
    step_s = context * scalars.context_token_s[row] + (
        scalars.weights_s[row] + scalars.overhead_s[row]
    )
    ttft_s = scalars.pending_prefill[row] * prefill_token_s + fill_s + step_s
    finish_s = ttft_s + step_s * further_steps(state)
    return Prediction(fill_s, ttft_s, step_s, finish_s, finish_s + fill_s)


def predict_all(state: TaskState, new_tokens: Column, table: EngineTable) -> Predictions:
    """For every row; rows without an engine get figures without meaning."""
    context = table.working_set + float(state.working_set)
    fill_s = new_tokens * table.prefill_token_s
    step_s = context * table.context_token_s + (table.weights_s + table.overhead_s)
    ttft_s = table.pending_prefill * table.prefill_token_s + fill_s + step_s
    finish_s = ttft_s + step_s * further_steps(state)
    return Predictions(fill_s, ttft_s, step_s, finish_s, finish_s + fill_s)


def further_steps(state: TaskState) -> float:
    """Decode steps after the first one."""
    return max(state.expected_output / max(state.task.num_sequences, 1) - 1.0, 0.0)


def total_cost_terms(table: EngineTable, row: int) -> tuple[float, float, float, float]:
    """The terms of `total_cost_s` for any task on a row, in seconds.

    Before it begins; for each token that is not cached; of a step without the task; of a step for
    each of the task's tokens.
    """
    scalars = table.scalars
    prefill_token_s, context_token_s = scalars.prefill_token_s[row], scalars.context_token_s[row]
    return (
        scalars.pending_prefill[row] * prefill_token_s,
        2.0 * prefill_token_s,
        scalars.working_set[row] * context_token_s
        + scalars.weights_s[row]
        + scalars.overhead_s[row],
        context_token_s,
    )
