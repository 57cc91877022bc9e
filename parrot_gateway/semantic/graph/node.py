"""Calls and transforms: the nodes of a session's graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from parrot_scheduler.task import THROUGHPUT, Objective

from parrot_gateway.semantic.variable import Failure

NodeState: TypeAlias = Literal["waiting", "running", "done", "failed", "cancelled"]

#: From a state to those that may follow it. From waiting to done: an identical call was run.
NODE_TRANSITIONS: dict[NodeState, frozenset[NodeState]] = {
    "waiting": frozenset({"running", "done", "failed", "cancelled"}),
    "running": frozenset({"done", "failed", "cancelled"}),
    "done": frozenset(),
    "failed": frozenset(),
    "cancelled": frozenset(),
}


class ForeignInput(NamedTuple):
    """A variable of another session that a node reads; shown, and no part of the graph."""

    id: str
    name: str
    #: Name of that session.
    session: str


@dataclass(slots=True, kw_only=True, eq=False)
class Node:
    """What calls and transforms have in common."""

    id: str
    session_id: str
    #: Ids of the variables it reads, in any order; the same one twice counts once.
    inputs: tuple[str, ...] = ()
    #: What it reads of other sessions.
    foreign: tuple[ForeignInput, ...] = ()
    #: Id of the variable it writes; None when its text goes to the client only.
    output: str | None = None
    #: What pictures call it; the id when empty.
    name: str = ""
    kind: str = "call"
    #: Changed by the graph's `start` and `finish` only.
    state: NodeState = "waiting"
    failure: Failure | None = None
    #: Times of the clock that the graph's caller uses.
    submitted: float = 0.0
    started: float | None = None
    finished: float | None = None

    @property
    def is_finished(self) -> bool:
        """Whether nothing will change any more."""
        return not NODE_TRANSITIONS[self.state]


@dataclass(slots=True, kw_only=True, eq=False)
class CallNode(Node):
    """A call to a model."""

    model: str = ""
    #: What the caller asked for; None leaves it to deduction.
    given_objective: Objective | None = None
    #: What its own client waits for; throughput while none does.
    wanted: Objective = THROUGHPUT
    #: What it is run for: written by whoever applies a deduction.
    objective: Objective = THROUGHPUT
    priority: int = 0
    #: The client's own ids of it, and of the step that it is part of.
    run: str | None = None
    parent: str | None = None
    #: The task group that the client says it is in.
    group: str | None = None
    first_token: float | None = None
    #: Tokens generated so far.
    tokens: int = 0
    engine: str | None = None
    #: In a few words, why it ran on that engine.
    placement: str = ""


@dataclass(slots=True, kw_only=True, eq=False)
class TransformNode(Node):
    """A declared text function between variables; takes no engine and no time worth counting."""

    kind: str = "transform"
    #: The pipeline as it was written.
    pipeline: str = ""
