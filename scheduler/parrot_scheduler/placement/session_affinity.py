"""An application stays on its engine."""

from __future__ import annotations

from parrot_scheduler.engines.pool import Pool
from parrot_scheduler.placement.common import candidates, choice
from parrot_scheduler.placement.least_loaded import least_loaded_row
from parrot_scheduler.policy import Application, Choice
from parrot_scheduler.task_state import Entry


class SessionAffinity:
    """The engine of the application's last task, however loaded; else the least loaded one."""

    name = "session-affinity"
    late_binding = False

    def place(
        self, entry: Entry, application: Application, pool: Pool, now: float
    ) -> Choice | None:
        """Its last engine while that takes work; None without engines."""
        mask = candidates(entry, pool)
        row, decided_by = pool.row_of(application.last_engine), "session"
        if row < 0 or not mask[row]:
            row, decided_by = least_loaded_row(mask, pool), "load"
        if row < 0:
            return None
        load = float(pool.table.batch[row])
        return choice(entry, application, pool, row, decided_by, candidates=mask, cost=load)

    def placed(self, entry: Entry, choice: Choice, pool: Pool, now: float) -> None:
        """The application itself remembers its engine."""

    def ended(self, entry: Entry, pool: Pool, now: float) -> None:
        """Nothing is remembered of a task."""
