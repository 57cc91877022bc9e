"""Everybody enters at once."""

from __future__ import annotations

from collections.abc import Iterable

from parrot_scheduler.engines.pool import Pool
from parrot_scheduler.policy import Application, Waiting
from parrot_scheduler.task_state import Entry


class Open:
    """No application is ever held."""

    name = "open"

    def may_enter(self, application: Application, first: Entry, pool: Pool, now: float) -> bool:
        """Always."""
        return True

    def next_of(self, held: Iterable[Waiting], pool: Pool, now: float) -> Application | None:
        """The first one."""
        return next((waiting.application for waiting in held), None)

    def entered(self, entry: Entry, application: Application, pool: Pool) -> None:
        """Nothing is remembered of tasks."""

    def placed(self, entry: Entry, application: Application, pool: Pool) -> None:
        """Nothing is remembered of tasks."""

    def ended(self, entry: Entry, application: Application, pool: Pool) -> None:
        """Nothing is remembered of tasks."""
