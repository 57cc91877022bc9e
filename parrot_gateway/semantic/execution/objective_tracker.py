"""Keeps the objectives of unfinished calls up to date as calls and readers come and go.

Waits are collected per session, and `deduce` runs at most once per turn of the event loop. A
deduced objective is never weakened before its call ends. A call without inputs needs no deduction.

A **declared group** (calls of a session with the same `group`) is a task group while at least two
unfinished members can run side by side. Its members get throughput, even if their own clients wait
for them, and the group gets the strongest objective that any member is waited for. An objective
given by a member's caller stays. A single remaining member gets latency again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from parrot_scheduler.task import LATENCY, THROUGHPUT, GroupRef, Objective, stronger

from parrot_gateway.calls.metadata import CallMetadata
from parrot_gateway.semantic.execution.job import Job
from parrot_gateway.semantic.graph.deduction import Deduction, calls_behind, deduce, travels_as
from parrot_gateway.semantic.graph.graph import Graph
from parrot_gateway.semantic.graph.node import CallNode
from parrot_gateway.semantic.session import Session
from parrot_gateway.semantic.variable import Variable

_NOTHING = Deduction()
#: Members of a declared group examined in search of two that can run side by side.
MAX_MEMBERS_VISITED = 64
#: Nodes visited to measure the chain after a call.
MAX_SUCCESSORS_VISITED = 256
#: Finished calls whose objectives are kept before all are cleared together.
_FINISHED_KEPT = 64


@dataclass(slots=True)
class _NewWaits:
    """Waits since the last deduction: for variables, and for calls with waiting clients."""

    variables: dict[str, Objective] = field(default_factory=dict)
    calls: dict[str, Objective] = field(default_factory=dict)


@dataclass(slots=True)
class _DeclaredGroup:
    """A declared group with an unfinished member."""

    #: The strongest objective that any member was waited for.
    objective: Objective = THROUGHPUT
    #: True while members can run side by side.
    stands: bool = False


@dataclass(eq=False)
class ObjectiveTracker:
    """The objectives of all sessions' calls. Used in the event loop's thread only."""

    #: Returns the session of a variable.
    owner_of: Callable[[Variable], Session | None]
    #: Called with the id of a running call whose objective or task groups changed.
    on_change: Callable[[str], None] = lambda call_id: None

    def __post_init__(self) -> None:
        self._deductions: dict[str, Deduction] = {}
        #: By variable: the strongest objective of its waits, and their number.
        self._waits: dict[str, tuple[Objective, int]] = {}
        self._new_waits: dict[Session, _NewWaits] = {}
        #: By session and name.
        self._declared: dict[str, dict[str, _DeclaredGroup]] = {}

    @property
    def num_waited(self) -> int:
        """Return the number of variables with waits."""
        return len(self._waits)

    def begin_wait(self, variable: Variable, objective: Objective) -> None:
        """Begin a wait for a variable; pair with `end_wait`."""
        known, count = self._waits.get(variable.id, (objective, 0))
        self._waits[variable.id] = (stronger(known, objective), count + 1)
        session = self.owner_of(variable)
        if session is not None:
            self._new_waits_of(session).variables[variable.id] = stronger(known, objective)

    def end_wait(self, variable: Variable) -> None:
        objective, count = self._waits[variable.id]
        if count > 1:
            self._waits[variable.id] = (objective, count - 1)
        else:
            del self._waits[variable.id]

    def set_client_objective(self, session: Session, call: CallNode, objective: Objective) -> None:
        """Note that a client waits for a call's answer, or gave it an objective."""
        call.client_objective = objective
        if call.inputs:
            self._new_waits_of(session).calls[call.id] = objective
        else:
            self._apply(session, [call])

    def inherit(self, session: Session, output: Variable | None) -> None:
        """Give a new producer of `output` the objectives of the existing waits."""
        if output is None:
            return
        if output.id in self._waits:
            self._new_waits_of(session).variables[output.id] = self._waits[output.id][0]
        deduction = self._deductions.get(session.id)
        if deduction is None:
            return
        for reader in session.graph.consumers_of(output.id):
            objective = deduction.objective_of(reader.id)
            if objective != THROUGHPUT:
                self._new_waits_of(session).calls[reader.id] = objective

    def forget(self, session: Session) -> None:
        self._deductions.pop(session.id, None)
        self._declared.pop(session.id, None)
        self._new_waits.pop(session, None)

    def regroup(self, session: Session, group: str | None) -> None:
        """Update a declared group after a call of it has come or ended."""
        if group is None or session.is_closed:
            return
        members = session.graph.members(group)
        if members:
            declared = self._declared.setdefault(session.id, {}).setdefault(group, _DeclaredGroup())
            stands = runs_side_by_side(session.graph, group)
            if stands != declared.stands:
                declared.stands = stands
                self._apply(session, members.values(), members)
        elif known := self._declared.get(session.id, {}):
            known.pop(group, None)
            if not known:
                del self._declared[session.id]

    def update(self, session: Session) -> None:
        """Deduce again if there are new waits."""
        new = self._new_waits.pop(session, None)
        if new is None or session.is_closed:
            return
        graph = session.graph
        start = self._deductions.get(session.id, _NOTHING)
        if len(start.objectives) > 2 * graph.num_unfinished + _FINISHED_KEPT:
            start = start.restricted_to({node.id for node in graph.unfinished})
        deduction = deduce(graph, new.variables, calls=new.calls, start=start)
        self._deductions[session.id] = deduction
        regrouped: set[str] = set()
        for group, objective in deduction.groups.items():
            if start.groups.get(group) != objective:
                regrouped |= group
        self._apply(session, (n for n in graph.unfinished if isinstance(n, CallNode)), regrouped)

    def metadata_of(self, job: Job) -> CallMetadata:
        """Return a call's metadata for the scheduler: objective, task groups, successors."""
        session, call = job.session, job.call
        deduction = self._deductions.get(session.id, _NOTHING)
        groups = [
            # A group is named after its smallest member, so that all members agree.
            GroupRef(f"{session.id}/{min(members)}", len(members), deduction.groups[members])
            for members in deduction.groups_of(job.id)
        ]
        declared = self._declared.get(session.id, {}).get(call.group or "")
        if declared is not None:
            # NOTE: used even for the only member, so that later members go to the same place.
            size = len(session.graph.members(call.group or "")) if declared.stands else 1
            name = f"{session.id}/group {call.group}"
            groups.insert(0, GroupRef(name, size, declared.objective))
        return CallMetadata(
            tenant=session.tenant,
            call=job.id,
            application=session.id,
            objective=call.objective,
            groups=tuple(groups),
            priority=job.spec.priority,
            successors=num_successors(session.graph, job.id),
            prefers=job.preferred_engine,
        )

    def _new_waits_of(self, session: Session) -> _NewWaits:
        if not self._new_waits:
            asyncio.get_running_loop().call_soon(self._update_all)
        return self._new_waits.setdefault(session, _NewWaits())

    def _update_all(self) -> None:
        while self._new_waits:
            self.update(next(iter(self._new_waits)))

    def _apply(
        self, session: Session, calls: Iterable[CallNode], regrouped: Collection[str] = ()
    ) -> None:
        """Write objectives into unfinished calls; report changes of running ones.

        Args:
            regrouped: ids of calls whose task groups changed.
        """
        deduction = self._deductions.get(session.id, _NOTHING)
        declared = self._declared.get(session.id, {})
        for node in calls:
            found = stronger(deduction.objective_of(node.id), node.client_objective)
            if node.group is not None:
                group = declared[node.group]
                group.objective = stronger(group.objective, travels_as(found))
                if found == LATENCY and group.stands:
                    found = THROUGHPUT
            objective = stronger(found, node.given_objective or THROUGHPUT)
            if objective != node.objective or node.id in regrouped:
                node.objective = objective
                if node.state == "running":
                    self.on_change(node.id)


def runs_side_by_side(graph: Graph, group: str) -> bool:
    """Return true if two unfinished members of a group need no other member.

    Searches the first `MAX_MEMBERS_VISITED` members.
    """
    members = graph.members(group)
    if len(members) < 2:
        return False
    visited = islice(members.values(), MAX_MEMBERS_VISITED)
    free = (node for node in visited if not _needs_one_of(graph, node, members))
    return next(free, None) is not None and next(free, None) is not None


def _needs_one_of(graph: Graph, node: CallNode, members: Mapping[str, CallNode]) -> bool:
    """Return true if a member writes what the node reads, directly or through transforms."""
    return any(call.id in members for call in calls_behind(graph, node.inputs))


def num_successors(graph: Graph, call_id: str) -> int:
    """Return the number of unfinished nodes on the longest path after a call.

    Visits the `MAX_SUCCESSORS_VISITED` nearest nodes only.
    """
    lengths: dict[str, int] = {}
    stack, seen = [call_id], {call_id}
    while stack:
        node_id = stack[-1]
        fresh = [node.id for node in graph.consumers(node_id) if node.id not in seen]
        if fresh and len(seen) < MAX_SUCCESSORS_VISITED:
            fresh = fresh[: MAX_SUCCESSORS_VISITED - len(seen)]
            seen.update(fresh)
            stack.extend(fresh)
            continue
        stack.pop()
        behind = (lengths.get(node.id, -1) for node in graph.consumers(node_id))
        lengths[node_id] = max(behind, default=-1) + 1
    return lengths[call_id]
