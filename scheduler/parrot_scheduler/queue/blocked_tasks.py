"""Queued tasks that found no engine, until something changes that matters to them.

Most of what waits waits for the same thing as a moment ago, and a search for each task whenever any
task ends would cost too much. So each blocked task keeps what it waits for, and is tried again when
that comes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from parrot_scheduler.engines.pool import EnginePool
from parrot_scheduler.placement.prediction import total_cost_terms
from parrot_scheduler.policy import EngineWait
from parrot_scheduler.prefix_index.holders import rows_of
from parrot_scheduler.task_state import TaskState

#: Where more rows than this have changed at once, all waiting tasks are tried again.
_MANY_ROWS = 4


class BlockedTasks:
    """Blocked tasks, each with what it waits for, in the order in which they were blocked."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self._waiting: dict[TaskState, EngineWait] = {}
        #: Tasks without room, with the least tokens that they need of an engine.
        self._without_room: dict[TaskState, float] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._without_room)

    def __contains__(self, state: object) -> bool:
        return state in self._waiting or state in self._without_room

    @property
    def num_without_room(self) -> int:
        """Tasks that no engine had room for, or might take as things were."""
        return len(self._without_room)

    def add(self, state: TaskState, wait: EngineWait | None) -> None:
        """Block a task; `wait` None: no engine has room for it, or may take it as things are."""
        self.discard(state)
        if wait is None:
            self._without_room[state] = self._pool.least_need(state)
        else:
            self._waiting[state] = wait

    def discard(self, state: TaskState) -> None:
        """The task is queued no more, or back in the order; unknown ones do nothing."""
        if self._waiting.pop(state, None) is None:
            self._without_room.pop(state, None)

    def clear(self) -> None:
        self._waiting.clear()
        self._without_room.clear()

    def fitting(self, freed_rows: int, starving_since: float) -> list[TaskState]:
        """Tasks without room that may fit on these rows now (bit r for row r), and those that were
        submitted before `starving_since`.
        """
        if not self._without_room or not freed_rows:
            return []
        free = self._most_free(rows_of(freed_rows) if freed_rows.bit_count() <= _MANY_ROWS else [])
        return [
            state
            for state, need in self._without_room.items()
            if need <= free or state.submitted_at <= starving_since
        ]

    def awaited(self, freed_rows: int, now: float) -> Iterator[TaskState]:
        """Tasks waiting for an engine that are to be tried again: there is more room or less to do
        on these rows (bit r for row r), or they have waited for long enough.

        Tasks may be placed meanwhile: whether there is still room is not checked.
        """
        if not self._waiting or not freed_rows:
            return
        pool = self._pool
        rows = rows_of(freed_rows) if freed_rows.bit_count() <= _MANY_ROWS else []
        terms = [total_cost_terms(pool.table, row) for row in rows]
        for state, wait in list(self._waiting.items()):
            wanted, until, total_cost_s, new, tokens, steps = wait
            if wanted & freed_rows or until <= now or not rows:
                yield state
                continue
            for queued_s, new_token_s, step_s, token_s in terms:
                cost_s = queued_s + new * new_token_s + (step_s + tokens * token_s) * steps
                if cost_s <= total_cost_s:
                    yield state
                    break

    def _most_free(self, rows: list[int]) -> float:
        if not rows:
            return math.inf
        scalars = self._pool.table.scalars
        # An engine with nothing to do takes what is larger than it, too.
        return max(
            scalars.capacity[row] - scalars.working_set[row] if scalars.batch[row] else math.inf
            for row in rows
        )
