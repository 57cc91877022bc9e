"""Keeps what each unfinished call is for up to date, as calls and their readers come and go.

`deduction` says what follows from a graph and its waits; here they are remembered, per session, and
deduced anew at most once in a turn of the event loop. What is deduced is never weakened before a
call ends. A call that reads nothing needs no deduction: nobody is behind it.

A **declared group** (calls of a session whose client gave them the same `group`) is a task group
from the moment on when two unfinished members can run side by side, until one is left. Each member
that its own client waits for would be latency by itself; in such a group it is throughput, and the
group as a whole is what the strongest wait for a member asks: a client that waits for one of them
waits for all. What its caller asked of a member stays. A member without company is latency again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from parrot_scheduler.task import LATENCY, THROUGHPUT, Objective, stronger

from parrot_gateway.semantic.execution.job import Job
from parrot_gateway.semantic.graph.deduction import Deduction, deduce, travels_as
from parrot_gateway.semantic.graph.graph import Graph
from parrot_gateway.semantic.graph.node import CallNode, Node, TransformNode
from parrot_gateway.semantic.session import Session
from parrot_gateway.semantic.variable import Variable

_NOTHING = Deduction()
#: Members that are looked at to find two that can run side by side.
MAX_LOOKED_AT = 64
#: Finished calls whose objectives are carried along until they are cleared away.
_FINISHED_KEPT = 64


class _Wanted(NamedTuple):
    """What somebody waits for: variables, and calls whose clients wait themselves."""

    waited: dict[str, Objective]
    calls: dict[str, Objective]


@dataclass(slots=True)
class _Declared:
    """A group that clients declared, while one of its members is unfinished."""

    #: The strongest that any member was waited for.
    objective: Objective = THROUGHPUT
    #: Whether members can run side by side now.
    stands: bool = False


class ObjectiveTracker:
    """The objectives of all sessions' calls. Used in the event loop's thread only.

    Args:
        owner_of: gives the session of a variable.
        on_change: told the id of a running call that is for something else than before, or in
            other task groups.
    """

    def __init__(
        self,
        owner_of: Callable[[Variable], Session | None],
        on_change: Callable[[str], None] = lambda call_id: None,
    ) -> None:
        self._owner_of = owner_of
        self._on_change = on_change
        self._deductions: dict[str, Deduction] = {}
        #: By variable, what the strongest of those that wait for it wants, and how many they are.
        self._waits: dict[str, tuple[Objective, int]] = {}
        #: What came up since the last deduction.
        self._wanted: dict[Session, _Wanted] = {}
        #: By session and name.
        self._declared: dict[str, dict[str, _Declared]] = {}

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

    def want_call(self, session: Session, call: CallNode, objective: Objective) -> None:
        """Somebody waits for the answer of a call, or gave it an objective."""
        call.wanted = objective
        if call.inputs:
            self._note(session).calls[call.id] = objective
        else:
            self._apply(session, [call])

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
        self._declared.pop(session.id, None)
        self._wanted.pop(session, None)

    def regroup(self, session: Session, group: str | None) -> None:
        """A call of a declared group has come, or has ended."""
        if group is None or session.is_closed:
            return
        members = session.graph.members(group)
        if members:
            known = self._declared.setdefault(session.id, {})
            declared = known.setdefault(group, _Declared())
            stands = runs_side_by_side(session.graph, group)
            if stands != declared.stands:
                declared.stands = stands
                self._apply(session, members.values(), members)
        elif known := self._declared.get(session.id, {}):
            known.pop(group, None)
            if not known:
                del self._declared[session.id]

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

    def declared_group_of(self, job: Job) -> tuple[str, int, Objective] | None:
        """The group that a call's client declared: its name, its unfinished members, what for."""
        group = job.call.group
        declared = self._declared.get(job.session.id, {}).get(group) if group else None
        if group is None or declared is None:
            return None
        size = len(job.session.graph.members(group)) if declared.stands else 1
        return group, size, declared.objective

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
        start = self._deductions.get(session.id, _NOTHING)
        if len(start.objectives) > 2 * graph.num_unfinished + _FINISHED_KEPT:
            start = _without_finished(start, session)
        deduction = deduce(graph, wanted.waited, calls=wanted.calls, start=start)
        self._deductions[session.id] = deduction
        regrouped: set[str] = set()
        for group, objective in deduction.groups.items():
            if start.groups.get(group) != objective:
                regrouped |= group
        self._apply(session, (n for n in graph.unfinished if isinstance(n, CallNode)), regrouped)

    def _apply(
        self, session: Session, calls: Iterable[CallNode], regrouped: Collection[str] = ()
    ) -> None:
        """Write into calls what they are for now, and tell of those that changed.

        Args:
            session: theirs.
            calls: unfinished ones.
            regrouped: ids of calls that are in other groups than before.
        """
        deduction = self._deductions.get(session.id, _NOTHING)
        declared = self._declared.get(session.id, {})
        for node in calls:
            found = stronger(deduction.objective_of(node.id), node.wanted)
            if node.group is not None:
                group = declared[node.group]
                group.objective = stronger(group.objective, travels_as(found))
                if found == LATENCY and group.stands:
                    found = THROUGHPUT
            objective = stronger(found, node.given_objective or THROUGHPUT)
            if objective != node.objective or node.id in regrouped:
                node.objective = objective
                if node.state == "running":
                    self._on_change(node.id)


def _without_finished(deduction: Deduction, session: Session) -> Deduction:
    live = {node.id for node in session.graph.unfinished}
    return Deduction(
        {call: objective for call, objective in deduction.objectives.items() if call in live},
        {group: what for group, what in deduction.groups.items() if not live.isdisjoint(group)},
        deduction.critical & live,
        deduction.truncated,
    )


def runs_side_by_side(graph: Graph, group: str) -> bool:
    """Whether two unfinished members of a group wait for no other member.

    Of many members the first `MAX_LOOKED_AT` are looked at.
    """
    members = graph.members(group)
    if len(members) < 2:
        return False
    looked_at = islice(members.values(), MAX_LOOKED_AT)
    free = (node for node in looked_at if not _needs_one_of(graph, node, members))
    return next(free, None) is not None and next(free, None) is not None


def _needs_one_of(graph: Graph, node: Node, members: Mapping[str, CallNode]) -> bool:
    """Whether one of them writes what it reads, if need be through transforms."""
    stack, seen = list(node.inputs), set[str]()
    while stack:
        producer = graph.producer_of(stack.pop())
        if producer is None or producer.is_finished or producer.id in seen:
            continue
        seen.add(producer.id)
        if producer.id in members:
            return True
        if isinstance(producer, TransformNode):
            stack.extend(producer.inputs)
    return False
