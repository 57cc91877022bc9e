"""Our placement: groups together, prefixes where they are, load by a product, nothing sooner than
there is room.

The rules, in order:

1. Room: a task waits here until an engine has room for its working set and its sequences. An idle
   engine has room for anything.
2. Objectives: a task that nobody waits for goes to no engine where a decode step would then take
   longer than was promised to others there; one that somebody waits for prefers engines that
   should meet its own objective.
3. Load: `argmin max(uncached tokens, one block) x (sequences + 1)`, queued tokens included
   (LMetric, arXiv 2603.15202). Tokens that tasks placed there are about to compute are cached.
   Where calls run that somebody waits for, tasks that nobody waits for instead go by seconds: their
   own, and those that they take from each such call (`Options.yielding_cost_s`); but nowhere
   where they would take more than `SchedulerConfig.yield_slack` times as long as elsewhere.
4. Prefix: engines with a good part of the best hit are compared as a class with all others, by the
   predicted end of the task plus the prefill that it takes from others there. A hit sticks under
   load until computing the prefix anew elsewhere would end sooner even so: then a hot prefix gets
   one more engine.
5. Holders without room: waiting for one is worth while, for as long as computing the prompt
   elsewhere would take in all, when it is predicted to be sooner.
6. Group: members go to an engine that has some already, unless they would end later there, or
   more of their prompt is cached elsewhere. A group thus takes as few engines as it can without
   being slowed down, and more where one is too small; each member is placed for itself, so none
   waits for room for all. Members that share most of their prompt stay together even if each
   would end a little later: every further copy of a prefix costs all, and engines read a shared
   one once for all its readers, which predictions know nothing of.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from parrot_scheduler.config import SchedulerConfig
from parrot_scheduler.engines.pool import FEW_ROWS, Pool
from parrot_scheduler.engines.prefix_index import rows_of
from parrot_scheduler.placement.candidates import HOLDER_SHARE, Limit, Options
from parrot_scheduler.placement.group_placements import GroupHomes, group_size
from parrot_scheduler.placement.scalar_candidates import Few
from parrot_scheduler.placement.vector_candidates import Many
from parrot_scheduler.policy import Application, Choice, Wait
from parrot_scheduler.task_state import Entry

#: How much later than elsewhere a group's member may end with the others of its group. In the
#: simulator more made every workload with groups slower (mixed, map-reduce, multi-agent): engines
#: that batch continuously give nothing for company as such, and a shared prefix draws anyway.
_GROUP_SLACK = 1.0
#: The same where at least half of its prompt is there. On four simulated engines of the profile
#: H200-8B at 0.2 jobs/s of `multi-agent`: mean job 43.2 s, and 48.0 s with 1.0 here.
_SHARING_SLACK = 1.25
#: How much more than elsewhere an engine may cost that has something of the task already.
_PREFERRED_SLACK = 1.25


class _Told(NamedTuple):
    #: When it was first told to wait.
    since: float
    #: The most that it was told to go elsewhere for. That stands: what is expected of a holder
    #: changes with each task there, and a task that followed it would stay undecided.
    toll_s: float


class _Pick(NamedTuple):
    row: int
    decided_by: str


class Parrot:
    """See the module's text."""

    name = "parrot"
    late_binding = True

    def __init__(self, config: SchedulerConfig, group_slack: float = _GROUP_SLACK) -> None:
        self._group_slack = group_slack
        self._target = config.working_set_target
        self._yield_slack = config.yield_slack
        self._group_tasks = config.group_tasks
        self._patience_s = config.starvation_s
        self._max_waiting = config.max_passed_over
        self._homes = GroupHomes()
        # What each task was told that waits for a holder of its prefix.
        self._told: dict[int, _Told] = {}

    def place(
        self, entry: Entry, application: Application, pool: Pool, now: float
    ) -> Choice | Wait | None:
        """The best engine that has room, or what to wait for; None: for room."""
        options = self._options(entry, application, pool)
        if options is None:
            return None
        if pool.num_promises and not options.keep_promises():
            waits = not entry.objective.is_latency
            if waits and now - entry.submitted_at < self._patience_s:
                return None
        limit = _limit_of(entry, now)
        if limit is not None:
            options.keep_within(limit)
        if options.yields:
            options.keep_soon(self._yield_slack)
        pick = _best_of_classes(options)
        elsewhere = options.best_cached > 0 and not options.is_holder(pick.row)
        if elsewhere:
            wait = self._wait(options, pick.row, now)
            if wait is not None:
                return wait
        if self._group_tasks and group_size(entry) > 1:
            pick = self._with_group(options, pick)
        pick = _with_preference(options, pick)
        row, cells = pick.row, pool.table.cells
        predicted = options.predict(row)
        return Choice(
            row=row,
            decided_by=pick.decided_by,
            expected_cached_tokens=int(options.cached(row)),
            candidates=options.num_rows,
            cost=options.cost(row),
            details={
                "prefill_tokens": cells.pending_prefill[row] + options.new(row),
                "batch": cells.batch[row],
                "ttft_s": predicted.ttft_s,
                "finish_s": predicted.finish_s,
                "best_cached_tokens": options.best_cached,
            },
        )

    def placed(self, entry: Entry, choice: Choice, pool: Pool, now: float) -> None:
        """Remember where its groups are."""
        self._told.pop(entry.task.id, None)
        # NOTE: a group of one as well: more members may come.
        if self._group_tasks and entry.groups:
            self._homes.add(entry, choice.row, pool)

    def ended(self, entry: Entry, pool: Pool, now: float) -> None:
        """Its groups' homes stay: more members may come."""
        self._told.pop(entry.task.id, None)

    def _options(self, entry: Entry, application: Application, pool: Pool) -> Options | None:
        """Engines with room for it; None: none has."""
        there = pool.accepting & ~pool.full | pool.accepting & ~pool.busy
        if pool.common_block > 0 and there.bit_count() <= FEW_ROWS:
            few = Few(entry, pool, self._target, rows_of(there))
            return few if few.rows else None
        many = Many(entry, application, pool, self._target)
        return many if many.has_room else None

    def _wait(self, options: Options, row: int, now: float) -> Wait | None:
        """Whether to wait for a holder without room instead of computing the prefix on `row`.

        A holder with n sequences is taken to finish one every n-th part of what this task would
        take there. Nobody waits longer than computing the prompt takes: the loss is at most that.
        Nobody waits while an engine has nothing to do.
        """
        entry, pool, cells = options.entry, options.pool, options.pool.table.cells
        if pool.accepting & ~pool.busy:
            return None
        told = self._told.get(entry.task.id)
        if told is None:
            if len(self._told) >= self._max_waiting:
                return None
            told = _Told(now, -math.inf)
        there = options.predict(row)
        if there.toll_s <= told.toll_s:
            return None
        # The one with most sequences frees a place soonest.
        holder = options.busiest_full_holder()
        if holder < 0:
            return None
        waited_s = now - told.since
        here = options.predict(holder)
        batch = max(cells.batch[holder], 1.0)
        used = cells.working_set[holder]
        over = used + options.new(holder) + entry.expected_output
        over -= cells.capacity[holder] * self._target
        endings = max(math.ceil(over * batch / max(used, 1.0)), 1)
        wait_s = endings * (here.finish_s - here.ttft_s) / batch
        if waited_s + wait_s >= there.fill_s or wait_s + here.toll_s >= there.toll_s:
            return None
        toll_s = max(wait_s + here.toll_s, told.toll_s)
        self._told[entry.task.id] = _Told(told.since, toll_s)
        return Wait(
            rows=options.full_holders(),
            until=now + (there.fill_s - wait_s - waited_s),
            toll_s=toll_s,
            new_tokens=options.new(row),
            tokens=float(entry.working_set),
            steps=max(entry.expected_output / max(entry.task.num_sequences, 1), 1.0),
        )

    def _with_group(self, options: Options, pick: _Pick) -> _Pick:
        """With others of its groups, unless it would end much later there."""
        entry = options.entry
        prompt = entry.task.prompt_tokens
        least_hit = (prompt - options.new(pick.row)) * HOLDER_SHARE
        homes = [
            row
            for row in self._homes.rows(entry, options.pool)
            if options.may(row) and prompt - options.new(row) >= least_hit
        ]
        if homes:
            row = min(homes, key=lambda row: (options.cost(row), row))
        else:
            # The first one looks for room for all, or for as many as possible.
            row = options.roomiest(group_size(entry), pick.row)
            if row == pick.row:
                return pick
        sharing = prompt - options.new(row) >= prompt * HOLDER_SHARE
        slack = max(self._group_slack, _SHARING_SLACK) if sharing else self._group_slack
        latest_s = options.predict(pick.row).finish_s * slack
        return _Pick(row, "group") if options.predict(row).finish_s <= latest_s else pick


def _best_of_classes(options: Options) -> _Pick:
    """The cheapest holder or the cheapest other row, whichever is better for all."""
    holder, other = options.cheapest()
    if holder < 0:
        return _Pick(other, "load")
    if other < 0 or options.predict(holder).toll_s <= options.predict(other).toll_s:
        return _Pick(holder, "prefix")
    return _Pick(other, "replicate")


def _with_preference(options: Options, pick: _Pick) -> _Pick:
    """On the engine that has something of it already, where that costs little more."""
    prefers = options.entry.task.prefers
    row = options.pool.row_of(prefers) if prefers is not None else -1
    if row < 0 or row == pick.row or not options.may(row):
        return pick
    cheap = options.cost(row) <= options.cost(pick.row) * _PREFERRED_SLACK
    return _Pick(row, "preferred") if cheap else pick


def _limit_of(entry: Entry, now: float) -> Limit | None:
    """What its own objective asks of an engine; None: nothing that can be told beforehand."""
    kind, seconds = entry.objective
    if kind == "deadline" and entry.deadline is not None:
        return Limit("finish_s", entry.deadline - now)
    if kind == "ttft" and seconds is not None:
        return Limit("ttft_s", seconds - (now - entry.submitted_at))
    if kind == "tpot" and seconds is not None:
        return Limit("step_s", seconds)
    return None
