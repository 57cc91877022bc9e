"""Nobody starves: tasks that waited very long get every fourth placement, oldest first."""

from __future__ import annotations

from parrot_scheduler.lazy_heap import LazyHeap
from parrot_scheduler.task_state import Entry

#: One placement in so many goes to the oldest of the tasks that waited too long.
SHARE = 4


class Aging:
    """Which task is due because of its age.

    A queued task older than `starvation_s` with k older ones in the queue is placed after at most
    `SHARE * (k + 1)` further placements, as long as there is room for it.
    """

    def __init__(self, starvation_s: float) -> None:
        self._starvation_s = starvation_s
        self._queue: LazyHeap[Entry] = LazyHeap()
        self._since = 0

    def add(self, entry: Entry) -> None:
        """A task waits from now on, or again."""
        self._queue.push(entry, entry.sequence)

    def remove(self, entry: Entry) -> None:
        """It does not wait any more, or is passed over."""
        self._queue.remove(entry)

    def due(self, now: float) -> Entry | None:
        """The task whose turn it is because of its age, if it is such a turn."""
        if self._since < SHARE - 1:
            return None
        oldest = self._queue.first()
        if oldest is None or now - oldest.submitted_at < self._starvation_s:
            return None
        return oldest

    def placed(self, entry: Entry, now: float) -> None:
        """A task has been placed."""
        if now - entry.submitted_at >= self._starvation_s and self.due(now) is entry:
            self._since = 0
        else:
            self._since += 1
        self._queue.remove(entry)
