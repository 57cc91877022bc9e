"""Small policies as users bring them, named by import path in settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from parrot_scheduler.engines.pool import EnginePool
from parrot_scheduler.engines.table import rows_of
from parrot_scheduler.policy import EngineChoice, PlacementPolicy
from parrot_scheduler.task_state import Application, TaskState

TURNS = "harness.own_policies:Turns"
STAYS = "harness.own_policies:Stays"


class Turns(PlacementPolicy):
    """The next engine that takes work, whatever it holds or does."""

    name = "turns"
    setup: ClassVar[Mapping[str, Any]] = {"admission": "open", "order": "fcfs", "keep": "none"}

    def __init__(self) -> None:
        self._last = -1

    def place(
        self, state: TaskState, application: Application, pool: EnginePool, now: float
    ) -> EngineChoice | None:
        rows = list(rows_of(pool.accepting))
        if not rows:
            return None
        row = next((row for row in rows if row > self._last), rows[0])
        return EngineChoice(row, "turn", 0, len(rows), 0.0)

    def placed(self, state: TaskState, choice: EngineChoice, pool: EnginePool, now: float) -> None:
        self._last = choice.row


class Stays(Turns):
    """The engine of the task's group, or of its application's last task; else the next one."""

    name = "stays"

    def place(
        self, state: TaskState, application: Application, pool: EnginePool, now: float
    ) -> EngineChoice | None:
        row = pool.row_of(application.last_engine)
        if row < 0:
            return super().place(state, application, pool, now)
        return EngineChoice(row, "group" if state.groups else "session", 0, 1, 0.0)


class Unfinished(PlacementPolicy):
    """A policy without the method that decides."""

    name = "unfinished"


class Misconfigured(Turns):
    """A policy whose set-up names what is no setting."""

    setup: ClassVar[Mapping[str, Any]] = {"colour": "green"}


def not_a_class() -> None:
    """Nothing to place tasks with."""
