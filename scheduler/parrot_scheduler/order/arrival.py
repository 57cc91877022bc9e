"""Orders by arrival: of tasks, and of applications."""

from __future__ import annotations

from parrot_scheduler.application import Application
from parrot_scheduler.order.ranked import ApplicationOrder, TaskOrder
from parrot_scheduler.task_state import TaskState


class Fcfs(TaskOrder):
    """First come, first served: knows neither tenants, applications nor priorities."""

    name = "fcfs"

    def rank(self, state: TaskState) -> tuple[float, ...]:
        """By submission."""
        return (state.sequence,)


class ApplicationFifo(ApplicationOrder):
    """The Parrot paper's order: all ready tasks of the application that came first go first.

    Within an application tasks go in order of submission, which is topological, as published
    (arXiv 2405.19888, sections 5.2 and 5.4).
    """

    name = "application-fifo"

    def rank(self, application: Application) -> tuple[float, ...]:
        """By arrival."""
        return (application.arrived_at, application.sequence)
