"""What would become of a task on an engine, in seconds, by the engine's step model."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

from parrot_scheduler.entry import Entry
from parrot_scheduler.table import Column, EngineTable

#: One row, or all of them.
T = TypeVar("T", float, Column)


class Prediction(NamedTuple, Generic[T]):
    """Each assumes that the task is placed there now."""

    #: Computing what is not cached of its prompt.
    fill_s: T
    #: Up to its first token: what is queued there, its own prompt, one step.
    ttft_s: T
    #: One decode step, all that is placed there decoding.
    step_s: T
    #: Up to its end.
    finish_s: T
    #: `finish_s`, and what computing its prompt takes from others there.
    toll_s: T


def predict_row(entry: Entry, new_tokens: float, table: EngineTable, row: int) -> Prediction[float]:
    """For one row, where `new_tokens` of the prompt are not cached."""
    cells = table.cells
    return _predict(
        entry,
        new_tokens,
        cells.pending_prefill[row],
        cells.working_set[row],
        cells.weights_s[row] + cells.overhead_s[row],
        cells.context_token_s[row],
        cells.prefill_token_s[row],
    )


def predict_all(entry: Entry, new_tokens: Column, table: EngineTable) -> Prediction[Column]:
    """For every row; rows without an engine get figures without meaning."""
    return _predict(
        entry,
        new_tokens,
        table.pending_prefill,
        table.working_set,
        table.weights_s + table.overhead_s,
        table.context_token_s,
        table.prefill_token_s,
    )


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


def _predict(
    entry: Entry,
    new: T,
    pending: T,
    working_set: T,
    fixed_s: T,
    context_token_s: T,
    prefill_token_s: T,
) -> Prediction[T]:
    task = entry.task
    sequences = task.num_sequences
    steps = (entry.expected_output / sequences if sequences > 1 else entry.expected_output) - 1.0
    steps = steps if steps > 0.0 else 0.0
    context = working_set + float(task.prompt_tokens + entry.expected_output)
    fill_s = new * prefill_token_s
    step_s = context * context_token_s + fixed_s
    ttft_s = pending * prefill_token_s + fill_s + step_s
    finish_s = ttft_s + step_s * steps
    return Prediction(fill_s, ttft_s, step_s, finish_s, finish_s + fill_s)
