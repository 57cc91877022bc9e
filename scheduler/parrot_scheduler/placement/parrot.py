"""The default placement: each task where it takes least, from itself and from all who run there.

    argmin  (queued + new + decode work) x (sequences + 1)        ties: the fewest sequences

`candidates` computes the product.

`new` are prompt tokens that the engine neither caches nor is about to. `queued` are prompt tokens
that wait there to be computed; those of the task's own prefix are no queue to it, they are work
that it is spared. `decode work` is what its own tokens and those of one sequence beside them cost
each other, as prompt tokens: `expected output x 2 x sequence_s / prefill_token_s` of the learned
`StepModel`s of all engines together, as one engine's differs from another's by chance. Where a
sequence costs next to nothing, as on a GPU, all this is LMetric (arXiv 2603.15202); where it costs
much, as on a CPU, sequences are spread like on the least loaded engine.
Rules, each with what it gives in `simulate policies` and on recorded programs (docs/scheduling.md):

1. A task waits in the scheduler only while all engines are full: of sequences, or as soon as what
   is placed needs all of an engine's KV. Then the order decides who goes next, and fairness holds.
   With room anywhere it goes where it costs least, also to an engine without free KV, and the
   engine's own queue takes it: going only where there is room gave prefixes away (chats 0.79,
   map-reduce 0.56 times as fast on small engines beyond their load).
2. Its own prefix is no queue: agents that begin together behind one long prompt come together
   while it is computed. Multi-agent programs 1.08 times (CPU) and 1.17 times (H200) as fast.
3. Decode work: on CPU engines GPTs 1.1 to 1.4 times, agents 1.04 to 1.18 times as fast; on an H200
   nothing changes.
4. Objectives with a time: a throughput task goes to no engine where a decode step would then take
   longer than was promised to others there, for `starvation_s` at most; a task with a time of its
   own goes to engines that should meet it, if any does.
5. What is a task's own: the engine that caches most of its prompt, more than what any applications
   share of it (`Task.common_tokens`), may cost three times as much as the cheapest; where that is
   not known, the engine where its application ran last, if it caches a third of the prompt and
   more than the cheapest. The product counts a moment; a call that leaves what is cached has it
   computed anew, and takes memory twice. Agents 1.02 to 1.07 times as fast, programs of many agents
   whose calls come over a network 1.19 times. Where sequences cost more than a prompt, the slack is
   less, `1 + 2 / decode work` of a token: 1.5 on a CPU, where three times made agents 0.95 and
   multi-agent programs 0.84 times as fast. Less than a third is what a fan-out shares, which would
   follow its first call: map-reduce jobs of one document 0.96 times as fast.
6. `Task.prefers`: the engine that has something of the task already may cost a quarter more.
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

#: The engine that a task prefers may cost so many times as much as the best one.
_PREFERRED_SLACK = 1.25
#: The engine that has what is the task's own may cost so many times as much again as the best one,
#: where a generated token costs a sequence beside it no more than a prompt token would.
_HOME_SLACK = 2.0
#: An engine with less of the prompt than this share of what another one has replicates it.
_REPLICATE_SHARE = 0.5


#: Engines that a choice tells it was compared with.
_COMPARED = 4
#: Of a prompt: less is not what its application computed before, but what its calls begin with.
_LEAST_OWN_SHARE = 1 / 3
#: `Candidate.breaks`: a promise to others there, and the task's own. The first one weighs more.
_BREAKS_OTHERS, _BREAKS_OWN = 2, 1


class _Limit(NamedTuple):
    """A bound in seconds on one field of `Prediction`, from a task's own objective."""

    field: Literal["finish_s", "ttft_s", "step_s"]
    seconds: float


class Parrot(PlacementPolicy):
    """The default placement: see the module's text.

    Args:
        config: `starvation_s` (seconds after which promised step times bind a task no more).
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
        found = candidates(state, application, pool, also, breaks)
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
    """The engine that has what is the task's own.

    That is the one that caches most of the prompt, if that is more than what any applications
    share. Where that is not known, it is the one where the application ran last (`last`), if it
    caches `_LEAST_OWN_SHARE` of the prompt.
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
    """Tell the promises that would be broken on a row, with `prefill` tokens to compute."""
    scalars = pool.table.scalars
    predicted = predict_row(state, prefill, scalars, row)
    broken, limit_s = 0, scalars.step_limit_s[row]
    # A limit that even an idle engine would break is void.
    if limit_s < predicted.step_s and scalars.weights_s[row] + scalars.overhead_s[row] <= limit_s:
        broken += _BREAKS_OTHERS
    if limit is not None and getattr(predicted, limit.field) > limit.seconds:
        broken += _BREAKS_OWN
    return broken


def _limit_of(state: TaskState, now: float) -> _Limit | None:
    """The bound that its own objective sets; None: none that can be predicted."""
    kind, seconds = state.objective
    if kind == "deadline" and state.deadline is not None:
        return _Limit("finish_s", state.deadline - now)
    if kind == "ttft" and seconds is not None:
        return _Limit("ttft_s", seconds - (now - state.submitted_at))
    if kind == "tpot" and seconds is not None:
        return _Limit("step_s", seconds)
    return None
