"""What a task would have taken on other engines: for explanations, never for decisions.

Computed once a task has been placed, before its engine counts it, for a few engines whatever the
number of all: those that have most of its prompt, and the one with the fewest sequences.
"""

from __future__ import annotations

import numpy as np

from parrot_scheduler.actions import Alternative
from parrot_scheduler.engines.pool import EnginePool, block_keys
from parrot_scheduler.placement.prediction import predict_row
from parrot_scheduler.prefix_index.holders import PrefixHolders, depth_of, rows_of
from parrot_scheduler.task_state import TaskState

#: Engines that are looked at, and that are told beside the chosen one.
_LOOKED_AT = 8
_TOLD = 3


def alternatives(state: TaskState, pool: EnginePool, row: int) -> tuple[Alternative, ...]:
    """The chosen engine, then up to `_TOLD` others, those where the task would end soonest first.

    Args:
        state: the task, not placed yet.
        pool: the engines of its model.
        row: of the chosen one.
    """
    by_block: dict[int, PrefixHolders] = {}
    others = sorted(
        (_on(state, pool, other, by_block) for other in _rows(state, pool, by_block)),
        key=lambda each: each.finish_s,
    )
    chosen = _on(state, pool, row, by_block)
    return (chosen, *[each for each in others if each.engine_id != chosen.engine_id][:_TOLD])


def _holders(
    state: TaskState, pool: EnginePool, block: int, by_block: dict[int, PrefixHolders]
) -> PrefixHolders:
    """Of the prompt, on engines with blocks of so many tokens; looked up once."""
    found = by_block.get(block)
    if found is None:
        found = by_block[block] = pool.prefixes.holders(block_keys(state.task, block))
    return found


def _rows(state: TaskState, pool: EnginePool, by_block: dict[int, PrefixHolders]) -> list[int]:
    """A few engines that take work."""
    accepting = pool.accepting
    if accepting.bit_count() <= _LOOKED_AT:
        return rows_of(accepting)
    rows: list[int] = []
    for bits, _ in _holders(state, pool, max(pool.common_block, 0), by_block):
        here = bits & accepting
        if 0 < here.bit_count() <= _LOOKED_AT:
            rows = rows_of(here)
            break
    table = pool.table
    rows.append(int(np.where(table.accepts, table.batch, np.inf).argmin()))
    return list(dict.fromkeys(rows))


def _on(
    state: TaskState, pool: EnginePool, row: int, by_block: dict[int, PrefixHolders]
) -> Alternative:
    """Its times on one engine, by that engine's step model."""
    task, scalars = state.task, pool.table.scalars
    block = int(scalars.block_tokens[row])
    cached = 0
    if block:
        depth = depth_of(_holders(state, pool, block, by_block), row)
        cached = max(0, min(depth * block, task.prompt_tokens - 1))
    prefill = scalars.pending_prefill[row] + task.prompt_tokens - cached
    return Alternative(
        pool.table.ids[row],
        cached,
        int(scalars.batch[row]),
        predict_row(state, prefill, scalars, row).finish_s,
        pool.has_room(state, row),
    )
