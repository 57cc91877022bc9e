"""A session's graph at one moment, as plain data: what pictures and answers are made of.

Holds names, states and times, never a prompt or a value.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NodeView:
    """One call or transform."""

    id: str
    name: str
    #: "call", "transform", or what else its submitter called it.
    kind: str
    #: waiting, running, done, failed, cancelled.
    state: str
    #: Length of the longest path that leads to it.
    stage: int = 0
    #: Ids of the variables it reads, each once, and of the one it writes.
    inputs: tuple[str, ...] = ()
    output: str | None = None
    #: A transform's pipeline.
    detail: str = ""
    model: str = ""
    objective: str = ""
    priority: int = 0
    tokens: int = 0
    engine: str | None = None
    #: In a few words, why it ran there.
    placement: str = ""
    #: The client's own ids of it, of the step that it is part of, and of its task group.
    run: str | None = None
    parent: str | None = None
    group: str | None = None
    #: Seconds on one clock, the one that `GraphSnapshot.taken_at` was read from.
    submitted: float = 0.0
    started: float | None = None
    first_token: float | None = None
    finished: float | None = None
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class VariableView:
    """One variable."""

    id: str
    name: str
    #: empty, running, ready, failed, cancelled.
    state: str
    #: Id of the kept node that writes it, and of those that read it.
    producer: str | None = None
    consumers: tuple[str, ...] = ()
    size_bytes: int = 0
    #: Name of the session that it belongs to, where that is another one.
    session: str = ""

    @property
    def full_name(self) -> str:
        """Its name, behind that of its session where that is another one."""
        return f"{self.session}/{self.name}" if self.session else self.name


@dataclass(frozen=True, slots=True)
class GraphSnapshot:
    """The kept nodes in order of submission, and every variable that one of them names."""

    session_id: str
    session_name: str
    taken_at: float
    nodes: tuple[NodeView, ...]
    variables: tuple[VariableView, ...]
    #: Finished nodes that are no longer kept.
    pruned: int = 0
