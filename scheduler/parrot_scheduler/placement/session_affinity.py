"""An application stays on its engine."""

from __future__ import annotations

from parrot_scheduler.application import Application
from parrot_scheduler.engines.pool import EnginePool
from parrot_scheduler.placement.common import choice, eligible_rows
from parrot_scheduler.placement.least_loaded import least_loaded_row
from parrot_scheduler.policy import EngineChoice, PlacementPolicy
from parrot_scheduler.task_state import TaskState


class SessionAffinity(PlacementPolicy):
    """The engine of the application's last task, however loaded; else the least loaded one."""

    name = "session-affinity"

    def place(
        self, state: TaskState, application: Application, pool: EnginePool, now: float
    ) -> EngineChoice | None:
        """Its last engine while that takes work; None without engines."""
        mask = eligible_rows(state, pool)
        row, decided_by = pool.row_of(application.last_engine), "session"
        if row < 0 or not mask[row]:
            row, decided_by = least_loaded_row(mask, pool), "load"
        if row < 0:
            return None
        load = float(pool.table.batch[row])
        return choice(state, application, pool, row, decided_by, candidates=mask, cost=load)

    def placed(self, state: TaskState, choice: EngineChoice, pool: EnginePool, now: float) -> None:
        """The application itself remembers its engine."""
