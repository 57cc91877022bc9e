"""Which engines members of task groups were placed on, to place further members with them."""

from __future__ import annotations

from collections import OrderedDict

from parrot_scheduler.engines.pool import EnginePool
from parrot_scheduler.task import EngineId
from parrot_scheduler.task_state import TaskState


class GroupPlacements:
    """Engines where members of each task group were placed, in order; bounded, oldest out first.

    A task in several groups counts with all of them, so that groups that overlap come together as
    far as there is room.
    """

    def __init__(self, max_groups: int = 10_000) -> None:
        self._max_groups = max_groups
        self._engines: OrderedDict[str, list[EngineId]] = OrderedDict()

    def __len__(self) -> int:
        """Groups that are remembered."""
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
        """A member was placed on a row."""
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
