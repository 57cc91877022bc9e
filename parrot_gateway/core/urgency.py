"""Keeps what each unfinished call is for up to date, as calls and their readers come and go.

`deduction` says what follows from a graph and its waits; here they are remembered, per session, and
deduced anew at most once in a turn of the event loop. What is deduced is never weakened before a
call ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from parrot_gateway.core.deduction import Deduction, deduce
from parrot_gateway.core.graph import CallNode
from parrot_gateway.core.job import Job
from parrot_gateway.core.objective import THROUGHPUT, Objective, stronger
from parrot_gateway.core.session import Session
from parrot_gateway.core.variable import Variable

#: Finished calls whose objectives are carried along until they are cleared away.
_FINISHED_KEPT = 64


class _Wanted(NamedTuple):
    """What somebody waits for: variables, and calls whose clients wait themselves."""

    waited: dict[str, Objective]
    calls: dict[str, Objective]


class Urgency:
    """The objectives of all sessions' calls. Used in the event loop's thread only.

    Args:
        owner_of: gives the session of a variable.
    """

    def __init__(self, owner_of: Callable[[Variable], Session | None]) -> None:
        self._owner_of = owner_of
        self._deductions: dict[str, Deduction] = {}
        #: By variable, what the strongest of those that wait for it wants, and how many they are.
        self._waits: dict[str, tuple[Objective, int]] = {}
        #: What came up since the last deduction.
        self._wanted: dict[Session, _Wanted] = {}

    @property
    def num_waited(self) -> int:
        """Variables that somebody waits for."""
        return len(self._waits)

    def begin_wait(self, variable: Variable, objective: Objective) -> None:
        """Somebody waits for a variable; pair with `end_wait`."""
        known, count = self._waits.get(variable.id, (objective, 0))
        self._waits[variable.id] = (stronger(known, objective), count + 1)
        session = self._owner_of(variable)
        if session is not None:
            self._note(session).waited[variable.id] = stronger(known, objective)

    def end_wait(self, variable: Variable) -> None:
        """One of those that wait for a variable does so no more."""
        objective, count = self._waits[variable.id]
        if count > 1:
            self._waits[variable.id] = (objective, count - 1)
        else:
            del self._waits[variable.id]

    def want_call(self, session: Session, call_id: str, objective: Objective) -> None:
        """Somebody waits for the answer of a call, or gave it an objective."""
        self._note(session).calls[call_id] = objective

    def inherit(self, session: Session, output: Variable | None) -> None:
        """A producer that comes after those who wait for it is as urgent as they are."""
        if output is None:
            return
        if output.id in self._waits:
            self._note(session).waited[output.id] = self._waits[output.id][0]
        deduction = self._deductions.get(session.id)
        if deduction is None:
            return
        for reader in session.graph.consumers_of(output.id):
            objective = deduction.objective_of(reader.id)
            if objective != THROUGHPUT:
                self._note(session).calls[reader.id] = objective

    def forget(self, session: Session) -> None:
        """The session is gone."""
        self._deductions.pop(session.id, None)
        self._wanted.pop(session, None)

    def update(self, job: Job) -> None:
        """Bring the objective of a call up to date, now that it is about to run."""
        self._deduce(job.session)

    def of(self, job: Job) -> Objective:
        """What a call is run for: its own objective, or that of a task group that it is in."""
        found = job.call.objective
        for _, objective in self.groups_of(job):
            found = stronger(found, objective)
        return found

    def groups_of(self, job: Job) -> list[tuple[frozenset[str], Objective]]:
        """The task groups of a call, smallest first, and what each is for."""
        deduction = self._deductions.get(job.session.id)
        if deduction is None:
            return []
        return [(group, deduction.groups[group]) for group in deduction.groups_of(job.id)]

    def _note(self, session: Session) -> _Wanted:
        if not self._wanted:
            asyncio.get_running_loop().call_soon(self._deduce_all)
        return self._wanted.setdefault(session, _Wanted({}, {}))

    def _deduce_all(self) -> None:
        while self._wanted:
            self._deduce(next(iter(self._wanted)))

    def _deduce(self, session: Session) -> None:
        """Deduce anew, if there is something new."""
        wanted = self._wanted.pop(session, None)
        if wanted is None or session.is_closed:
            return
        graph = session.graph
        start = self._deductions.get(session.id, Deduction())
        if len(start.objectives) > 2 * graph.num_unfinished + _FINISHED_KEPT:
            start = _without_finished(start, session)
        deduction = deduce(graph, wanted.waited, calls=wanted.calls, start=start)
        self._deductions[session.id] = deduction
        for node in graph.unfinished:
            if isinstance(node, CallNode):
                given = node.given_objective or THROUGHPUT
                node.objective = stronger(deduction.objective_of(node.id), given)


def _without_finished(deduction: Deduction, session: Session) -> Deduction:
    live = {node.id for node in session.graph.unfinished}
    return Deduction(
        {call: objective for call, objective in deduction.objectives.items() if call in live},
        {group: what for group, what in deduction.groups.items() if not live.isdisjoint(group)},
        deduction.critical & live,
        deduction.truncated,
    )
