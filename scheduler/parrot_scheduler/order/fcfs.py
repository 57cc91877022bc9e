"""First come, first served."""

from __future__ import annotations

from parrot_scheduler.order.ranked import TaskOrder
from parrot_scheduler.task_state import TaskState


class Fcfs(TaskOrder):
    """Tasks in order of submission. Knows neither tenants, applications nor priorities."""

    name = "fcfs"

    def rank(self, state: TaskState) -> tuple[float, ...]:
        """By submission."""
        return (state.sequence,)
