"""Calls and transforms: the nodes of a session's graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from parrot_scheduler.task import THROUGHPUT, Objective

from parrot_gateway.semantic.variable import Failure

NodeState: TypeAlias = Literal["waiting", "running", "done", "failed", "cancelled"]

FINISHED: frozenset[NodeState] = frozenset({"done", "failed", "cancelled"})


class ForeignInput(NamedTuple):
    """A variable of another session that a node reads; it is outside the graph."""

    id: str
    name: str
    #: Name of that session.
    session: str


@dataclass(slots=True, kw_only=True, eq=False)
class Node:
    """A call or a transform."""

    id: str
    session_id: str
    #: Ids of the variables it reads, in any order; duplicates count once.
    inputs: tuple[str, ...] = ()
    #: Its inputs from other sessions.
    foreign: tuple[ForeignInput, ...] = ()
    #: Id of the variable it writes; None if its text goes only to the client.
    output: str | None = None
    #: Label in pictures; the id if empty.
    name: str = ""
    kind: str = "call"
    #: Changed only by the graph's `start` and `finish`.
    state: NodeState = "waiting"
    failure: Failure | None = None
    #: Seconds on the clock of the graph's caller.
    submitted: float = 0.0
    started: float | None = None
    finished: float | None = None

    @property
    def is_finished(self) -> bool:
        return self.state in FINISHED


@dataclass(slots=True, kw_only=True, eq=False)
class CallNode(Node):
    """A call to a model."""

    model: str = ""
    #: Given by the caller; None: deduced.
    given_objective: Objective | None = None
    #: Objective of its own client's wait; throughput while none waits.
    client_objective: Objective = THROUGHPUT
    #: Current objective, kept by `ObjectiveTracker`.
    objective: Objective = THROUGHPUT
    priority: int = 0
    #: The client's own ids of the call and of its step.
    run: str | None = None
    parent: str | None = None
    #: Name of the task group that the client declares.
    group: str | None = None
    first_token: float | None = None
    #: Tokens generated so far.
    tokens: int = 0
    engine: str | None = None
    #: Reason for its engine, in a few words.
    placement: str = ""


@dataclass(slots=True, kw_only=True, eq=False)
class TransformNode(Node):
    """A transform between two variables; its duration counts as zero."""

    kind: str = "transform"
    #: The pipeline as written.
    pipeline: str = ""
