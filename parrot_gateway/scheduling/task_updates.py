"""Updates of submitted tasks: what becomes known of a call while it waits or runs.

The scheduler hears of it as `TaskUpdated`. An engine that runs the call already does not: it keeps
the priority that the call began with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from parrot_scheduler.events import TaskUpdated

from parrot_gateway.generation.placing import Purpose
from parrot_gateway.scheduling.runner import PlacementRequest, SchedulerRunner
from parrot_gateway.scheduling.tasks import group_refs, scheduler_objective


@dataclass(slots=True)
class _Known:
    """A task, and what the scheduler knows of its call."""

    request: PlacementRequest
    purpose: Purpose


class TaskUpdater:
    """The tasks of sessions' calls that have not ended. Used in the event loop's thread only.

    Args:
        runner: the scheduler.
        current_metadata: gives what is known of a call now.
    """

    def __init__(
        self, runner: SchedulerRunner, current_metadata: Callable[[Purpose], Purpose]
    ) -> None:
        self._runner = runner
        self._current_metadata = current_metadata
        #: By call; its tries are one after another, so that the last one counts.
        self._known: dict[str, _Known] = {}

    def __len__(self) -> int:
        """Calls whose tasks have not ended."""
        return len(self._known)

    def now(self, purpose: Purpose) -> Purpose:
        """What is known of the call by now."""
        return self._current_metadata(purpose) if purpose.call else purpose

    def submitted(self, purpose: Purpose, request: PlacementRequest) -> None:
        """The scheduler has this task, and knows so much of it."""
        if purpose.call:
            self._known[purpose.call] = _Known(request, purpose)

    def ended(self, purpose: Purpose, request: PlacementRequest) -> None:
        """The task has ended."""
        known = self._known.get(purpose.call)
        if known is not None and known.request is request:
            del self._known[purpose.call]

    def changed(self, call_id: str) -> None:
        """Something else holds for a call; the scheduler is told what."""
        known = self._known.get(call_id)
        if known is None:
            return
        before, known.purpose = known.purpose, self._current_metadata(known.purpose)
        event = difference(known.request.task.id, before, known.purpose)
        if event is not None:
            self._runner.notify(event)


def difference(task_id: int, before: Purpose, after: Purpose) -> TaskUpdated | None:
    """The update that the scheduler needs, or None."""
    event = TaskUpdated(
        task_id,
        objective=(
            None if before.objective == after.objective else scheduler_objective(after.objective)
        ),
        groups=None if before.groups == after.groups else group_refs(after),
        successors=None if before.successors == after.successors else after.successors,
    )
    return None if event == TaskUpdated(task_id) else event
