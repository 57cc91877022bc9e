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

import numpy as np

from parrot_scheduler.config import SchedulerConfig
from parrot_scheduler.entry import Entry
from parrot_scheduler.placement.common import Mask, any_of, cached_tokens, candidates
from parrot_scheduler.placement.groups import GroupHomes, group_size
from parrot_scheduler.placement.predict import Prediction, predict_all, predict_row
from parrot_scheduler.policy import Application, Choice
from parrot_scheduler.pool import Pool
from parrot_scheduler.prefix_index import as_column
from parrot_scheduler.table import Column

#: The least that counts as one block.
_BLOCK_TOKENS = 16.0
#: An engine with this share of the best hit counts as a holder.
_HOLDER_SHARE = 0.5
#: How much later than elsewhere a group's member may end with the others of its group. In the
#: simulator more made every workload with groups slower (mixed, map-reduce, multi-agent): engines
#: that batch continuously give nothing for company as such, and a shared prefix draws anyway.
_GROUP_SLACK = 1.0
#: The same where at least half of its prompt is there. On four simulated engines of the profile
#: H200-8B at 0.2 jobs/s of `multi-agent`: mean job 43.2 s, and 48.0 s with 1.0 here.
_SHARING_SLACK = 1.25
#: How much more than elsewhere an engine may cost that has something of the task already.
_PREFERRED_SLACK = 1.25


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
        self._group_tasks = config.group_tasks
        self._patience_s = config.starvation_s
        self._homes = GroupHomes()
        # When each waiting task was first told to wait for a holder of its prefix.
        self._waiting: dict[int, float] = {}

    def place(
        self, entry: Entry, application: Application, pool: Pool, now: float
    ) -> Choice | None:
        """The best engine that has room, or None: nothing has, or a holder is worth waiting for."""
        table = pool.table
        room = self._with_room(entry, pool)
        if room is None:
            return None
        cached = cached_tokens(entry, application, pool)
        new = np.maximum(entry.task.prompt_tokens - cached, _BLOCK_TOKENS)
        mask = self._keeping_promises(entry, room, pool, now)
        if mask is None:
            return None
        mask = _meeting_objective(entry, mask, new, pool, now)
        cost: Column = (table.pending_prefill + new) * (table.batch + 1.0)
        np.putmask(cost, ~mask, np.inf)
        options = _Options(entry, pool, mask, cost, new)
        best = cached.item(cached.argmax())
        if best > 0:
            holders = cached >= best * _HOLDER_SHARE
            pick = options.best_of_classes(holders)
            if not holders[pick.row] and self._waits(options, pick.row, holders, now):
                return None
        else:
            pick = _Pick(int(cost.argmin()), "load")
        if self._group_tasks and group_size(entry) > 1:
            pick = self._with_group(options, pick)
        pick = options.with_preference(pick)
        row = pick.row
        predicted = options.predict(row)
        return Choice(
            row=row,
            decided_by=pick.decided_by,
            expected_cached_tokens=int(cached[row]),
            candidates=int(np.count_nonzero(mask)),
            cost=cost.item(row),
            details={
                "prefill_tokens": table.pending_prefill.item(row) + new.item(row),
                "batch": table.batch.item(row),
                "ttft_s": predicted.ttft_s,
                "finish_s": predicted.finish_s,
                "best_cached_tokens": best,
            },
        )

    def placed(self, entry: Entry, choice: Choice, pool: Pool, now: float) -> None:
        """Remember where its groups are."""
        self._waiting.pop(entry.task.id, None)
        if self._group_tasks and group_size(entry) > 1:
            self._homes.add(entry, choice.row, pool)

    def ended(self, entry: Entry, pool: Pool, now: float) -> None:
        """Its groups' homes stay: more members may come."""
        self._waiting.pop(entry.task.id, None)

    def _with_room(self, entry: Entry, pool: Pool) -> Mask | None:
        """Rows with room for its working set; blocks that tasks there need already are free."""
        table, task = pool.table, entry.task
        used = table.working_set + float(task.prompt_tokens + entry.expected_output)
        shared = as_column(pool.prefixes.claimed_levels(task.prefix), len(used))
        if shared is not None:
            used -= shared * table.block_tokens
        target = table.capacity * self._target
        free = table.accepts & (table.batch + task.num_sequences <= table.max_batch)
        # What paused applications left yields to running work, but only where it must.
        room: Mask = free & (used + table.kept <= target)
        if any_of(room):
            return room
        room = free & (used <= target)
        if any_of(room):
            return room
        room = candidates(entry, pool) & (table.batch == 0)
        return room if any_of(room) else None

    def _keeping_promises(self, entry: Entry, room: Mask, pool: Pool, now: float) -> Mask | None:
        """Those of them where no step gets longer than was promised to others."""
        table = pool.table
        if table.step_limit_s.item(table.step_limit_s.argmin()) == np.inf:
            return room
        fixed_s = table.weights_s + table.overhead_s
        context = table.working_set + float(entry.task.prompt_tokens + entry.expected_output)
        # A promise that even an idle engine would break binds nobody.
        keeping: Mask = room & (
            (fixed_s + context * table.context_token_s <= table.step_limit_s)
            | (fixed_s > table.step_limit_s)
        )
        if any_of(keeping):
            return keeping
        may_wait = not entry.objective.is_latency and now - entry.submitted_at < self._patience_s
        return None if may_wait else room

    def _waits(self, options: _Options, row: int, holders: Mask, now: float) -> bool:
        """Whether to wait for a holder without room instead of computing the prefix on `row`.

        A holder with n sequences is taken to finish one every n-th part of what this task would
        take there. Nobody waits longer than computing the prompt takes: the loss is at most that.
        Nobody waits while an engine has nothing to do.
        """
        entry, table = options.entry, options.pool.table
        full = np.flatnonzero(holders & ~options.mask & table.accepts)
        if not len(full) or any_of(table.accepts & (table.batch == 0)):
            return False
        there = options.predict(row)
        waited_s = now - self._waiting.get(entry.task.id, now)
        # The one with most sequences frees a place soonest.
        holder = int(full[table.batch[full].argmax()])
        here = options.predict(holder)
        batch = max(table.batch.item(holder), 1.0)
        used = table.working_set.item(holder)
        over = used + options.new.item(holder) + entry.expected_output
        over -= table.capacity.item(holder) * self._target
        endings = max(math.ceil(over * batch / max(used, 1.0)), 1)
        wait_s = endings * (here.finish_s - here.ttft_s) / batch
        if waited_s + wait_s >= there.fill_s or wait_s + here.toll_s >= there.toll_s:
            return False
        self._waiting.setdefault(entry.task.id, now)
        return True

    def _with_group(self, options: _Options, pick: _Pick) -> _Pick:
        """With others of its groups, unless it would end much later there."""
        entry, table, cost = options.entry, options.pool.table, options.cost
        prompt = entry.task.prompt_tokens
        least_hit = (prompt - options.new.item(pick.row)) * _HOLDER_SHARE
        homes = [
            row
            for row in self._homes.rows(entry, options.pool)
            if options.mask[row] and prompt - options.new.item(row) >= least_hit
        ]
        if homes:
            row = min(homes, key=lambda row: (cost[row], row))
        else:
            # The first one looks for room for all, or for as many as possible.
            size = group_size(entry)
            fitting = np.minimum(
                (table.max_batch - table.batch) // max(entry.task.num_sequences, 1),
                (table.capacity * self._target - table.working_set)
                // (options.new + entry.expected_output),
            )
            fitting = np.where(options.mask, np.minimum(fitting, size), -np.inf)
            if fitting[pick.row] == fitting.max():
                return pick
            row = int(np.where(fitting == fitting.max(), cost, np.inf).argmin())
        sharing = prompt - options.new.item(row) >= prompt * _HOLDER_SHARE
        slack = max(self._group_slack, _SHARING_SLACK) if sharing else self._group_slack
        latest_s = options.predict(pick.row).finish_s * slack
        return _Pick(row, "group") if options.predict(row).finish_s <= latest_s else pick


class _Options(NamedTuple):
    """What there is to choose from for one task."""

    entry: Entry
    pool: Pool
    #: Rows that may take it.
    mask: Mask
    #: Inf where they may not.
    cost: Column
    #: Prompt tokens that would have to be computed, one block at least.
    new: Column

    def predict(self, row: int) -> Prediction[float]:
        """What would become of it there."""
        return predict_row(self.entry, self.new.item(row), self.pool.table, row)

    def best_of_classes(self, holders: Mask) -> _Pick:
        """The cheapest holder or the cheapest other row, whichever is better for all."""
        cheapest = int(self.cost.argmin())
        in_class = bool(holders[cheapest])
        rest = self.cost.copy()
        np.putmask(rest, holders if in_class else ~holders, np.inf)
        second = int(rest.argmin())
        if rest.item(second) == np.inf:
            return _Pick(cheapest, "prefix" if in_class else "load")
        holder, other = (cheapest, second) if in_class else (second, cheapest)
        if self.predict(holder).toll_s <= self.predict(other).toll_s:
            return _Pick(holder, "prefix")
        return _Pick(other, "replicate")

    def with_preference(self, pick: _Pick) -> _Pick:
        """On the engine that has something of it already, where that costs little more."""
        row = self.pool.row_of(self.entry.task.prefers)
        if row < 0 or row == pick.row or not self.mask[row]:
            return pick
        cheap = self.cost[row] <= self.cost[pick.row] * _PREFERRED_SLACK
        return _Pick(row, "preferred") if cheap else pick


def _meeting_objective(entry: Entry, mask: Mask, new: Column, pool: Pool, now: float) -> Mask:
    """Rows that should meet the task's own objective, where there are any."""
    kind, seconds = entry.objective.kind, entry.objective.seconds
    if kind == "deadline" and entry.deadline is not None:
        finish_s = predict_all(entry, new, pool.table).finish_s
        meeting = mask & (finish_s <= entry.deadline - now)
    elif kind == "ttft" and seconds is not None:
        ttft_s = predict_all(entry, new, pool.table).ttft_s
        meeting = mask & (ttft_s <= seconds - (now - entry.submitted_at))
    elif kind == "tpot" and seconds is not None:
        meeting = mask & (predict_all(entry, new, pool.table).step_s <= seconds)
    else:
        return mask
    return meeting if any_of(meeting) else mask
