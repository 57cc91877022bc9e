"""What placement policies share: eligible engines, cached tokens, engines of task groups."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from parrot_scheduler.engines.pool import EnginePool
from parrot_scheduler.engines.table import Column, rows_of
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
    """Prompt tokens that each engine caches or is about to cache; 0 for those that take no work."""
    task, prefixes = state.task, pool.prefixes
    tokens = np.zeros(len(pool.table.accepts))
    holders = prefixes.rows_with(task.prefix) | prefixes.rows_with(chain_of(task, 0))
    for row in rows_of(holders & pool.accepting):
        tokens[row] = cached_on(state, application, pool, row)
    return tokens


def cached_on(state: TaskState, application: Application, pool: EnginePool, row: int) -> int:
    """`cached_tokens` for one engine."""
    block = int(pool.table.scalars.block_tokens[row])
    depth = pool.prefixes.blocks_on(row, chain_of(state.task, block))
    return tokens_of(depth, block, state, application)


def tokens_of(depth: int, block: int, state: TaskState, application: Application) -> int:
    """Prompt tokens in so many leading keys, for an engine with blocks of so many tokens.

    At least one token of the prompt stays to be computed. Without visible blocks (0) the first key
    stands for the template, and all of them for the application's context as well.
    """
    task = state.task
    if block:
        tokens = depth * block
    else:
        tokens = task.template_tokens if depth else 0
        if depth == (2 if task.template else 1):
            tokens = max(application.context_tokens, tokens)
    return min(tokens, max(task.prompt_tokens - 1, 0))


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
