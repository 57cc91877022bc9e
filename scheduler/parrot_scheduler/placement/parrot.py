"""The default placement: each task where it takes least, from itself and from all who run there.

    argmin  (queued + new + decode work) x (sequences + 1)        ties: the fewest sequences

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

from typing import Literal, NamedTuple

from parrot_scheduler.config import SchedulerConfig
from parrot_scheduler.engines.pool import EnginePool
from parrot_scheduler.placement.candidates import (
    CandidateColumns,
    CheapestRow,
    candidate_columns,
    cheapest_row,
)
from parrot_scheduler.placement.common import any_of
from parrot_scheduler.placement.prediction import predict_all, predict_row
from parrot_scheduler.policy import EngineChoice, PlacementPolicy
from parrot_scheduler.task_state import Application, TaskState

#: The engine that a task prefers may cost so many times as much as the best one.
_PREFERRED_SLACK = 1.25
#: The engine that has what is the task's own may cost so many times as much again as the best one,
#: where a generated token costs a sequence beside it no more than a prompt token would.
_HOME_SLACK = 2.0
#: An engine with less of the prompt than this share of what another one has replicates it.
_REPLICATE_SHARE = 0.5


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

    def __init__(self, config: SchedulerConfig) -> None:
        self._starvation_s = config.starvation_s

    def place(
        self, state: TaskState, application: Application, pool: EnginePool, now: float
    ) -> EngineChoice | None:
        if not pool.has_open_row:
            return None
        limit = _limit_of(state, now)
        preferred = pool.row_of(state.task.prefers)
        decided_by = ""
        home_slack = 1.0 + _HOME_SLACK / max(1.0, pool.decode_work)
        if pool.num_step_limits or limit is not None or preferred >= 0:
            columns = candidate_columns(state, application, pool)
            kept = None
            if columns is not None:
                kept = self._within_limits(state, columns, limit, pool, now)
            if kept is None:
                return None
            found = CheapestRow.of(kept, pool)
            last = pool.row_of(application.last_engine)
            found = found.or_home(kept, state, last, pool, home_slack)
            if preferred not in (-1, found.row):
                there = CheapestRow.of(kept, pool, preferred)
                if there.cost <= found.cost * _PREFERRED_SLACK:
                    found, decided_by = there, "preferred"
        else:
            cheapest = cheapest_row(state, application, pool, home_slack)
            if cheapest is None:
                return None
            found = cheapest
        row, cached, prefill, cost, candidates, best_cached = found
        if not decided_by:
            decided_by = "prefix" if cached else "load"
            if cached < best_cached * _REPLICATE_SHARE:
                decided_by = "replicate"
        scalars = pool.table.scalars
        predicted = predict_row(state, prefill, scalars, row)
        details: dict[str, float | int | str] = {
            "prefill_tokens": prefill,
            "batch": scalars.batch[row],
            "ttft_s": predicted.ttft_s,
            "finish_s": predicted.finish_s,
            "best_cached_tokens": best_cached,
        }
        return EngineChoice(row, decided_by, int(cached), candidates, cost, details)

    def _within_limits(
        self,
        state: TaskState,
        columns: CandidateColumns,
        limit: _Limit | None,
        pool: EnginePool,
        now: float,
    ) -> CandidateColumns | None:
        """The candidates that keep promised times; None: it has to wait for some."""
        table, mask = pool.table, columns.mask
        predictions = predict_all(state, columns.prefill, table)
        if pool.num_step_limits:
            # A limit that even an idle engine would break is void.
            void = table.weights_s + table.overhead_s > table.step_limit_s
            keeping = mask & ((predictions.step_s <= table.step_limit_s) | void)
            if any_of(keeping):
                mask = keeping
            elif not state.objective.is_latency and now - state.submitted_at < self._starvation_s:
                return None
        if limit is not None:
            meeting = mask & (getattr(predictions, limit.field) <= limit.seconds)
            if any_of(meeting):
                mask = meeting
        return columns._replace(mask=mask)


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
