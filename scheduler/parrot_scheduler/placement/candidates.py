"""The few engines where a product of load and work may be smallest, looked at one by one.

These are the engines that hold most of the prompt, and the least loaded ones. Engines often differ
by load and cache alone. Then, of those with as many sequences and nothing queued, the one that
holds most of the prompt is the cheapest. And the search ends at a load for which even the largest
cached part of the prompt cannot make up.
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

#: Engines looked at in all, and of those that hold most of the prompt.
MOST_ENGINES = 64
MOST_HOLDERS = 8


class Candidate(NamedTuple):
    """An engine that was looked at: the smallest of these tuples is the best engine."""

    #: The promises that it would break; 0: none. See `candidates`.
    breaks: int
    #: The work there times its sequences and this one.
    cost: float
    #: Its sequences.
    batch: float
    row: int
    #: Prompt tokens that it caches or is about to cache.
    cached: float
    #: Prompt tokens to compute there before the task decodes: queued ones, those of the task's own
    #: prefix left out, and new ones.
    prefill: float


class Candidates(NamedTuple):
    """The engines that a task may be placed on."""

    #: Those that were looked at: at least one.
    looked_at: list[Candidate]
    #: Number of all of them.
    number: int
    #: Most prompt tokens that any engine caches which takes work.
    best_cached: float


def candidates(
    state: TaskState,
    application: Application,
    pool: EnginePool,
    also: int = 0,
    breaks: Callable[[int, float], int] | None = None,
) -> Candidates | None:
    """Look at engines that could hold the task and have room for its sequences.

    An idle engine has room for any task. If no engine could hold it, every engine counts as if it
    could.

    Args:
        state: of the task.
        application: whose task it is.
        pool: the engines.
        also: a set of rows to look at in any case.
        breaks: tells which promises a row breaks with a number of tokens to compute; the larger the
            number, the worse. None: nothing is promised.

    Returns:
        None: there is no such engine.
    """
    there = pool.accepting & ~(pool.batch_full & pool.busy)
    if not there:
        return None
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
    # Rows that are known to cache so much, of those that are looked at next.
    known, known_hit = 0, 0.0
    if block < 0:
        # Engines have blocks of several sizes: the depth alone does not say what they cache.
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
    # Engines differ by load and cache alone.
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
                # Those with more sequences that hold nothing of the prompt are no cheaper.
                rows = held
            known = 0
            if rows and load.is_integer():
                # Nothing is queued there.
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
    """Prompt tokens that tasks placed on a row need as well, and that it has not computed."""
    prefix, block = state.task.prefix, pool.table.scalars.block_tokens[row]
    claimed = pool.prefixes.claimed_on(row, prefix)
    if not claimed:
        return 0.0
    return max(claimed - pool.prefixes.stored_on(row, prefix), 0) * block
