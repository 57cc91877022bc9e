"""Whether a group that a client declared is one: some of its calls can run side by side."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from parrot_gateway.semantic.graph.graph import Graph
from parrot_gateway.semantic.graph.node import CallNode, Node, TransformNode

#: Members that are looked at to find two that can run side by side.
MAX_LOOKED_AT = 64


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
