"""Updates of a task that come after its call: the task it goes to."""

from __future__ import annotations

from dataclasses import replace

from parrot_scheduler.events import TaskUpdated

from parrot_gateway.calls.metadata import CallMetadata
from parrot_gateway.routing.task_updates import TaskUpdater


def test_a_try_that_ends_late_is_not_the_next_one() -> None:
    """A call that is tried again may have its new task before the old one is closed."""
    updates: list[TaskUpdated] = []
    updater = TaskUpdater(updates.append, lambda metadata: replace(metadata, successors=2))
    call = CallMetadata(call="call_1")
    updater.submitted(call, 1)
    updater.submitted(call, 2)
    updater.ended("call_1", 1)
    updater.changed("call_1")
    assert updates == [TaskUpdated(2, successors=2)]
    updater.ended("call_1", 2)
    updater.changed("call_1")
    assert (len(updater), len(updates)) == (0, 1)
