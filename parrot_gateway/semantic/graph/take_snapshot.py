"""A session's graph as it is now, as the plain data of `snapshot`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from parrot_gateway.semantic.graph.graph import Graph
from parrot_gateway.semantic.graph.node import CallNode, ForeignInput, Node, TransformNode
from parrot_gateway.semantic.graph.snapshot import GraphSnapshot, NodeView, VariableView
from parrot_gateway.semantic.variable import Variable


def snapshot_of(
    graph: Graph,
    now: float,
    session_id: str = "",
    find_foreign: Callable[[str], Variable | None] = lambda variable_id: None,
) -> GraphSnapshot:
    """All kept nodes and the variables around them, as plain data without values.

    Args:
        graph: of the session.
        now: the time.
        session_id: the session's.
        find_foreign: a variable of another session, if it is still there.
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
        nodes=tuple(_view(node, stages[node.id]) for node in nodes),
        variables=(
            *(_view_variable(graph, graph.variables[v]) for v in ids),
            *(_view_foreign(each, find_foreign(each.id), nodes) for each in foreign.values()),
        ),
        pruned=graph.num_pruned,
    )


def _view(node: Node, stage: int) -> NodeView:
    call = node if isinstance(node, CallNode) else None
    return NodeView(
        id=node.id,
        name=node.name or node.id,
        kind=node.kind,
        state=node.state,
        stage=stage,
        inputs=(*dict.fromkeys(node.inputs), *(each.id for each in node.foreign)),
        output=node.output,
        detail=node.pipeline if isinstance(node, TransformNode) else "",
        model=call.model if call else "",
        objective=str(call.objective) if call else "",
        priority=call.priority if call else 0,
        tokens=call.tokens if call else 0,
        engine=call.engine if call else None,
        placement=call.placement if call else "",
        run=call.run if call else None,
        parent=call.parent if call else None,
        group=call.group if call else None,
        submitted=node.submitted,
        started=node.started,
        first_token=call.first_token if call else None,
        finished=node.finished,
        failure=node.failure.message if node.failure else None,
    )


def _view_variable(graph: Graph, variable: Variable) -> VariableView:
    return VariableView(
        id=variable.id,
        name=variable.name,
        state=variable.state,
        producer=variable.producer if variable.producer in graph else None,
        consumers=tuple(node.id for node in graph.consumers_of(variable.id)),
        size_bytes=variable.size_bytes,
    )


def _view_foreign(
    each: ForeignInput, variable: Variable | None, nodes: Sequence[Node]
) -> VariableView:
    return VariableView(
        id=each.id,
        name=each.name,
        # NOTE: what is not there any more was forgotten with its session.
        state="cancelled" if variable is None else variable.state,
        consumers=tuple(node.id for node in nodes if each in node.foreign),
        size_bytes=0 if variable is None else variable.size_bytes,
        session=each.session,
    )
