"""Passes on to the scheduler what becomes known of sessions' calls after their submission."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from parrot_scheduler.events import TaskUpdated

from parrot_gateway.calls.metadata import CallMetadata


@dataclass(slots=True)
class _Known:
    """A task, and what the scheduler knows of its call."""

    task_id: int
    metadata: CallMetadata


class TaskUpdater:
    """The tasks of sessions' calls that have not ended. Used in the event loop's thread only.

    Args:
        notify: informs the scheduler.
        current_metadata: gives what is known of a call now.
    """

    def __init__(
        self,
        notify: Callable[[TaskUpdated], None],
        current_metadata: Callable[[CallMetadata], CallMetadata],
    ) -> None:
        self._notify = notify
        self._current_metadata = current_metadata
        #: By call; its tries are one after another, so that the last one counts.
        self._known: dict[str, _Known] = {}

    def __len__(self) -> int:
        """Calls whose tasks have not ended."""
        return len(self._known)

    def now(self, metadata: CallMetadata) -> CallMetadata:
        """Return what is known of a session's call by now."""
        return self._current_metadata(metadata)

    def submitted(self, metadata: CallMetadata, task_id: int) -> None:
        """The scheduler has this task of a session's call, and knows so much of it."""
        self._known[metadata.call] = _Known(task_id, metadata)

    def ended(self, call_id: str, task_id: int) -> None:
        """The task has ended."""
        known = self._known.get(call_id)
        if known is not None and known.task_id == task_id:
            del self._known[call_id]

    def changed(self, call_id: str) -> None:
        """Notify the scheduler of what has changed in what is known of a call."""
        known = self._known.get(call_id)
        if known is None:
            return
        before, known.metadata = known.metadata, self._current_metadata(known.metadata)
        event = difference(known.task_id, before, known.metadata)
        if event is not None:
            self._notify(event)


def difference(task_id: int, before: CallMetadata, after: CallMetadata) -> TaskUpdated | None:
    """The update that the scheduler needs, or None."""
    event = TaskUpdated(
        task_id,
        objective=None if before.objective == after.objective else after.objective,
        groups=None if before.groups == after.groups else after.groups,
        successors=None if before.successors == after.successors else after.successors,
    )
    return None if event == TaskUpdated(task_id) else event
