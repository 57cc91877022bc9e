"""Unplaced tasks of one model, indexed by bound engine and by group."""

from __future__ import annotations

from collections import OrderedDict

from parrot_scheduler.lazy_heap import LazyHeap
from parrot_scheduler.task import EngineId, TaskId
from parrot_scheduler.task_state import TaskState


class WaitingTasks:
    """Unplaced tasks in order of submission; held, queued and blocked alike."""

    def __init__(self) -> None:
        self._tasks: OrderedDict[TaskId, TaskState] = OrderedDict()
        self._bound: dict[EngineId, dict[TaskId, TaskState]] = {}
        # Queued members of each task group, largest working set first.
        self._groups: dict[str, LazyHeap[TaskState]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def num_groups(self) -> int:
        """Return the number of task groups with queued members."""
        return len(self._groups)

    def add(self, state: TaskState) -> None:
        task = state.task
        self._tasks[task.id] = state
        if task.bound_to is not None:
            self._bound.setdefault(task.bound_to, {})[task.id] = state

    def remove(self, state: TaskState) -> None:
        task = state.task
        del self._tasks[task.id]
        if task.bound_to is not None:
            bound = self._bound[task.bound_to]
            del bound[task.id]
            if not bound:
                del self._bound[task.bound_to]

    def oldest(self) -> TaskState | None:
        return next(iter(self._tasks.values()), None)

    def all(self) -> list[TaskState]:
        """Return a copy of all tasks as a list."""
        return list(self._tasks.values())

    def bound_to(self, engine_id: EngineId) -> list[TaskState]:
        """Return a copy of the tasks that only this engine can run, as a list."""
        return list(self._bound.get(engine_id, {}).values())

    def join_groups(self, state: TaskState) -> None:
        """Index a task by group after it was queued or its groups changed."""
        for group in state.groups:
            members = self._groups.setdefault(group.id, LazyHeap())
            members.push(state, (-state.working_set, state.sequence))

    def leave_groups(self, state: TaskState) -> None:
        """Remove a task from its groups before they change, or because it is no longer queued."""
        for group in state.groups:
            members = self._groups.get(group.id)
            if members is not None:
                members.remove(state)
                if not members:
                    del self._groups[group.id]

    def largest_of(self, group_id: str) -> TaskState | None:
        """Return the queued member of a group with the largest working set; None if it has none."""
        members = self._groups.get(group_id)
        return None if members is None else members.first()
