"""Fits an engine profile to an event log: how long steps take, from the progress of calls.

A gateway's log (`scheduler.record`) tells when each call was placed, when its prompt was filled and
when it had further tokens. A call that decodes takes part in every step of its engine, so the time
between two of its reports, divided by the tokens between them, is that of a step on average. What
was in these steps follows from the calls that ran there at the same time:

    step = constant + sequences x a + keys x b + (filled tokens - free tokens) x c

The sum of absolute relative errors is minimized, so that a machine that does other work now and
then moves the fit little. The time of messages between engine and gateway is in it, and it cannot
tell what several readers of one prefix save. Engines that draft tokens are not of this form.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from parrot_scheduler.actions import Place
from parrot_scheduler.event_log import DECISIONS, read_config, read_step
from parrot_scheduler.events import (
    EngineJoined,
    EngineLeft,
    TaskCancelled,
    TaskFinished,
    TaskProgress,
    TaskSubmitted,
)
from parrot_scheduler.task import EngineDescription, EngineId, StepModel, Task, TaskId

from parrot_bench.simulator.profiles import EngineProfile

Vector = npt.NDArray[np.float64]

#: Tokens between two reports of a call, so that its time is one of steps and not of messages.
_LEAST_STEPS = 8
#: Observations that a fit needs, and those that it takes, evenly spread over the log.
_ENOUGH, _MOST = 32, 4000
#: Calls of an engine that are looked at.
_MOST_CALLS = 50_000
#: Tokens that a step may fill while it reads the weights, to choose from; and how much less the
#: error must be for a larger number.
_FREE_TOKENS = (1, 16, 32, 64, 128, 256)
_BETTER = 0.98
_ROUNDS = 60


@dataclass(slots=True)
class _Call:
    """A placed call."""

    task: Task
    placed_at: float
    filled_at: float = 0.0
    #: Prompt tokens that were computed.
    computed: int = 0
    #: When it had how many tokens, from its first report on.
    times: list[float] = field(default_factory=list)
    generated: list[int] = field(default_factory=list)

    def note(self, now: float, cached: int, generated: int) -> None:
        if not self.times:
            self.filled_at = now
            self.computed = self.task.prompt_tokens - cached
        self.times.append(now)
        self.generated.append(generated)


class Residual(NamedTuple):
    """Steps of one kind, measured beside the fit."""

    what: str
    observations: int
    #: Milliseconds, the medians.
    measured_ms: float
    fitted_ms: float


@dataclass(frozen=True, slots=True)
class Fit:
    """A profile, and how well it fits."""

    profile: EngineProfile
    engines: int
    calls: int
    observations: int
    #: Of the relative errors of all observations.
    median_error: float
    p90_error: float
    residuals: list[Residual]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "residuals": [each._asdict() for each in self.residuals]}


def read_profile(text: str) -> EngineProfile:
    """The profile in `Fit.to_dict` as JSON.

    Raises:
        ValueError: there is none.
    """
    try:
        content = dict(json.loads(text)["profile"])
        steps = dict(content["step_model"])
        # Where profiles had it before `StepModel` did.
        if "sequence_s" in content:
            steps["sequence_s"] = content.pop("sequence_s")
        return EngineProfile(**{**content, "step_model": StepModel(**steps)})
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"no fitted profile: {error}") from None


def fit_log(lines: Iterable[str], name: str = "fitted", model: str = "") -> Fit:
    """Fit the engines of one model, which are taken to be alike.

    Args:
        lines: of an event log.
        name: of the profile.
        model: that the engines run; empty: that of the first one to join.

    Raises:
        ValueError: a line does not belong in an event log, or too little decodes in it.
    """
    engines, calls = _read(lines, model)
    if not engines:
        raise ValueError(f"no engine{f' of {model}' if model else ''} joins in the log")
    described = next(iter(engines.values()))
    parts = [_observe(calls.get(engine_id, []), described) for engine_id in engines]
    rows = np.concatenate([rows for rows, _ in parts])
    measured = np.concatenate([measured for _, measured in parts])
    if len(rows) < _ENOUGH:
        raise ValueError(
            f"the log has {len(rows)} stretches of {_LEAST_STEPS} or more tokens that a call got "
            f"in a row; a fit needs {_ENOUGH}: record more calls with longer answers"
        )
    chosen = np.linspace(0, len(rows) - 1, min(len(rows), _MOST)).astype(int)
    rows, measured = rows[chosen], measured[chosen]
    best: tuple[float, int, Vector, Vector] | None = None
    for number, free in enumerate(_FREE_TOKENS):
        terms = np.column_stack([np.ones(len(rows)), rows[:, :2], rows[:, 2 + number]])
        found = _least_absolute(terms / measured[:, None])
        errors = np.abs(terms @ found / measured - 1)
        # What is free takes its time from the constant.
        possible = free == _FREE_TOKENS[0] or found[3] * free <= found[0]
        if possible and (best is None or errors.mean() < _BETTER * best[0]):
            best = (float(errors.mean()), free, found, terms @ found)
    assert best is not None
    _, free, (constant_s, sequence_s, context_s, fill_s), fitted = best
    weights_s = min(free * fill_s, constant_s)
    errors = np.abs(fitted / measured - 1)
    profile = EngineProfile(
        name=name,
        step_model=StepModel(
            weights_s=float(weights_s),
            context_token_s=float(context_s),
            prefill_token_s=float(fill_s),
            overhead_s=float(constant_s - weights_s),
            sequence_s=float(sequence_s),
        ),
        capacity_tokens=described.capacity_tokens,
        max_batch=described.max_batch,
        max_batch_tokens=described.max_batch_tokens,
        block_tokens=described.block_tokens or 16,
        prefix_caching=described.block_tokens > 0,
        model=described.model,
        source=f"fitted to {len(rows)} observations of an event log",
    )
    return Fit(
        profile,
        engines=len(engines),
        calls=sum(map(len, calls.values())),
        observations=len(rows),
        median_error=float(np.median(errors)),
        p90_error=float(np.quantile(errors, 0.9)),
        residuals=_residuals(rows, measured, fitted),
    )


def _read(
    lines: Iterable[str], model: str
) -> tuple[dict[EngineId, EngineDescription], dict[EngineId, list[_Call]]]:
    """The engines of the model, and the calls that ended on each."""
    engines: dict[EngineId, EngineDescription] = {}
    ended: dict[EngineId, list[_Call]] = {}
    tasks: dict[TaskId, Task] = {}
    running: dict[TaskId, tuple[EngineId, _Call]] = {}
    now, has_config = 0.0, False
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            if not has_config:
                read_config(line)
                has_config = True
                continue
            if line.startswith(DECISIONS):
                for action in json.loads(line)["actions"]:
                    task = tasks.pop(action.get("task_id"), None)
                    if task is not None and action["kind"] == Place.__name__:
                        running[task.id] = (action["engine_id"], _Call(task, now))
                continue
            now, events = read_step(line)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"line {number}: {error}") from error
        for event in events:
            if isinstance(event, EngineJoined):
                model = model or event.engine.model
                if event.engine.model == model:
                    engines[event.engine.id] = event.engine
            elif isinstance(event, TaskSubmitted):
                tasks[event.task.id] = event.task
            elif isinstance(event, TaskProgress) and event.task_id in running:
                call = running[event.task_id][1]
                if event.filled_tokens >= call.task.prompt_tokens:
                    call.note(now, event.cached_tokens, event.generated_tokens)
            elif isinstance(event, TaskFinished) and event.task_id in running:
                engine_id, call = running.pop(event.task_id)
                if engine_id in engines and len(ended.setdefault(engine_id, [])) < _MOST_CALLS:
                    call.note(now, event.cached_tokens, event.generated_tokens)
                    ended[engine_id].append(call)
            elif isinstance(event, TaskCancelled):
                tasks.pop(event.task_id, None)
                running.pop(event.task_id, None)
            elif isinstance(event, EngineLeft):
                gone = [t for t, (engine_id, _) in running.items() if engine_id == event.engine_id]
                for task_id in gone:
                    del running[task_id]
    return engines, ended


def _observe(calls: list[_Call], engine: EngineDescription) -> tuple[Vector, Vector]:
    """Steps of one engine: sequences, keys and, for each number of free tokens, tokens filled
    beyond it, all of a step on average; and seconds of a step."""
    calls = sorted((call for call in calls if call.times), key=lambda call: call.filled_at)
    rows, measured = [], []
    if calls:
        begins = np.array([call.filled_at for call in calls])
        ends = np.array([call.times[-1] for call in calls])
        sequences = np.array([float(call.task.num_sequences) for call in calls])
        prompts = np.array([float(call.task.prompt_tokens) for call in calls])
        rates = np.array([call.generated[-1] for call in calls]) / np.maximum(ends - begins, 1e-9)
        # Prompts are filled one after the other, or some in one step.
        moments, which = np.unique(begins, return_inverse=True)
        before = np.concatenate([[0.0], moments[:-1]])[which]
        fill_begins = np.maximum(before, [call.placed_at for call in calls])
        fills = np.array([_beyond_free(call.computed, engine) for call in calls])
        for call in calls:
            for at in range(1, len(call.times)):
                since, until = call.times[at - 1], call.times[at]
                steps = (call.generated[at] - call.generated[at - 1]) / call.task.num_sequences
                if steps < _LEAST_STEPS or until <= since:
                    continue
                share = _overlap(begins, ends, since, until) / (until - since)
                middle = np.clip((since + until) / 2 - begins, 0.0, None)
                keys = prompts + np.minimum(rates * middle, rates * (ends - begins))
                filled = _overlap(fill_begins, begins, since, until) / np.maximum(
                    begins - fill_begins, 1e-9
                )
                rows.append(
                    [(share * sequences).sum(), (share * keys).sum(), *(filled @ fills / steps)]
                )
                measured.append((until - since) / steps)
    width = 2 + len(_FREE_TOKENS)
    return np.array(rows).reshape(len(rows), width), np.array(measured)


def _beyond_free(tokens: int, engine: EngineDescription) -> list[float]:
    """Tokens of a prompt beyond those free in each of its steps, by what is free."""
    steps = max(1, ceil(tokens / max(engine.max_batch_tokens, 1)))
    return [max(0.0, tokens - steps * free) for free in _FREE_TOKENS]


def _overlap(begins: Vector, ends: Vector, since: float, until: float) -> Vector:
    """Seconds that each span has within one."""
    seconds: Vector = np.maximum(np.minimum(ends, until) - np.maximum(begins, since), 0.0)
    return seconds


def _least_absolute(terms: Vector) -> Vector:
    """Factors, none negative, so that the sums of the rows are as near to 1 as can be."""
    weights = np.ones(len(terms))
    found: Vector = np.zeros(terms.shape[1])
    for _ in range(_ROUNDS):
        scaled = terms * weights[:, None]
        found = _non_negative(scaled.T @ scaled, scaled.T @ weights)
        weights = 1.0 / np.sqrt(np.maximum(np.abs(terms @ found - 1.0), 1e-3))
    return found


def _non_negative(squares: Vector, products: Vector) -> Vector:
    """The least squares by their normal equations: what would be negative is left out."""
    free = np.diag(squares) > 0
    while True:
        found: Vector = np.zeros(len(products))
        # Terms differ by six orders of magnitude.
        scale = np.sqrt(np.diag(squares)[free])
        normal = squares[np.ix_(free, free)] / np.outer(scale, scale)
        found[free] = np.linalg.lstsq(normal, products[free] / scale, rcond=None)[0] / scale
        if bool((found >= 0).all()):
            return found
        free &= found > np.minimum(found.min() / 2, 0)


def _residuals(rows: Vector, measured: Vector, fitted: Vector) -> list[Residual]:
    """Measured and fitted, by sequences and by whether prompts were filled."""
    found = []
    bounds: Sequence[float] = (0.0, 2.5, 4.5, 8.5, 16.5, 32.5, 64.5, np.inf)
    kinds = np.array([bisect_left(bounds, sequences) for sequences in rows[:, 0]])
    for kind in range(1, len(bounds)):
        low, high = bounds[kind - 1] + 0.5, bounds[kind] - 0.5
        size = f"{low:.0f} to {high:.0f}" if np.isfinite(high) else f"more than {low:.0f}"
        for fills in (False, True):
            chosen = (kinds == kind) & ((rows[:, 2] > 1) == fills)
            if chosen.any():
                found.append(
                    Residual(
                        f"{size} sequences{', prompts filled' if fills else ''}",
                        int(chosen.sum()),
                        1000 * float(np.median(measured[chosen])),
                        1000 * float(np.median(fitted[chosen])),
                    )
                )
    return found
