"""Calls and transforms: the nodes of a session's graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from parrot_scheduler.task import THROUGHPUT, Objective

from parrot_gateway.semantic.variable import Failure

NodeState: TypeAlias = Literal["waiting", "running", "done", "failed", "cancelled"]

FINISHED: frozenset[NodeState] = frozenset({"done", "failed", "cancelled"})


class ForeignInput(NamedTuple):
    """A variable of another session that a node reads; not part of the graph."""

    id: str
    name: str
    #: Name of that session.
    session: str


@dataclass(slots=True, kw_only=True, eq=False)
class Node:
    """A call or a transform."""

    id: str
    session_id: str
    #: Ids of the variables it reads, in any order; the same one twice counts once.
    inputs: tuple[str, ...] = ()
    #: Its inputs from other sessions.
    foreign: tuple[ForeignInput, ...] = ()
    #: Id of the variable it writes; None when its text goes to the client only.
    output: str | None = None
    #: Shown in pictures; the id when empty.
    name: str = ""
    kind: str = "call"
    #: Changed by the graph's `start` and `finish` only.
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
    #: Given by the caller; None leaves it to deduction.
    given_objective: Objective | None = None
    #: Of the wait of its own client; throughput while none waits.
    client_objective: Objective = THROUGHPUT
    #: The current one, kept by `ObjectiveTracker`.
    objective: Objective = THROUGHPUT
    priority: int = 0
    #: The client's own ids of it, and of the step that it is part of.
    run: str | None = None
    parent: str | None = None
    #: Name of the task group that the client declares.
    group: str | None = None
    first_token: float | None = None
    #: Tokens generated so far.
    tokens: int = 0
    engine: str | None = None
    #: Why it ran on that engine, in a few words.
    placement: str = ""


@dataclass(slots=True, kw_only=True, eq=False)
class TransformNode(Node):
    """A transform between two variables; its duration counts as zero."""

    kind: str = "transform"
    #: The pipeline as it was written.
    pipeline: str = ""
