"""A graph as plain data for JSON: everything that the pictures show, and the times exactly."""

from __future__ import annotations

from typing import Any

from parrot_gateway.semantic.drawing.labels import ran_s, span, waited_s
from parrot_gateway.semantic.graph.snapshot import GraphSnapshot, NodeView


def to_json(snapshot: GraphSnapshot) -> dict[str, Any]:
    """Dictionaries and lists. Times are seconds since the first submission that is kept."""
    begin, end = span(snapshot)
    return {
        "object": "graph",
        "session": {"id": snapshot.session_id, "name": snapshot.session_name},
        "duration_s": round(end - begin, 6),
        "calls": [_node(node, snapshot.taken_at, begin) for node in snapshot.nodes],
        "variables": [
            {
                "id": variable.id,
                "name": variable.name,
                "state": variable.state,
                "producer": variable.producer,
                "consumers": list(variable.consumers),
                "size_bytes": variable.size_bytes,
                "session": variable.session or None,
            }
            for variable in snapshot.variables
        ],
        "calls_not_kept": snapshot.pruned,
    }


def _node(node: NodeView, now: float, begin: float) -> dict[str, Any]:
    ran = ran_s(node, now)
    return {
        "id": node.id,
        "name": node.name,
        "kind": node.kind,
        "state": node.state,
        "stage": node.stage,
        "inputs": list(node.inputs),
        "output": node.output,
        "transform": node.detail or None,
        "model": node.model or None,
        "objective": node.objective or None,
        "priority": node.priority,
        "tokens": node.tokens,
        "engine": node.engine,
        "placement": node.placement or None,
        "run": node.run,
        "parent": node.parent,
        "group": node.group,
        "submitted_s": round(node.submitted - begin, 6),
        "started_s": _since(node.started, begin),
        "first_token_s": _since(node.first_token, begin),
        "finished_s": _since(node.finished, begin),
        "waited_s": round(waited_s(node, now), 6),
        "ran_s": None if ran is None else round(ran, 6),
        "failure": node.failure,
    }


def _since(time: float | None, begin: float) -> float | None:
    return None if time is None else round(time - begin, 6)
