"""Predictions of applications' total work and of task times, learned from ended ones."""

from __future__ import annotations

from collections import OrderedDict

from parrot_scheduler.task_state import Application, TaskState

#: Ended applications of a kind needed before a prediction.
_ENOUGH = 3
#: Weight of the newest application in the running means of work.
_GAIN = 0.2
#: Weight of the newest task in the running mean of seconds per output token.
_SPEED_GAIN = 0.05
#: Assumed seconds per output token before tasks have ended.
_FIRST_TOKEN_S = 0.02


class DemandPredictor:
    """Running means of applications' total work, by tenant and template of the first task.

    Work is in KV-token-steps, `p x d + d^2 / 2` for a task with p prompt and d output tokens: the
    task's use of engine memory over time (Justitia, arXiv 2510.17015).
    """

    def __init__(self, max_templates: int) -> None:
        self._max = max_templates
        # Mean work, and the number of applications seen.
        self._kinds: OrderedDict[tuple[str, str], tuple[float, int]] = OrderedDict()
        self._token_s = _FIRST_TOKEN_S

    def ended(self, application: Application, work: float) -> None:
        key = _kind(application)
        if key is None or work <= 0:
            return
        mean, count = self._kinds.pop(key, (work, 0))
        mean += max(_GAIN, 1 / (count + 1)) * (work - mean)
        self._kinds[key] = (mean, count + 1)
        if len(self._kinds) > self._max:
            self._kinds.popitem(last=False)

    def work(self, application: Application) -> float | None:
        """Return the expected total work; None if too few of its kind have ended."""
        key = _kind(application)
        known = self._kinds.get(key) if key is not None else None
        return known[0] if known is not None and known[1] >= _ENOUGH else None

    def observe(self, state: TaskState, now: float) -> None:
        """Update the mean seconds per output token after a task's end."""
        output = state.generated_tokens / max(1, state.task.num_sequences)
        took = now - state.placed_at
        if output >= 1 and took > 0:
            self._token_s += _SPEED_GAIN * (took / output - self._token_s)

    def path_s(self, state: TaskState) -> float:
        """Return the seconds of the longest chain from this task on, itself included.

        Its successors are assumed to take as long as it does.
        """
        sequences = state.task.num_sequences
        output = state.expected_output / sequences if sequences > 1 else state.expected_output
        return (1 + state.successors) * (output if output > 1 else 1.0) * self._token_s


def work_of(state: TaskState, output: float) -> float:
    """Return the KV-token-steps of a task that generates `output` tokens over all its sequences."""
    sequences = max(1, state.task.num_sequences)
    each = output / sequences
    return sequences * (state.task.prompt_tokens * each + each * each / 2)


def _kind(application: Application) -> tuple[str, str] | None:
    if not application.templates:
        return None
    return (application.tenant, application.templates[0])
