"""Where the members of task groups are: a group has few homes, and its members go there."""

from __future__ import annotations

from collections import OrderedDict

from parrot_scheduler.engines.pool import Pool
from parrot_scheduler.task import EngineId
from parrot_scheduler.task_state import Entry


class GroupHomes:
    """Engines where members of each task group were placed, in order; bounded, oldest out first.

    A task may be in several groups: the homes of all of them are its own, so that groups that
    overlap come together as far as there is room.
    """

    def __init__(self, max_groups: int = 10_000) -> None:
        self._max_groups = max_groups
        self._homes: OrderedDict[str, list[EngineId]] = OrderedDict()

    def __len__(self) -> int:
        """Groups that are remembered."""
        return len(self._homes)

    def rows(self, entry: Entry, pool: Pool) -> list[int]:
        """Rows of the homes that are still here, each once."""
        rows: dict[int, None] = {}
        for group in entry.groups:
            for engine_id in self._homes.get(group.id, ()):
                row = pool.row_of(engine_id)
                if row >= 0:
                    rows[row] = None
        return list(rows)

    def add(self, entry: Entry, row: int, pool: Pool) -> None:
        """A member was placed on a row."""
        engine_id = pool.table.ids[row]
        for group in entry.groups:
            homes = self._homes.setdefault(group.id, [])
            self._homes.move_to_end(group.id)
            if engine_id not in homes:
                homes.append(engine_id)
        while len(self._homes) > self._max_groups:
            self._homes.popitem(last=False)


def group_size(entry: Entry) -> int:
    """Members of the largest group that the task is in; 1 without one."""
    if not entry.groups:
        return 1
    return max(group.size for group in entry.groups)
