"""The default placement: each task goes where it costs itself and the tasks beside it least.

    argmin  (queued + new + decode work) x (sequences + 1)        ties: the fewest sequences
`candidates` computes the product.

`new` is the number of prompt tokens that the engine neither caches nor is about to cache. `queued`
is the number of prompt tokens waiting there; tokens of the task's own prefix are left out, because
it would otherwise compute them itself. `decode work` is the cost that the task's own tokens and one
sequence beside them cause each other, in prompt tokens: `expected output x 2 x sequence_s /
prefill_token_s`. It uses the learned `StepModel`s of all engines together, since single engines
differ by chance. If a sequence costs almost nothing, as on a GPU, this is LMetric (arXiv
2603.15202); if it costs much, as on a CPU, sequences spread as with least-loaded placement. Each
rule below is listed with its gain in `simulate policies` and on recorded programs
(docs/scheduling.md):

1. A task waits in the scheduler only while all engines are full: of sequences, or because placed
   tasks need all of an engine's KV. The order then decides who goes next, and fairness holds. If
   any engine has room, the task goes where it costs least, even to an engine without free KV,
   and waits in that engine's own queue. Requiring room abandoned cached prefixes (chats 0.79,
   map-reduce 0.56 times as fast on small engines beyond their load).
2. The task's own prefix is not counted as queued, so agents that start together behind one long
   prompt are placed together while it is computed. Multi-agent programs became 1.08 times (CPU)
   and 1.17 times (H200) as fast.
3. Decode work: on CPU engines GPTs became 1.1 to 1.4 times and agents 1.04 to 1.18 times as
   fast; on an H200 nothing changes.
4. Objectives with a time: a throughput task avoids engines where its decode step would exceed
   the time promised to other tasks, for at most `starvation_s`. A task with a bound of its own
   goes to engines that should meet it, if any does.
5. Affinity: the engine that caches most of the task's private prefix (more than
   `Task.common_tokens`, which any application shares) may cost three times as much as the
   cheapest. If the common part is unknown, it is the engine where the application ran last,
   provided that it caches a third of the prompt and more than the cheapest does. The product
   sees only the moment: a call that leaves its cache recomputes it and occupies memory twice.
   Agents became 1.02 to 1.07 times as fast, and many-agent programs that call over a network 1.19
   times. Where sequences cost more than prompts, the slack is smaller, `1 + 2 / decode work` of a
   token: 1.5 on a CPU, where a factor of three made agents 0.95 and multi-agent programs 0.84
   times as fast. A fan-out shares less than a third; with a lower limit it would follow its
   first call, and map-reduce jobs of one document ran 0.96 times as fast.
6. Engines whose steps take more than four times as long as those of the fastest get a task only
   if no other engine has room, and one every 30 s, by which their step times stay known.
7. `Task.prefers`: the engine that already has part of the task may cost a quarter more.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Literal, NamedTuple, Self

from parrot_scheduler.config import SchedulerConfig
from parrot_scheduler.engines.pool import EnginePool
from parrot_scheduler.placement.candidates import Candidate, candidates
from parrot_scheduler.placement.prediction import predict_row
from parrot_scheduler.policy import EngineChoice, PlacementPolicy
from parrot_scheduler.task_state import Application, TaskState

#: The engine that a task prefers may cost this many times as much as the best one.
_PREFERRED_SLACK = 1.25
#: The engine with the task's private prefix may cost this many times as much on top of the best
#: one, if a generated token costs a sequence beside it no more than a prompt token.
_HOME_SLACK = 2.0
#: A placement is called `replicate` if the engine caches less than this share of the best one.
_REPLICATE_SHARE = 0.5


#: Number of compared engines that a choice reports.
_COMPARED = 4
#: Share of the prompt. A shorter cached part is a common beginning, not the application's own
#: earlier work.
_LEAST_OWN_SHARE = 1 / 3
#: Values of `Candidate.breaks`: a promise to other tasks, which weighs more, and the task's own.
_BREAKS_OTHERS, _BREAKS_OWN = 2, 1


class _Limit(NamedTuple):
    """A limit in seconds on one field of `Prediction`, from the task's own objective."""

    field: Literal["finish_s", "ttft_s", "step_s"]
    seconds: float


class Parrot(PlacementPolicy):
    """The default placement: see the module's docstring.

    Args:
        config: `starvation_s` (wait in seconds after which a task may break promised step times).
    """

    name = "parrot"
    late_binding = True

    @classmethod
    def make(cls, config: SchedulerConfig, rng: random.Random) -> Self:
        """Return a new one for one model."""
        return cls(config)

    def __init__(self, config: SchedulerConfig) -> None:
        self._starvation_s = config.starvation_s

    def place(
        self, state: TaskState, application: Application, pool: EnginePool, now: float
    ) -> EngineChoice | None:
        if not pool.has_open_row:
            return None
        limit = _limit_of(state, now)
        breaks = None
        if limit is not None or pool.num_step_limits:
            breaks = partial(_broken, state, pool, limit)
        last, preferred = pool.row_of(application.last_engine), pool.row_of(state.task.prefers)
        also = (1 << last if last >= 0 else 0) | (1 << preferred if preferred >= 0 else 0)
        found = candidates(state, application, pool, also, breaks, pool.avoided(now))
        if found is None:
            return None
        best = min(found.looked_at)
        waited_s = now - state.submitted_at
        if (
            best.breaks >= _BREAKS_OTHERS
            and not state.objective.is_latency
            and waited_s < self._starvation_s
        ):
            return None
        others = found.looked_at
        if breaks is not None:
            others = [each for each in others if each.breaks == best.breaks]
        home = _home(state, others, last)
        slack = 1.0 + _HOME_SLACK / max(1.0, pool.decode_work)
        if home is not None and home.cached > best.cached and home.cost <= best.cost * slack:
            best = home
        decided_by = "prefix" if best.cached else "load"
        if best.cached < found.best_cached * _REPLICATE_SHARE:
            decided_by = "replicate"
        if preferred not in (-1, best.row):
            for each in others:
                if each.row == preferred and each.cost <= best.cost * _PREFERRED_SLACK:
                    best, decided_by = each, "preferred"
        predicted = predict_row(state, best.prefill, pool.table.scalars, best.row)
        details: dict[str, float | int | str] = {
            "prefill_tokens": best.prefill,
            "batch": best.batch,
            "ttft_s": predicted.ttft_s,
            "finish_s": predicted.finish_s,
            "best_cached_tokens": found.best_cached,
        }
        compared = [(each.row, each.cached) for each in sorted(found.looked_at)[:_COMPARED]]
        return EngineChoice(
            best.row, decided_by, int(best.cached), found.number, best.cost, details, compared
        )


def _home(state: TaskState, looked_at: list[Candidate], last: int) -> Candidate | None:
    """Return the engine with the task's private prefix.

    It is the engine that caches most of the prompt, if that exceeds the part that applications
    share. If the shared part is unknown, it is the engine where the application ran last (`last`),
    if that caches `_LEAST_OWN_SHARE` of the prompt.
    """
    task = state.task
    if task.common_tokens is None:
        if last < 0:
            return None
        least = task.prompt_tokens * _LEAST_OWN_SHARE
        return next((e for e in looked_at if e.row == last and e.cached >= least), None)
    most = max(looked_at, key=lambda each: (each.cached, -each.cost))
    return most if most.cached > task.common_tokens else None


def _broken(
    state: TaskState, pool: EnginePool, limit: _Limit | None, row: int, prefill: float
) -> int:
    """Return the promises that a placement on a row breaks, with `prefill` tokens to compute."""
    scalars = pool.table.scalars
    predicted = predict_row(state, prefill, scalars, row)
    broken, limit_s = 0, scalars.step_limit_s[row]
    # A limit that even an idle engine would break is ignored.
    if limit_s < predicted.step_s and scalars.weights_s[row] + scalars.overhead_s[row] <= limit_s:
        broken += _BREAKS_OTHERS
    if limit is not None and getattr(predicted, limit.field) > limit.seconds:
        broken += _BREAKS_OWN
    return broken


def _limit_of(state: TaskState, now: float) -> _Limit | None:
    """Return the limit of the task's own objective; None if it has none that can be predicted."""
    kind, seconds = state.objective
    if kind == "deadline" and state.deadline is not None:
        return _Limit("finish_s", state.deadline - now)
    if kind == "ttft" and seconds is not None:
        return _Limit("ttft_s", seconds - (now - state.submitted_at))
    if kind == "tpot" and seconds is not None:
        return _Limit("step_s", seconds)
    return None
