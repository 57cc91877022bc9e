"""The few engines where the product of load and work may be smallest.

These are the engines that hold most of the prompt, and the least loaded ones. Engines often differ
only in load and cache. Then, among engines with equal sequences and empty queues, the one that
holds most of the prompt is the cheapest. The search ends at a load that even the largest cached
part of the prompt cannot outweigh.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

from parrot_scheduler.engines.pool import EnginePool
from parrot_scheduler.engines.table import rows_of
from parrot_scheduler.placement.cached import cached_on, tokens_of
from parrot_scheduler.prefix_index.index import chain_of
from parrot_scheduler.task_state import Application, TaskState

#: Engines examined in all, and among those that hold most of the prompt.
MOST_ENGINES = 64
MOST_HOLDERS = 8


class Candidate(NamedTuple):
    """An examined engine; the smallest of these tuples is the best engine."""

    #: Promises that it would break; 0 if none. See `candidates`.
    breaks: int
    #: Work there times its sequences plus this one.
    cost: float
    #: Its number of sequences.
    batch: float
    row: int
    #: Prompt tokens that it caches or is about to cache.
    cached: float
    #: Prompt tokens to compute there before the task decodes: the queued ones outside the task's
    #: own prefix, and the new ones.
    prefill: float


class Candidates(NamedTuple):
    """Engines that a task may be placed on."""

    #: The examined engines, at least one.
    looked_at: list[Candidate]
    #: Number of all possible engines.
    number: int
    #: Most prompt tokens that any accepting engine caches.
    best_cached: float


def candidates(
    state: TaskState,
    application: Application,
    pool: EnginePool,
    also: int = 0,
    breaks: Callable[[int, float], int] | None = None,
    avoided: int = 0,
) -> Candidates | None:
    """Examine engines that could hold the task and have room for its sequences.

    An idle engine has room for any task. If no engine could hold it, all are treated as if they
    could.

    Args:
        state: of the task.
        application: whose task it is.
        pool: the engines.
        also: a set of rows to examine in any case.
        breaks: tells which promises a row breaks with a number of tokens to compute; the larger the
            number, the worse. None: there are no promises.
        avoided: a set of rows to pass over if any other has room.

    Returns:
        None if there is no such engine.
    """
    there = pool.accepting & ~(pool.batch_full & pool.busy)
    if not there:
        return None
    there = there & ~avoided or there
    task, scalars, prefixes, block = (
        state.task,
        pool.table.scalars,
        pool.prefixes,
        pool.common_block,
    )
    prompt, sequences, output = task.prompt_tokens, task.num_sequences, float(state.expected_output)
    need = prompt + output
    least = need if pool.smallest_accepting < need <= pool.largest_accepting else 0.0
    keys, decode_work = chain_of(task, block), pool.decode_work * output
    holders = pool.accepting & prefixes.rows_with(keys)
    most, best_cached = holders, 0.0
    # Rows known to cache this much, among those examined next.
    known, known_hit = 0, 0.0
    if block < 0:
        # Block sizes differ, so depth alone does not give the cached tokens.
        most = holders = holders | pool.accepting & prefixes.rows_with(task.prefix)
        cached = (cached_on(state, application, pool, row) for row in rows_of(holders))
        best_cached = float(max(cached, default=0))
    elif holders:
        depth, most = prefixes.deepest(holders, keys)
        best_cached = known_hit = float(tokens_of(depth, block, state, application))
        if not most & there:
            depth, most = prefixes.deepest(holders & there, keys)
            known_hit = float(tokens_of(depth, block, state, application))
        known = most
    first = also & there
    for row in islice(rows_of(most & there), MOST_HOLDERS):
        first |= 1 << row
    # Engines differ only in load and cache.
    alike = sequences == 1 and not least and breaks is None and block >= 0
    least_work, best_cost = decode_work + prompt - best_cached, math.inf
    looked_at: list[Candidate] = []
    by_load, rest, num_seen, has_unqueued = pool.rows_by_load, there ^ first, 0, False
    for load in (-1.0, *sorted(by_load)):
        rows = first if load < 0.0 else by_load[load] & rest
        if not rows:
            continue
        held = rows & holders
        if alike and load >= 0.0:
            if least_work * (load // 1 + 1.0) > best_cost:
                break
            if has_unqueued:
                # Engines with more sequences that hold none of the prompt cannot be cheaper.
                rows = held
            known = 0
            if rows and load.is_integer():
                # These engines have nothing queued.
                if held:
                    depth, known = prefixes.deepest(held, keys)
                    known_hit = float(tokens_of(depth, block, state, application))
                    rows = known
                has_unqueued = True
                rows &= -rows
        while rows and num_seen < MOST_ENGINES:
            bit = (rows & held or rows) & -(rows & held or rows)
            rows ^= bit
            row = bit.bit_length() - 1
            batch, queued, hit = scalars.batch[row], scalars.pending_prefill[row], 0.0
            if (batch and batch + sequences > scalars.max_batch[row]) or scalars.capacity[
                row
            ] < least:
                continue
            num_seen += 1
            least_cost = (least_work + max(queued - best_cached, 0.0)) * (batch + 1.0)
            if alike and load >= 0.0 and least_cost > best_cost:
                continue
            if bit & holders:
                is_known = bit & known
                hit = known_hit if is_known else float(cached_on(state, application, pool, row))
                if queued:
                    queued -= min(_awaited(state, pool, row), queued)
            prefill = queued + prompt - hit
            cost = (decode_work + prefill) * (batch + 1.0)
            broken = 0 if breaks is None else breaks(row, prefill)
            looked_at.append(Candidate(broken, cost, batch, row, hit, prefill))
            best_cost = min(best_cost, cost)
    if not looked_at:
        return None
    count = there.bit_count()
    if not alike:
        least_broken = min(looked_at).breaks
        count = sum(each.breaks == least_broken for each in looked_at)
    return Candidates(looked_at, count, best_cached)


def _awaited(state: TaskState, pool: EnginePool, row: int) -> float:
    """Return the prompt tokens that other tasks on a row need too, but that are not computed."""
    prefix, block = state.task.prefix, pool.table.scalars.block_tokens[row]
    claimed = pool.prefixes.claimed_on(row, prefix)
    if not claimed:
        return 0.0
    return max(claimed - pool.prefixes.stored_on(row, prefix), 0) * block
