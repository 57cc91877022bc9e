"""Updates of submitted tasks: what becomes known of a call while it waits or runs.

The scheduler hears of it as `TaskUpdated`. An engine that runs the call already does not: it keeps
the priority that the call began with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from parrot_scheduler.events import TaskUpdated

from parrot_gateway.generation.placement import CallMetadata
from parrot_gateway.scheduling.runner import PlacementRequest, SchedulerRunner


@dataclass(slots=True)
class _Known:
    """A task, and what the scheduler knows of its call."""

    request: PlacementRequest
    metadata: CallMetadata


class TaskUpdater:
    """The tasks of sessions' calls that have not ended. Used in the event loop's thread only.

    Args:
        runner: the scheduler.
        current_metadata: gives what is known of a call now.
    """

    def __init__(
        self, runner: SchedulerRunner, current_metadata: Callable[[CallMetadata], CallMetadata]
    ) -> None:
        self._runner = runner
        self._current_metadata = current_metadata
        #: By call; its tries are one after another, so that the last one counts.
        self._known: dict[str, _Known] = {}

    def __len__(self) -> int:
        """Calls whose tasks have not ended."""
        return len(self._known)

    def now(self, metadata: CallMetadata) -> CallMetadata:
        """What is known of the call by now."""
        return self._current_metadata(metadata) if metadata.call else metadata

    def submitted(self, metadata: CallMetadata, request: PlacementRequest) -> None:
        """The scheduler has this task, and knows so much of it."""
        if metadata.call:
            self._known[metadata.call] = _Known(request, metadata)

    def ended(self, metadata: CallMetadata, request: PlacementRequest) -> None:
        """The task has ended."""
        known = self._known.get(metadata.call)
        if known is not None and known.request is request:
            del self._known[metadata.call]

    def changed(self, call_id: str) -> None:
        """What is known of a call has changed; notify the scheduler of the difference."""
        known = self._known.get(call_id)
        if known is None:
            return
        before, known.metadata = known.metadata, self._current_metadata(known.metadata)
        event = difference(known.request.task.id, before, known.metadata)
        if event is not None:
            self._runner.notify(event)


def difference(task_id: int, before: CallMetadata, after: CallMetadata) -> TaskUpdated | None:
    """The update that the scheduler needs, or None."""
    event = TaskUpdated(
        task_id,
        objective=None if before.objective == after.objective else after.objective,
        groups=None if before.groups == after.groups else after.groups,
        successors=None if before.successors == after.successors else after.successors,
    )
    return None if event == TaskUpdated(task_id) else event
