"""Base classes for orders by a key, of tasks or of applications and then their tasks; and aging."""

from __future__ import annotations

import math
import random
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable
from heapq import heappop, heappush
from typing import Self

from parrot_scheduler.config import SchedulerConfig
from parrot_scheduler.lazy_heap import LazyHeap
from parrot_scheduler.policy import AdmissionRank, OrderPolicy
from parrot_scheduler.task_state import Application, TaskState

#: One of this many placements goes to the oldest starving task.
AGING_SHARE = 4
#: A queue is compacted once stale entries exceed both the live ones and this number.
_FEW = 64


class Aging:
    """Finds the task that is due because it has waited longer than `starvation_s` seconds.

    A queued task older than `starvation_s` with k older ones in the queue is placed after at most
    `AGING_SHARE * (k + 1)` further placements, while there is room for it.
    """

    def __init__(self, starvation_s: float) -> None:
        self._starvation_s = starvation_s
        self._waiting: set[TaskState] = set()
        # Tasks that came in order of submission, and all others. Both may hold tasks that no longer
        # wait, and duplicates.
        self._came: deque[TaskState] = deque()
        self._late: list[tuple[int, TaskState]] = []
        self._latest = -1
        # Placements since the last one by age.
        self._since = 0

    def add(self, state: TaskState) -> None:
        """Add a task that waits from now on, or again."""
        waiting, sequence = self._waiting, state.sequence
        if state in waiting:
            return
        waiting.add(state)
        if sequence > self._latest:
            self._latest = sequence
            self._came.append(state)
        else:
            heappush(self._late, (sequence, state))
        if len(self._came) + len(self._late) > 2 * len(waiting) + _FEW:
            self._came = deque(sorted(waiting, key=_sequence))
            self._late.clear()

    def remove(self, state: TaskState) -> None:
        """Remove a task that no longer waits, or is blocked."""
        self._waiting.discard(state)

    def due(self, now: float) -> TaskState | None:
        """Return the oldest starving task if this placement goes by age; None otherwise."""
        if self._since < AGING_SHARE - 1:
            return None
        oldest = self._oldest()
        if oldest is None or now - oldest.submitted_at < self._starvation_s:
            return None
        return oldest

    def placed(self, state: TaskState, now: float) -> None:
        if now - state.submitted_at >= self._starvation_s and self.due(now) is state:
            self._since = 0
        else:
            self._since += 1
        self._waiting.discard(state)

    def _oldest(self) -> TaskState | None:
        waiting, came, late = self._waiting, self._came, self._late
        while came and came[0] not in waiting:
            came.popleft()
        while late and late[0][1] not in waiting:
            heappop(late)
        if late and not (came and came[0].sequence < late[0][0]):
            return late[0][1]
        return came[0] if came else None


class RankedOrder(OrderPolicy):
    """Base of orders with blocked tasks, and with placement by age if `aging` is given."""

    def __init__(self, aging: Aging | None = None) -> None:
        self._aging = aging or Aging(math.inf)
        self._application_of: dict[TaskState, Application] = {}
        self._blocked: dict[TaskState, None] = {}
        # A task that came while no other was queued. Most are placed at once, so it is ranked only
        # when needed.
        self._alone: TaskState | None = None

    @classmethod
    def make(cls, config: SchedulerConfig, rng: random.Random) -> Self:
        """Return a new one with placement by age."""
        return cls(Aging(config.starvation_s))

    @abstractmethod
    def _insert(self, state: TaskState, application: Application) -> None:
        """Make a task eligible, or move it to its new rank."""

    @abstractmethod
    def _take_out(self, state: TaskState, application: Application) -> None:
        """Remove a task from the eligible ones."""

    @abstractmethod
    def _lowest(self) -> TaskState | None:
        """Return the task of the lowest rank."""

    def push(self, state: TaskState, application: Application, now: float) -> None:
        queued = self._application_of
        queued[state] = application
        if len(queued) == 1:
            self._alone = state
            return
        self._rank_alone()
        self._offer(state, application)

    def _rank_alone(self) -> None:
        """Rank the task that came alone, before its rank's inputs change."""
        state, self._alone = self._alone, None
        if state is not None:
            self._offer(state, self._application_of[state])

    def _offer(self, state: TaskState, application: Application) -> None:
        self._insert(state, application)
        self._aging.add(state)

    def remove(self, state: TaskState) -> None:
        self._leave(state)

    def _leave(self, state: TaskState) -> Application | None:
        """Remove a task from the queue, blocked or not; return None if it is not queued."""
        application = self._application_of.pop(state, None)
        if application is None:
            return None
        if state is self._alone:
            self._alone = None
        elif state in self._blocked:
            del self._blocked[state]
        else:
            self._take_out(state, application)
            self._aging.remove(state)
        return application

    def update(self, state: TaskState, application: Application, now: float) -> None:
        self._rank_alone()
        if state in self._application_of and state not in self._blocked:
            self._offer(state, application)

    def first(self, now: float) -> TaskState | None:
        return self._alone or self._aging.due(now) or self._lowest()

    def block(self, state: TaskState) -> None:
        self._rank_alone()
        self._take_out(state, self._application_of[state])
        self._aging.remove(state)
        self._blocked[state] = None

    def unblock(self, now: float, states: Iterable[TaskState] | None = None) -> None:
        for state in list(self._blocked) if states is None else states:
            del self._blocked[state]
            self._offer(state, self._application_of[state])

    def pop(self, state: TaskState, application: Application, now: float) -> None:
        self._aging.placed(state, now)
        self._leave(state)

    def __len__(self) -> int:
        return len(self._application_of)


class TaskOrder(RankedOrder):
    """Orders tasks by `rank`, regardless of their application."""

    def __init__(self, aging: Aging | None = None) -> None:
        super().__init__(aging)
        self._queue: LazyHeap[TaskState] = LazyHeap()

    @abstractmethod
    def rank(self, state: TaskState) -> tuple[float, ...]:
        """Return the task's rank: smaller is placed earlier, equal ranks in order of arrival."""

    def admission_rank(
        self, state: TaskState, application: Application, now: float
    ) -> AdmissionRank:
        return AdmissionRank("", self.rank(state))

    def _insert(self, state: TaskState, application: Application) -> None:
        self._queue.push(state, self.rank(state))

    def _take_out(self, state: TaskState, application: Application) -> None:
        self._queue.remove(state)

    def _lowest(self) -> TaskState | None:
        return self._queue.first()


class ApplicationOrder(RankedOrder):
    """Orders applications by `rank`, and the tasks of one application by `rank_task`."""

    def __init__(self, aging: Aging | None = None) -> None:
        super().__init__(aging)
        self._applications: LazyHeap[Application] = LazyHeap()
        self._tasks: dict[Application, LazyHeap[TaskState]] = {}

    @abstractmethod
    def rank(self, application: Application) -> tuple[float, ...]:
        """Return the application's rank: smaller is served earlier. Called again whenever one of
        its tasks ends.
        """

    def rank_task(self, state: TaskState) -> tuple[float, ...]:
        """Return the task's rank within its application. Default: priority, then submission."""
        return (state.priority, state.sequence)

    def admission_rank(
        self, state: TaskState, application: Application, now: float
    ) -> AdmissionRank:
        return AdmissionRank("", self.rank(application))

    def finished(self, state: TaskState, application: Application, now: float) -> None:
        if application in self._tasks:
            self._applications.push(application, self.rank(application))

    def application_finished(self, application: Application, now: float) -> None:
        assert application not in self._tasks, f"{application.id} has queued tasks"

    def _insert(self, state: TaskState, application: Application) -> None:
        tasks = self._tasks.get(application)
        if tasks is None:
            tasks = self._tasks[application] = LazyHeap()
            self._applications.push(application, self.rank(application))
        tasks.push(state, self.rank_task(state))

    def _take_out(self, state: TaskState, application: Application) -> None:
        tasks = self._tasks.get(application)
        if tasks is not None and tasks.remove(state) and not tasks:
            del self._tasks[application]
            self._applications.remove(application)

    def _lowest(self) -> TaskState | None:
        application = self._applications.first()
        return None if application is None else self._tasks[application].first()


def _sequence(state: TaskState) -> int:
    return state.sequence
