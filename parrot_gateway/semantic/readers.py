"""Waits for variables. Deduction uses them, and they keep the variables' sessions alive."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from parrot_scheduler.task import LATENCY, Objective

from parrot_gateway.exceptions import DeadlineError
from parrot_gateway.semantic.execution.objective_tracker import ObjectiveTracker
from parrot_gateway.semantic.sessions import SessionStore
from parrot_gateway.semantic.variable import Variable


@dataclass(eq=False)
class Readers:
    """All waits for variables. Used only in the event loop's thread."""

    sessions: SessionStore
    objectives: ObjectiveTracker
    #: Default time limit of `value`.
    timeout_s: float
    #: Current number of waits.
    count: int = 0

    async def wait(
        self,
        variable: Variable,
        timeout_s: float,
        *,
        objective: Objective | None = LATENCY,
        after: int | None = None,
    ) -> bool:
        """Wait until a variable is final; return false after `timeout_s`.

        Args:
            objective: of the wait, for deduction; None leaves deduction alone.
            after: return also once it has more characters than this.
        """
        if variable.is_final or (after is not None and variable.text_after(after)):
            return True
        has_changed = asyncio.get_running_loop().create_future()

        def changed(_: Variable) -> None:
            if not has_changed.done():
                has_changed.set_result(None)

        unsubscribe = variable.subscribe(changed, last_only=after is None)
        session = self.sessions.owner_of(variable)
        if session is not None:
            session.pin()
        self.count += 1
        if objective is not None:
            self.objectives.begin_wait(variable, objective)
        try:
            async with asyncio.timeout(timeout_s):
                await has_changed
        except TimeoutError:
            return False
        finally:
            self.count -= 1
            if objective is not None:
                self.objectives.end_wait(variable)
            if session is not None:
                session.unpin()
            unsubscribe()
        return True

    async def value(
        self, variable: Variable, timeout_s: float | None = None, objective: Objective = LATENCY
    ) -> str:
        """Return the text of a variable once it is ready.

        Raises:
            DependencyFailedError: it failed or was cancelled.
            DeadlineError: it was not ready in time.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        if not await self.wait(variable, limit_s, objective=objective):
            raise DeadlineError(
                f"Variable '{variable.name}' had no value within {limit_s:g} s; it goes on.",
                param="variable",
            )
        if variable.failure is not None:
            raise variable.failure.to_error(variable.name)
        return variable.value or ""

    async def values(self, variables: Mapping[str, Variable], timeout_s: float) -> dict[str, str]:
        """Return the texts of variables by id, once all are ready.

        Raises:
            DependencyFailedError, DeadlineError: as `value`.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        return {
            variable_id: await self.value(variable, max(0.0, deadline - loop.time()))
            for variable_id, variable in variables.items()
        }
