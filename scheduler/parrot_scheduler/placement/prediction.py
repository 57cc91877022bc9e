"""What would become of a task on an engine, in seconds, by the engine's step model."""

from __future__ import annotations

from typing import NamedTuple

from parrot_scheduler.engines.table import Column, EngineTable
from parrot_scheduler.task_state import Entry


class Prediction(NamedTuple):
    """For one engine; each assumes that the task is placed there now."""

    #: Computing what is not cached of its prompt.
    fill_s: float
    #: Up to its first token: what is queued there, its own prompt, one step.
    ttft_s: float
    #: One decode step, all that is placed there decoding.
    step_s: float
    #: Up to its end.
    finish_s: float
    #: `finish_s`, and what computing its prompt takes from others there.
    toll_s: float


class Predictions(NamedTuple):
    """The same for every row."""

    fill_s: Column
    ttft_s: Column
    step_s: Column
    finish_s: Column
    toll_s: Column


def predict_row(entry: Entry, new_tokens: float, table: EngineTable, row: int) -> Prediction:
    """For one row, where `new_tokens` of the prompt are not cached."""
    cells = table.cells
    prefill_token_s = cells.prefill_token_s[row]
    context = cells.working_set[row] + entry.working_set
    fill_s = new_tokens * prefill_token_s
    step_s = context * cells.context_token_s[row] + (cells.weights_s[row] + cells.overhead_s[row])
    ttft_s = cells.pending_prefill[row] * prefill_token_s + fill_s + step_s
    finish_s = ttft_s + step_s * further_steps(entry)
    return Prediction(fill_s, ttft_s, step_s, finish_s, finish_s + fill_s)


def predict_all(entry: Entry, new_tokens: Column, table: EngineTable) -> Predictions:
    """For every row; rows without an engine get figures without meaning."""
    context = table.working_set + float(entry.working_set)
    fill_s = new_tokens * table.prefill_token_s
    step_s = context * table.context_token_s + (table.weights_s + table.overhead_s)
    ttft_s = table.pending_prefill * table.prefill_token_s + fill_s + step_s
    finish_s = ttft_s + step_s * further_steps(entry)
    return Predictions(fill_s, ttft_s, step_s, finish_s, finish_s + fill_s)


def further_steps(entry: Entry) -> float:
    """Decode steps after the first one."""
    return max(entry.expected_output / max(entry.task.num_sequences, 1) - 1.0, 0.0)


def toll_terms(table: EngineTable, row: int) -> tuple[float, float, float, float]:
    """What `toll_s` of any task on a row consists of: seconds before it begins, for each token
    that is not cached, of a step without it, and of a step for each of its tokens.
    """
    cells = table.cells
    prefill_token_s, context_token_s = cells.prefill_token_s[row], cells.context_token_s[row]
    return (
        cells.pending_prefill[row] * prefill_token_s,
        2.0 * prefill_token_s,
        cells.working_set[row] * context_token_s + cells.weights_s[row] + cells.overhead_s[row],
        context_token_s,
    )
