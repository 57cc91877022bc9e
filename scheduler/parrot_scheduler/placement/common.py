"""What placement policies share: eligible engines, cached tokens, engines of task groups."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from parrot_scheduler.engines.pool import EnginePool
from parrot_scheduler.engines.table import Column
from parrot_scheduler.prefix_index.index import chain_of
from parrot_scheduler.task import EngineId
from parrot_scheduler.task_state import Application, TaskState

Mask = npt.NDArray[np.bool_]


def any_of(mask: Mask) -> bool:
    """Whether any row is set; faster than `mask.any()` for the usual numbers of engines."""
    return bool(mask.item(mask.argmax())) if len(mask) else False


def argmin(cost: Column, ties: Column) -> int:
    """The row of the smallest cost, ties to the smallest of `ties`, then to the first row."""
    return int(np.where(cost == cost.min(), ties, np.inf).argmin())


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


def _hidden_blocks(state: TaskState) -> int:
    return 2 if state.task.template else 1


def _hidden_tokens(state: TaskState, application: Application) -> tuple[int, int]:
    """Tokens that the two keys of an engine without visible blocks stand for: both, the first."""
    beginning = state.task.template_tokens
    return max(application.context_tokens, beginning), beginning


class GroupPlacements:
    """Engines where members of each task group were placed, in order; bounded, oldest out first.

    A task in several groups counts with all of them, so that groups that overlap come together as
    far as there is room.
    """

    def __init__(self, max_groups: int = 10_000) -> None:
        self._max_groups = max_groups
        self._engines: OrderedDict[str, list[EngineId]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._engines)

    def rows(self, state: TaskState, pool: EnginePool) -> list[int]:
        """Rows of the engines of a task's groups that are still here, each once."""
        rows: dict[int, None] = {}
        for group in state.groups:
            for engine_id in self._engines.get(group.id, ()):
                row = pool.row_of(engine_id)
                if row >= 0:
                    rows[row] = None
        return list(rows)

    def add(self, state: TaskState, row: int, pool: EnginePool) -> None:
        engine_id = pool.table.ids[row]
        for group in state.groups:
            engines = self._engines.setdefault(group.id, [])
            self._engines.move_to_end(group.id)
            if engine_id not in engines:
                engines.append(engine_id)
        while len(self._engines) > self._max_groups:
            self._engines.popitem(last=False)


def group_size(state: TaskState) -> int:
    """Members of the largest group that the task is in; 1 without one."""
    if not state.groups:
        return 1
    return max(group.size for group in state.groups)
