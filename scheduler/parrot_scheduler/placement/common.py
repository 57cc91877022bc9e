"""What placement policies share: eligible engines, cached tokens, and the form of an answer."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from parrot_scheduler.application import Application
from parrot_scheduler.engines.pool import EnginePool
from parrot_scheduler.engines.table import Column
from parrot_scheduler.policy import EngineChoice
from parrot_scheduler.prefix_index.index import chain_of
from parrot_scheduler.task_state import TaskState

Mask = npt.NDArray[np.bool_]


def any_of(mask: Mask) -> bool:
    """Whether any row is set; faster than `mask.any()` for the usual numbers of engines."""
    return bool(mask.item(mask.argmax())) if len(mask) else False


def eligible_rows(state: TaskState, pool: EnginePool) -> Mask:
    """Engines that take work and could hold the task if they were empty.

    Where none could, all that take work: policies refuse no tasks.
    """
    table = pool.table
    large_enough = table.accepts & (
        table.capacity >= state.task.prompt_tokens + state.expected_output
    )
    return large_enough if any_of(large_enough) else table.accepts


def cached_tokens(state: TaskState, application: Application, pool: EnginePool) -> Column:
    """Prompt tokens that each engine caches or is about to cache.

    At least one token of the prompt stays to be computed; 0 for engines that take no work.
    """
    task, table, num_rows = state.task, pool.table, len(pool.table.accepts)
    tokens: Column | None = None
    blocks = pool.prefixes.depths(task.prefix, num_rows)
    if blocks is not None:
        tokens = blocks * table.block_tokens
    hidden = pool.prefixes.depths(chain_of(task, 0), num_rows)
    if hidden is not None:
        whole, beginning = _hidden_tokens(state, application)
        seen = np.where(hidden == _hidden_blocks(state), whole, beginning) * (hidden > 0)
        tokens = seen if tokens is None else np.maximum(tokens, seen)
    if tokens is None:
        return np.zeros(num_rows)
    capped: Column = np.minimum(tokens, max(task.prompt_tokens - 1, 0)) * table.accepts
    return capped


def cached_on(state: TaskState, application: Application, pool: EnginePool, row: int) -> int:
    """`cached_tokens` for one engine."""
    task = state.task
    block_tokens = int(pool.table.block_tokens[row])
    blocks = pool.prefixes.blocks_on(row, chain_of(task, block_tokens))
    if block_tokens:
        tokens = blocks * block_tokens
    else:
        whole, beginning = _hidden_tokens(state, application)
        tokens = (whole if blocks == _hidden_blocks(state) else beginning) if blocks else 0
    return min(tokens, max(task.prompt_tokens - 1, 0))


def choice(
    state: TaskState,
    application: Application,
    pool: EnginePool,
    row: int,
    decided_by: str,
    *,
    candidates: Mask,
    cost: float,
) -> EngineChoice:
    """An answer of a policy that did not look at caches: with what is cached on the engine."""
    return EngineChoice(
        row=row,
        decided_by=decided_by,
        expected_cached_tokens=cached_on(state, application, pool, row),
        candidates=int(np.count_nonzero(candidates)),
        cost=cost,
    )


def _hidden_blocks(state: TaskState) -> int:
    return 2 if state.task.template else 1


def _hidden_tokens(state: TaskState, application: Application) -> tuple[int, int]:
    """Tokens that the two keys of an engine without visible blocks stand for: both, the first."""
    beginning = state.task.template_tokens
    return max(application.context_tokens, beginning), beginning
