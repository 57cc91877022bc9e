"""Everything is admitted at once."""

from __future__ import annotations

from parrot_scheduler.application import Application
from parrot_scheduler.engines.pool import EnginePool
from parrot_scheduler.policy import AdmissionPolicy
from parrot_scheduler.task_state import TaskState


class Open(AdmissionPolicy):
    """No application is ever held."""

    name = "open"

    def may_enter(
        self, application: Application, first: TaskState, pool: EnginePool, now: float
    ) -> bool:
        """Always."""
        return True
