"""Turns by age: tasks that waited very long get every fourth placement, oldest first."""

from __future__ import annotations

from parrot_scheduler.lazy_heap import LazyHeap
from parrot_scheduler.task_state import TaskState

#: One placement in so many goes to the oldest of the tasks that waited too long.
SHARE = 4


class Aging:
    """Which task is due because it waited longer than `starvation_s` seconds.

    A queued task older than `starvation_s` with k older ones in the queue is placed after at most
    `SHARE * (k + 1)` further placements, as long as there is room for it.
    """

    def __init__(self, starvation_s: float) -> None:
        self._starvation_s = starvation_s
        self._queue: LazyHeap[TaskState] = LazyHeap()
        # Placements since the last turn by age.
        self._since = 0

    def add(self, state: TaskState) -> None:
        """A task waits from now on, or again."""
        self._queue.push(state, state.sequence)

    def remove(self, state: TaskState) -> None:
        """A task waits no more, or is blocked."""
        self._queue.remove(state)

    def due(self, now: float) -> TaskState | None:
        """The oldest starving task, if this is a turn by age; None otherwise."""
        if self._since < SHARE - 1:
            return None
        oldest = self._queue.first()
        if oldest is None or now - oldest.submitted_at < self._starvation_s:
            return None
        return oldest

    def placed(self, state: TaskState, now: float) -> None:
        """A task has been placed."""
        if now - state.submitted_at >= self._starvation_s and self.due(now) is state:
            self._since = 0
        else:
            self._since += 1
        self._queue.remove(state)
