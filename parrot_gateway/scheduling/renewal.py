"""What becomes known of a call after its task was handed in: a stronger wait, company in its group.

The scheduler hears of it as `TaskUpdated`. An engine that runs the call already does not: it keeps
the priority that the call began with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from parrot_scheduler.events import TaskUpdated

from parrot_gateway.generation.placing import Purpose
from parrot_gateway.scheduling.shell import SchedulerShell, Ticket
from parrot_gateway.scheduling.tasks import group_refs, scheduler_objective


@dataclass(slots=True)
class _Told:
    """A task, and what the scheduler was told last of its call."""

    ticket: Ticket
    purpose: Purpose


class Renewal:
    """The tasks of sessions' calls that have not ended. Used in the event loop's thread only.

    Args:
        shell: the scheduler.
        renewed: gives what is known of a call now.
    """

    def __init__(self, shell: SchedulerShell, renewed: Callable[[Purpose], Purpose]) -> None:
        self._shell = shell
        self._renewed = renewed
        #: By call; its tries are one after another, so that the last one counts.
        self._told: dict[str, _Told] = {}

    def __len__(self) -> int:
        """Calls whose tasks have not ended."""
        return len(self._told)

    def now(self, purpose: Purpose) -> Purpose:
        """What is known of the call by now."""
        return self._renewed(purpose) if purpose.call else purpose

    def submitted(self, purpose: Purpose, ticket: Ticket) -> None:
        """The scheduler has this task, and knows so much of it."""
        if purpose.call:
            self._told[purpose.call] = _Told(ticket, purpose)

    def ended(self, purpose: Purpose, ticket: Ticket) -> None:
        """The task has ended."""
        told = self._told.get(purpose.call)
        if told is not None and told.ticket is ticket:
            del self._told[purpose.call]

    def changed(self, call_id: str) -> None:
        """Something else holds for a call; the scheduler is told what."""
        told = self._told.get(call_id)
        if told is None:
            return
        before, told.purpose = told.purpose, self._renewed(told.purpose)
        event = difference(told.ticket.task.id, before, told.purpose)
        if event is not None:
            self._shell.tell(event)


def difference(task_id: int, before: Purpose, after: Purpose) -> TaskUpdated | None:
    """What the scheduler has to be told; None: nothing."""
    event = TaskUpdated(
        task_id,
        objective=(
            None if before.objective == after.objective else scheduler_objective(after.objective)
        ),
        groups=None if before.groups == after.groups else group_refs(after),
        successors=None if before.successors == after.successors else after.successors,
    )
    return None if event == TaskUpdated(task_id) else event
