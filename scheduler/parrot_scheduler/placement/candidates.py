"""The engine where a product of load and work is smallest, for any placement policy.

Two ways to the same figures: with few engines to look at, a loop in plain floats; with many, numpy
columns. Few can take another sequence where all are busy; and of engines with one step model that
hold nothing of the prompt, the first one with the fewest sequences and nothing queued is cheaper
than all but those with fewer sequences still.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from parrot_scheduler.engines.pool import EnginePool
from parrot_scheduler.engines.table import Column
from parrot_scheduler.placement.common import Mask, any_of, argmin, cached_tokens, eligible_rows
from parrot_scheduler.prefix_index.holders import as_column, depth_of, rows_of
from parrot_scheduler.task_state import Application, TaskState

#: Up to so many rows are looked at one by one; with more of them numpy columns are faster.
FEW_ROWS = 16
#: Of a prompt: less is not what its application computed before, but what its calls begin with.
LEAST_OWN_SHARE = 1 / 3


class CandidateColumns(NamedTuple):
    """One value for each row of the pool's table."""

    #: Whether it takes work, could hold the task, and has a batch with room for it.
    mask: Mask
    #: Prompt tokens that it caches or is about to cache.
    cached: Column
    #: Queued tokens, those of the task's own prefix left out, and new ones.
    prefill: Column
    #: The same, and as many as the tokens that it generates are worth (`EnginePool.decode_work`).
    work: Column


class CheapestRow(NamedTuple):
    """The row of the smallest `work x (sequences + 1)`; see `CandidateColumns`."""

    row: int
    cached: float
    prefill: float
    cost: float
    #: Rows that it was chosen from.
    candidates: int
    #: Most prompt tokens that any engine caches which takes work.
    best_cached: float

    @classmethod
    def of(cls, columns: CandidateColumns, pool: EnginePool, row: int = -1) -> CheapestRow:
        """The cheapest of some columns, at least one of them a candidate; or the row that is
        given, whose cost is inf where it is none.
        """
        mask, cached, prefill, work = columns
        batch = pool.table.batch
        cost = batch + 1.0
        cost *= work
        np.putmask(cost, ~mask, np.inf)
        if row < 0:
            row = int(cost.argmin())
            # The first of equal costs; ties go to the fewest sequences, and none has fewer than 0.
            if batch.item(row):
                row = argmin(cost, batch)
        return cls(
            row,
            cached.item(row),
            prefill.item(row),
            cost.item(row),
            int(np.count_nonzero(mask)),
            cached.item(cached.argmax()),
        )

    def or_home(
        self, columns: CandidateColumns, state: TaskState, last: int, pool: EnginePool, slack: float
    ) -> CheapestRow:
        """The engine that has what is the task's own, in place of this one; see `cheapest_row`.

        Args:
            last: row of the engine where its application ran last; -1: there is none.
        """
        common = state.task.common_tokens
        if common is not None:
            here = np.where(columns.mask, columns.cached, -1.0)
            most = here.item(here.argmax())
            if most <= common:
                return self
            cost = (pool.table.batch + 1.0) * columns.work
            last = argmin(np.where(here == most, cost, np.inf), cost)
        if last in (-1, self.row):
            return self
        if common is None and columns.cached[last] < state.task.prompt_tokens * LEAST_OWN_SHARE:
            return self
        there = CheapestRow.of(columns, pool, last)
        is_taken = there.cached > self.cached and there.cost <= self.cost * slack
        return there if is_taken else self


def cheapest_row(
    state: TaskState, application: Application, pool: EnginePool, slack: float = 1.0
) -> CheapestRow | None:
    """Among all candidates, ties to the fewest sequences, then to the first row.

    An idle engine has room for any task.

    Args:
        state: of the task.
        application: whose task it is.
        pool: the engines.
        slack: the engine that caches most of the prompt is taken at up to so many times the least
            cost, if that is more than what any applications share (`Task.common_tokens`). Where
            that is not known: the engine where its application ran last, if it caches more than
            the cheapest, and `LEAST_OWN_SHARE` of the prompt.

    Returns:
        None: there is no candidate.
    """
    there = pool.accepting & ~(pool.batch_full & pool.busy)
    if not there:
        return None
    last = pool.row_of(application.last_engine) if slack > 1.0 else -1
    if pool.common_block > 0:
        few = there if there.bit_count() <= FEW_ROWS else _cheapest_few(state, pool, there)
        if few:
            others = (there ^ few).bit_count()
            return _of_few(state, pool, rows_of(few), others, last, slack)
    columns = candidate_columns(state, application, pool)
    if columns is None:
        return None
    found = CheapestRow.of(columns, pool)
    return found if slack <= 1.0 else found.or_home(columns, state, last, pool, slack)


def _cheapest_few(state: TaskState, pool: EnginePool, there: int) -> int:
    """A small set of rows: the cheapest of `there`, and those that hold anything of the prompt.

    0: it would not be small.
    """
    task = state.task
    if (
        task.num_sequences > 1
        or pool.smallest_accepting < task.prompt_tokens + state.expected_output
    ):
        return 0
    few = there & pool.prefixes.rows_with(task.prefix)
    rest = there ^ few
    by_load = pool.rows_by_load
    for load in sorted(by_load):
        rows = by_load[load] & rest
        if rows and load.is_integer():
            # Nothing is queued: whatever is behind has more sequences, or more to do.
            few |= rows & -rows
            return few if few.bit_count() <= FEW_ROWS else 0
        few |= rows
    return few if few.bit_count() <= FEW_ROWS else 0


def candidate_columns(
    state: TaskState, application: Application, pool: EnginePool
) -> CandidateColumns | None:
    """The columns that `cheapest_row` goes by; None: there is no candidate."""
    task, table = state.task, pool.table
    mask = table.batch + task.num_sequences <= table.max_batch
    if task.num_sequences > 1:
        mask |= table.batch == 0
    if pool.smallest_accepting >= task.prompt_tokens + state.expected_output:
        mask &= table.accepts
    else:
        mask &= eligible_rows(state, pool)
    if not any_of(mask):
        return None
    queued = table.pending_prefill
    claimed = pool.prefixes.claimed_holders(task.prefix)
    if pool.common_block > 0:
        cached = as_column(pool.prefixes.holders(task.prefix, claimed), len(mask))
        if cached is None:
            cached = np.zeros(len(mask))
        else:
            cached *= pool.common_block
            np.minimum(cached, max(task.prompt_tokens - 1, 0), out=cached)
            cached *= table.accepts
    else:
        cached = cached_tokens(state, application, pool)
    if claimed:
        awaited = pool.prefixes.awaited(task.prefix, claimed, len(mask))
        awaited *= table.block_tokens
        queued = queued - np.minimum(awaited, queued)
    prefill = queued + task.prompt_tokens
    prefill -= cached
    work = prefill + pool.decode_work * float(state.expected_output)
    return CandidateColumns(mask, cached, prefill, work)


def _of_few(
    state: TaskState, pool: EnginePool, rows: list[int], others: int, last: int, slack: float
) -> CheapestRow | None:
    """Of some rows; `others` are candidates as well, but not the cheapest."""
    task, scalars, prefixes = state.task, pool.table.scalars, pool.prefixes
    block = pool.common_block
    prompt, sequences = task.prompt_tokens, task.num_sequences
    output = float(state.expected_output)
    need = prompt + output
    # Where no engine could hold it, all that take work are candidates.
    least = need if pool.largest_accepting >= need else 0.0
    most_cached = max(prompt - 1, 0)
    prefix = task.prefix
    # What engines need of the prompt for placed tasks is asked row by row; what they have computed,
    # where there is anything, for all of them at once.
    stored = prefixes.stored_holders(prefix)
    holders = prefixes.holders(prefix) if stored else stored
    best, best_batch, best_cost = -1, 0.0, math.inf
    best_hit = best_prefill = 0.0
    # The engine that has what is the task's own.
    home, home_cost, home_hit, home_prefill = -1, math.inf, 0.0, 0.0
    common = task.common_tokens
    least_own = prompt * LEAST_OWN_SHARE
    decode_work = pool.decode_work * output
    count = others
    for row in rows:
        batch = scalars.batch[row]
        if (batch and batch + sequences > scalars.max_batch[row]) or scalars.capacity[row] < least:
            continue
        count += 1
        queued = scalars.pending_prefill[row]
        claimed = prefixes.claimed_on(row, prefix)
        depth = claimed
        if stored:
            depth = depth_of(holders, row)
        elif len(prefixes):
            depth = prefixes.blocks_on(row, prefix)
        hit = float(min(depth * block, most_cached))
        if queued and claimed:
            awaited = claimed - depth_of(stored, row)
            if awaited > 0:
                queued -= min(float(awaited * block), queued)
        prefill = queued + prompt - hit
        cost = (decode_work + prefill) * (batch + 1.0)
        if (
            row == last and hit >= least_own
            if common is None
            else hit > common and (hit > home_hit or (hit == home_hit and cost < home_cost))
        ):
            home, home_cost, home_hit, home_prefill = row, cost, hit, prefill
        if cost < best_cost or (cost == best_cost and batch < best_batch):
            best, best_batch, best_cost, best_hit, best_prefill = row, batch, cost, hit, prefill
    if best < 0:
        return None
    if home_hit > best_hit and home_cost <= best_cost * slack:
        best, best_cost, best_hit, best_prefill = home, home_cost, home_hit, home_prefill
    most = 0
    if stored:
        for bits, depth in reversed(holders):
            if bits & pool.accepting:
                most = depth
                break
    else:
        most = prefixes.most_claimed(pool.accepting, prefix)
    best_cached = float(min(most * block, most_cached))
    return CheapestRow(best, best_hit, best_prefill, best_cost, count, best_cached)
