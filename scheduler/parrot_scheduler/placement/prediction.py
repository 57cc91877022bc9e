"""Predicted times of a task on engines, from their step models; all in seconds."""

from __future__ import annotations

from typing import NamedTuple

from parrot_scheduler.engines.table import TableScalars
from parrot_scheduler.task_state import TaskState


class Prediction(NamedTuple):
    """Predicted times on one row, if the task is placed there now."""

    #: Time to the first token: queued prefill, the task's own, and one step.
    ttft_s: float
    #: One decode step with every task on the engine decoding.
    step_s: float
    #: Time to the task's end.
    finish_s: float


def predict_row(
    state: TaskState, prefill_tokens: float, scalars: TableScalars, row: int
) -> Prediction:
    """Predict the task's times on one row."""
    task, output = state.task, state.expected_output
    fixed_s = scalars.weights_s[row] + scalars.overhead_s[row]
    context = scalars.working_set[row] + (task.prompt_tokens + output)
    step_s = fixed_s + context * scalars.context_token_s[row]
    step_s += (scalars.batch[row] + task.num_sequences) * scalars.sequence_s[row]
    ttft_s = prefill_tokens * scalars.prefill_token_s[row] + step_s
    # Decode steps after the first.
    further = output / max(task.num_sequences, 1) - 1.0
    return Prediction(ttft_s, step_s, ttft_s + step_s * further if further > 0.0 else ttft_s)
