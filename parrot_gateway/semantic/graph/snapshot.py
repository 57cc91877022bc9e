"""A session's graph at one moment as plain data: names, states and times, without prompts and
values.

Pictures and JSON answers are made from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from parrot_gateway.semantic.graph.graph import Graph
from parrot_gateway.semantic.graph.node import CallNode, ForeignInput, Node, TransformNode
from parrot_gateway.semantic.variable import Variable


@dataclass(frozen=True, slots=True)
class NodeView:
    """One call or transform; fields like those of `CallNode` unless stated."""

    id: str
    name: str
    #: "call", "transform", or a kind given by its submitter.
    kind: str
    state: str
    #: Length of the longest path that leads to it.
    stage: int = 0
    #: Distinct ids of the variables that it reads.
    inputs: tuple[str, ...] = ()
    output: str | None = None
    #: A transform's pipeline.
    detail: str = ""
    #: Names of the tools that the answer calls, as far as the linker knows.
    tools: tuple[str, ...] = ()
    model: str = ""
    objective: str = ""
    priority: int = 0
    tokens: int = 0
    engine: str | None = None
    placement: str = ""
    #: Reason for the time and place of its run, in a sentence.
    explanation: str = ""
    run: str | None = None
    parent: str | None = None
    group: str | None = None
    #: Seconds on the clock of `GraphSnapshot.taken_at`.
    submitted: float = 0.0
    started: float | None = None
    first_token: float | None = None
    finished: float | None = None
    failure: str | None = None

    def waited_s(self, now: float) -> float:
        """Return the seconds from submission to start; without a start, to the end or now."""
        ends = [t for t in (self.started, self.finished, now) if t is not None]
        return max(0.0, ends[0] - self.submitted)

    def ran_s(self, now: float) -> float | None:
        """Return the seconds from start to end or now; None without a start."""
        if self.started is None:
            return None
        return max(0.0, (now if self.finished is None else self.finished) - self.started)


@dataclass(frozen=True, slots=True)
class VariableView:
    id: str
    name: str
    state: str
    #: Ids of the kept nodes that write it and read it.
    producer: str | None = None
    consumers: tuple[str, ...] = ()
    size_bytes: int = 0
    #: Name of its session, if it is another one.
    session: str = ""

    @property
    def full_name(self) -> str:
        """Return `session/name` for a variable of another session, else its name."""
        return f"{self.session}/{self.name}" if self.session else self.name


@dataclass(frozen=True, slots=True)
class LinkView:
    """An inferred edge between two kept calls."""

    source: str
    target: str
    #: "continues", "output", "tool" or "spawned".
    kind: str
    #: From 0 to 1.
    confidence: float


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
    links: tuple[LinkView, ...] = ()
    #: True if the session was inferred and nobody named it.
    inferred: bool = False

    @property
    def span(self) -> tuple[float, float]:
        """Return the times of the first submission and the last end (`taken_at` if a node is
        unfinished).
        """
        if not self.nodes:
            return self.taken_at, self.taken_at
        ends = [self.taken_at if n.finished is None else n.finished for n in self.nodes]
        begin = min(node.submitted for node in self.nodes)
        return begin, max(begin, *ends)


def snapshot_of(
    graph: Graph,
    now: float,
    session_id: str = "",
    find_foreign: Callable[[str], Variable | None] = lambda variable_id: None,
) -> GraphSnapshot:
    """Take a snapshot of all kept nodes and the variables around them.

    Args:
        find_foreign: finds a variable of another session by id, if it still exists.
    """
    stages = graph.stages()
    nodes = sorted(graph, key=lambda node: (node.submitted, node.id))
    ids = dict.fromkeys(
        v for n in nodes for v in (*n.inputs, *([n.output] if n.output is not None else []))
    )
    foreign = {each.id: each for node in nodes for each in node.foreign}
    return GraphSnapshot(
        session_id=session_id,
        session_name=graph.session,
        taken_at=now,
        nodes=tuple(view_of(node, stages[node.id]) for node in nodes),
        variables=(
            *(view_of_variable(graph, graph.variables[v]) for v in ids),
            *(view_of_foreign(each, find_foreign(each.id), nodes) for each in foreign.values()),
        ),
        pruned=graph.num_pruned,
    )


def with_links(snapshot: GraphSnapshot, calls: Iterable[Mapping[str, Any]]) -> GraphSnapshot:
    """Return the graph with inferred edges between its nodes, which moves nodes to later stages.

    Args:
        calls: as the linking process describes them, in order; those that an inferred graph lacks
            are added.
    """
    nodes = {node.id: node for node in snapshot.nodes}
    links: list[LinkView] = []
    for number, call in enumerate(calls, 1):
        if call["id"] in nodes:
            nodes[call["id"]] = replace(nodes[call["id"]], tools=tuple(call["tools"]))
        elif not snapshot.inferred:
            continue
        else:
            nodes[call["id"]] = view_of_linked(call, number)
        links += (
            LinkView(link["from"], call["id"], link["kind"], link["confidence"])
            for link in call["links"]
        )
    links = [link for link in links if link.source in nodes]
    ordered = sorted(nodes.values(), key=lambda node: (node.submitted, node.id))
    stages = {node.id: node.stage for node in ordered}
    sources: dict[str, list[str]] = {}
    for link in links:
        sources.setdefault(link.target, []).append(link.source)
    for node in ordered:
        earlier = [stages[source] + 1 for source in sources.get(node.id, ())]
        stages[node.id] = max(stages[node.id], *earlier, 0)
    return replace(
        snapshot,
        nodes=tuple(replace(node, stage=stages[node.id]) for node in ordered),
        links=tuple(links),
    )


def view_of_linked(call: Mapping[str, Any], number: int) -> NodeView:
    """Return a call of an inferred session, as the linking process describes it.

    Args:
        number: of the call in its session, from 1.
    """
    return NodeView(
        id=call["id"],
        name=f"{call['name']} {number}",
        kind="call",
        state=call["state"],
        tools=tuple(call["tools"]),
        model=call["model"],
        submitted=call["submitted"],
        started=call["submitted"],
        finished=call["finished"],
        failure=f"status {call['error']}" if call["error"] else None,
    )


def with_explanations(snapshot: GraphSnapshot, texts: Mapping[str, str]) -> GraphSnapshot:
    """Return the graph with explanations of runs, given by node id."""
    nodes = (
        replace(node, explanation=texts[node.id]) if node.id in texts else node
        for node in snapshot.nodes
    )
    return replace(snapshot, nodes=tuple(nodes)) if texts else snapshot


def view_of(node: Node, stage: int) -> NodeView:
    """Return a view of a node in its current state."""
    views: dict[str, Any] = {
        each.name: getattr(node, each.name) for each in fields(NodeView) if hasattr(node, each.name)
    }
    views |= {
        "name": node.name or node.id,
        "stage": stage,
        "inputs": (*dict.fromkeys(node.inputs), *(each.id for each in node.foreign)),
        "failure": node.failure.message if node.failure else None,
    }
    if isinstance(node, CallNode):
        views["objective"] = str(node.objective)
    elif isinstance(node, TransformNode):
        views["detail"] = node.pipeline
    return NodeView(**views)


def view_of_variable(graph: Graph, variable: Variable) -> VariableView:
    """Return a view of a variable of the graph's session in its current state."""
    return VariableView(
        id=variable.id,
        name=variable.name,
        state=variable.state,
        producer=variable.producer if variable.producer in graph else None,
        consumers=tuple(node.id for node in graph.consumers_of(variable.id)),
        size_bytes=variable.size_bytes,
    )


def view_of_foreign(
    each: ForeignInput, variable: Variable | None, nodes: Sequence[Node]
) -> VariableView:
    """Return a view of another session's variable, which some of `nodes` read; None means it is
    gone.
    """
    return VariableView(
        id=each.id,
        name=each.name,
        # NOTE: a variable that cannot be found was dropped with its session.
        state="cancelled" if variable is None else variable.state,
        consumers=tuple(node.id for node in nodes if each in node.foreign),
        size_bytes=0 if variable is None else variable.size_bytes,
        session=each.session,
    )


def to_json(snapshot: GraphSnapshot) -> dict[str, Any]:
    """Return dictionaries and lists. Times are seconds since the first kept submission."""
    begin, end = snapshot.span
    return {
        "object": "graph",
        "session": {"id": snapshot.session_id, "name": snapshot.session_name},
        "duration_s": round(end - begin, 6),
        "calls": [node_to_json(node, snapshot.taken_at, begin) for node in snapshot.nodes],
        "variables": [variable_to_json(variable) for variable in snapshot.variables],
        "links": [
            {
                "from": link.source,
                "to": link.target,
                "kind": link.kind,
                "confidence": link.confidence,
            }
            for link in snapshot.links
        ],
        "inferred": snapshot.inferred,
        "calls_not_kept": snapshot.pruned,
    }


def variable_to_json(variable: VariableView) -> dict[str, Any]:
    return {
        "id": variable.id,
        "name": variable.name,
        "state": variable.state,
        "producer": variable.producer,
        "consumers": list(variable.consumers),
        "size_bytes": variable.size_bytes,
        "session": variable.session or None,
    }


def node_to_json(node: NodeView, now: float, begin: float) -> dict[str, Any]:
    """Return a node's JSON; its times are seconds since `begin`."""

    def since(time: float | None, begin: float = begin) -> float | None:
        return None if time is None else round(time - begin, 6)

    return {
        "id": node.id,
        "name": node.name,
        "kind": node.kind,
        "state": node.state,
        "stage": node.stage,
        "inputs": list(node.inputs),
        "output": node.output,
        "transform": node.detail or None,
        "tools": list(node.tools),
        "model": node.model or None,
        "objective": node.objective or None,
        "priority": node.priority,
        "tokens": node.tokens,
        "engine": node.engine,
        "placement": node.placement or None,
        **({"explanation": node.explanation} if node.explanation else {}),
        "run": node.run,
        "parent": node.parent,
        "group": node.group,
        "submitted_s": since(node.submitted),
        "started_s": since(node.started),
        "first_token_s": since(node.first_token),
        "finished_s": since(node.finished),
        "waited_s": since(node.waited_s(now), 0.0),
        "ran_s": since(node.ran_s(now), 0.0),
        "failure": node.failure,
    }
