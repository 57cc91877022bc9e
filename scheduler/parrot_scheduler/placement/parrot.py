"""The default placement: groups together, prefixes where they are, load by a product.

The rules, in order:

1. Room: a task waits in the scheduler until an engine has room for its working set and its
   sequences. An idle engine has room for anything.
2. Objectives: a throughput task goes to no engine where a decode step would then take longer than
   was promised to others there; a task with a timed objective prefers engines that should meet it.
3. Load: `argmin max(uncached tokens, one block) x (sequences + 1)`, queued tokens included
   (LMetric, arXiv 2603.15202). Tokens that tasks placed there are about to compute count as cached.
   Where latency tasks run, other tasks instead go by seconds: their own, and those that they take
   from each latency task (`EngineCandidates.yielding_cost_s`); but nowhere where they would take
   more than `SchedulerConfig.yield_slack` times as long as on the best engine.
4. Prefix: engines with a good part of the best hit are compared as a class with all others, by the
   predicted end of the task plus the prefill that it takes from others there. A hit sticks under
   load until computing the prefix elsewhere would end sooner even so: then a hot prefix gets one
   more engine.
5. Holders without room: waiting for one pays, for at most as long as computing the prompt elsewhere
   would take, when it is predicted to end sooner.
6. Group: members go to an engine that has some already, unless they would end later there, or more
   of their prompt is cached elsewhere. A group thus takes as few engines as it can without being
   slowed down, and more where one is too small; each member is placed for itself, so none waits
   for room for all. Members that share most of their prompt stay together even if each would end a
   little later: each further copy of a prefix costs memory and prefill, and engines read a shared
   one once for all its readers, which predictions do not know.
7. Session: a task outside groups goes to the engine of its application's last task if its context
   is still there, unless it would take twice as long: each further copy costs memory, and pushes
   other sessions out. A first task whose session goes on (`Task.returns`) goes by rule 3 alone, as
   the session stays where it begins.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from parrot_scheduler.config import SchedulerConfig
from parrot_scheduler.engines.pool import FEW_ROWS, EnginePool
from parrot_scheduler.placement.candidates import HOLDER_SHARE, EngineCandidates, Limit
from parrot_scheduler.placement.common import GroupPlacements, group_size
from parrot_scheduler.placement.scalar_candidates import ScalarCandidates
from parrot_scheduler.placement.vector_candidates import VectorCandidates
from parrot_scheduler.policy import EngineChoice, EngineWait, PlacementPolicy
from parrot_scheduler.prefix_index.holders import rows_of
from parrot_scheduler.task_state import Application, TaskState

#: A member of a task group may take so many times as long with the others of its group as where it
#: ends soonest. In the simulator more made every workload with groups slower (mixed, map-reduce,
#: multi-agent): engines that batch continuously gain nothing from company as such, and a shared
#: prefix attracts members anyway.
_GROUP_SLACK = 1.0
#: The same where at least half of its prompt is cached. On four simulated engines of the profile
#: H200-8B at 0.2 jobs/s of `multi-agent`: mean job 45.1 s, and 51.3 s with 1.0 here.
_SHARING_SLACK = 1.25
#: A task may take so many times as long on the engine of its session as where it ends soonest. On
#: four simulated engines calls of 200 agents take 4.03 s with 1.5 here and 3.92 with 2, those of
#: agents whose contexts exceed memory 6.26 and 5.32 s.
_SESSION_SLACK = 2.0
#: Share of a session's context that is still cached on its engine where that engine has it.
_SESSION_SHARE = 0.5
#: A first task with this chance of a return begins a session.
_RETURNS = 0.5
#: The engine that a task prefers may cost so many times as much as the best one.
_PREFERRED_SLACK = 1.25


class _HolderWait(NamedTuple):
    """A task that waits for a holder of its prefix."""

    #: When it began to wait.
    since: float
    #: The highest cost elsewhere, in seconds, that it would take instead. It only rises: what is
    #: expected of a holder changes with each task there, and a task that followed it would stay
    #: undecided.
    total_cost_s: float


class _Pick(NamedTuple):
    row: int
    decided_by: str


class Parrot(PlacementPolicy):
    """The default placement: see the module's text.

    Args:
        config: `working_set_target` (share of an engine's KV that is filled), `yield_slack`,
            `group_tasks`, `starvation_s` (seconds after which promised step times bind a task no
            more), `max_passed_over` (tasks that wait for a holder at most).
        group_slack: replaces `_GROUP_SLACK`.
    """

    name = "parrot"
    late_binding = True

    def __init__(self, config: SchedulerConfig, group_slack: float = _GROUP_SLACK) -> None:
        self._group_slack = group_slack
        self._target = config.working_set_target
        self._yield_slack = config.yield_slack
        self._group_tasks = config.group_tasks
        self._starvation_s = config.starvation_s
        self._max_waiting = config.max_passed_over
        self._group_placements = GroupPlacements()
        # By task id.
        self._holder_waits: dict[int, _HolderWait] = {}

    def place(
        self, state: TaskState, application: Application, pool: EnginePool, now: float
    ) -> EngineChoice | EngineWait | None:
        candidates = self._candidates(state, application, pool)
        if candidates is None:
            return None
        if pool.num_step_limits and not candidates.filter_by_step_limits():
            waits = not state.objective.is_latency
            if waits and now - state.submitted_at < self._starvation_s:
                return None
        limit = _limit_of(state, now)
        if limit is not None:
            candidates.filter_by_objective(limit)
        if candidates.yields:
            candidates.filter_by_finish(self._yield_slack)
        pick = _holder_or_other(candidates)
        elsewhere = candidates.best_cached > 0 and not candidates.is_holder(pick.row)
        if elsewhere:
            wait = self._wait(candidates, pick.row, now)
            if wait is not None:
                return wait
        if self._group_tasks and group_size(state) > 1:
            pick = self._with_group(candidates, pick)
        elif not state.groups:
            pick = _with_session(candidates, pick, application)
        pick = _with_preference(candidates, pick)
        row, scalars = pick.row, pool.table.scalars
        predicted = candidates.predict(row)
        return EngineChoice(
            row=row,
            decided_by=pick.decided_by,
            expected_cached_tokens=int(candidates.cached_tokens(row)),
            candidates=candidates.num_rows,
            cost=candidates.cost(row),
            details={
                "prefill_tokens": scalars.pending_prefill[row] + candidates.new_tokens(row),
                "batch": scalars.batch[row],
                "ttft_s": predicted.ttft_s,
                "finish_s": predicted.finish_s,
                "best_cached_tokens": candidates.best_cached,
            },
        )

    def placed(self, state: TaskState, choice: EngineChoice, pool: EnginePool, now: float) -> None:
        self._holder_waits.pop(state.task.id, None)
        # NOTE: a group of one as well: more members may come.
        if self._group_tasks and state.groups:
            self._group_placements.add(state, choice.row, pool)

    def ended(self, state: TaskState, pool: EnginePool, now: float) -> None:
        self._holder_waits.pop(state.task.id, None)

    def _candidates(
        self, state: TaskState, application: Application, pool: EnginePool
    ) -> EngineCandidates | None:
        """Engines with room for it; None: none has."""
        there = pool.accepting & ~pool.full | pool.accepting & ~pool.busy
        if pool.common_block > 0 and there.bit_count() <= FEW_ROWS:
            few = ScalarCandidates(state, pool, self._target, rows_of(there))
            return few if few.rows else None
        many = VectorCandidates(state, application, pool, self._target)
        return many if many.has_room else None

    def _wait(self, candidates: EngineCandidates, row: int, now: float) -> EngineWait | None:
        """Whether to wait for a holder without room instead of computing the prefix on `row`.

        A holder with n sequences is assumed to finish one in every n-th part of the time that this
        task would decode there. No task waits longer than computing its prompt takes, so that it
        loses at most that; none waits while an engine has nothing to do.
        """
        state, pool, scalars = candidates.state, candidates.pool, candidates.pool.table.scalars
        if pool.accepting & ~pool.busy:
            return None
        holder_wait = self._holder_waits.get(state.task.id)
        if holder_wait is None:
            if len(self._holder_waits) >= self._max_waiting:
                return None
            holder_wait = _HolderWait(now, -math.inf)
        there = candidates.predict(row)
        if there.total_cost_s <= holder_wait.total_cost_s:
            return None
        # The one with most sequences has one end soonest.
        holder = candidates.busiest_holder_without_room()
        if holder < 0:
            return None
        waited_s = now - holder_wait.since
        here = candidates.predict(holder)
        batch = max(scalars.batch[holder], 1.0)
        used = scalars.working_set[holder]
        over = used + candidates.new_tokens(holder) + state.expected_output
        over -= scalars.capacity[holder] * self._target
        endings = max(math.ceil(over * batch / max(used, 1.0)), 1)
        wait_s = endings * (here.finish_s - here.ttft_s) / batch
        if waited_s + wait_s >= there.fill_s or wait_s + here.total_cost_s >= there.total_cost_s:
            return None
        total_cost_s = max(wait_s + here.total_cost_s, holder_wait.total_cost_s)
        self._holder_waits[state.task.id] = _HolderWait(holder_wait.since, total_cost_s)
        return EngineWait(
            rows=candidates.holders_without_room(),
            until=now + (there.fill_s - wait_s - waited_s),
            total_cost_s=total_cost_s,
            new_tokens=candidates.new_tokens(row),
            tokens=float(state.working_set),
            steps=max(state.expected_output / max(state.task.num_sequences, 1), 1.0),
        )

    def _with_group(self, candidates: EngineCandidates, pick: _Pick) -> _Pick:
        """With others of its groups, unless it would end much later there."""
        state = candidates.state
        prompt = state.task.prompt_tokens
        least_hit = (prompt - candidates.new_tokens(pick.row)) * HOLDER_SHARE
        rows = [
            row
            for row in self._group_placements.rows(state, candidates.pool)
            if candidates.has(row) and prompt - candidates.new_tokens(row) >= least_hit
        ]
        if rows:
            row = min(rows, key=lambda row: (candidates.cost(row), row))
        else:
            # The first member looks for room for all, or for as many as possible.
            row = candidates.best_for_group(group_size(state), pick.row)
            if row == pick.row:
                return pick
        sharing = prompt - candidates.new_tokens(row) >= prompt * HOLDER_SHARE
        slack = max(self._group_slack, _SHARING_SLACK) if sharing else self._group_slack
        latest_s = candidates.predict(pick.row).finish_s * slack
        return _Pick(row, "group") if candidates.predict(row).finish_s <= latest_s else pick


def _holder_or_other(candidates: EngineCandidates) -> _Pick:
    """The cheapest holder or the cheapest other row, whichever is better for all."""
    holder, other = candidates.cheapest()
    if holder < 0:
        return _Pick(other, "load")
    if (
        other < 0
        or candidates.predict(holder).total_cost_s <= candidates.predict(other).total_cost_s
    ):
        return _Pick(holder, "prefix")
    return _Pick(other, "replicate")


def _with_session(candidates: EngineCandidates, pick: _Pick, application: Application) -> _Pick:
    """On the engine of its session's last task, unless it would end much later there."""
    if application.last_engine is None:
        if candidates.state.task.returns < _RETURNS:
            return pick
        rows = [row for row in candidates.cheapest() if row >= 0]
        row = min(rows, key=candidates.cost)
        return pick if row == pick.row else _Pick(row, "session")
    row = candidates.pool.row_of(application.last_engine)
    if row < 0 or row == pick.row or not candidates.has(row):
        return pick
    # Calls that began together have ended none yet: there is no context to stay with.
    context = application.context_tokens
    if not context or candidates.cached_tokens(row) < context * _SESSION_SHARE:
        return pick
    latest_s = candidates.predict(pick.row).finish_s * _SESSION_SLACK
    return _Pick(row, "session") if candidates.predict(row).finish_s <= latest_s else pick


def _with_preference(candidates: EngineCandidates, pick: _Pick) -> _Pick:
    """On the engine that has something of it already, where that costs little more."""
    prefers = candidates.state.task.prefers
    row = candidates.pool.row_of(prefers) if prefers is not None else -1
    if row < 0 or row == pick.row or not candidates.has(row):
        return pick
    cheap = candidates.cost(row) <= candidates.cost(pick.row) * _PREFERRED_SLACK
    return _Pick(row, "preferred") if cheap else pick


def _limit_of(state: TaskState, now: float) -> Limit | None:
    """The bound that its own objective sets; None: none that can be predicted."""
    kind, seconds = state.objective
    if kind == "deadline" and state.deadline is not None:
        return Limit("finish_s", state.deadline - now)
    if kind == "ttft" and seconds is not None:
        return Limit("ttft_s", seconds - (now - state.submitted_at))
    if kind == "tpot" and seconds is not None:
        return Limit("step_s", seconds)
    return None
