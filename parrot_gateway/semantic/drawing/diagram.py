"""Boxes and arrows of a graph, without places.

A variable is an arrow between its producer and its readers, or a box if its producer is not drawn
(the user set it, the call is no longer kept, or it is another session's).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from parrot_gateway.semantic.drawing.labels import called, link_labels, select, state_line
from parrot_gateway.semantic.graph.snapshot import GraphSnapshot, NodeView

Shape: TypeAlias = Literal["call", "transform", "variable"]


@dataclass(frozen=True, slots=True)
class Box:
    """One box; texts are neither clean nor cut."""

    shape: Shape
    title: str
    #: A second line: the pipeline of a transform, the name of the output, tools called.
    detail: str
    state: str
    #: See `state_line`.
    status: str
    #: None for variables.
    node: NodeView | None = None


class Arrow(NamedTuple):
    """From box to box, by number; the label is the variable's name, unless that has a box, or the
    kinds and confidence of an inferred edge, which is dashed."""

    tail: int
    head: int
    label: str
    is_inferred: bool = False


class Diagram(NamedTuple):
    boxes: list[Box]
    arrows: list[Arrow]
    nodes_left_out: int
    arrows_left_out: int


def diagram_of(snapshot: GraphSnapshot, *, max_nodes: int, max_arrows: int) -> Diagram:
    """Boxes in order of submission, then variables; arrows in order of their heads, then inferred
    ones."""
    chosen = select(snapshot, max_nodes)
    variables = {variable.id: variable for variable in snapshot.variables}
    boxes: list[Box] = []
    writer: dict[str, int] = {}
    for node in chosen.nodes:
        output = variables[node.output].name if node.output in variables else ""
        if node.output is not None:
            writer[node.output] = len(boxes)
        boxes.append(
            Box(
                shape="transform" if node.kind == "transform" else "call",
                title=node.name,
                detail=" ".join(
                    filter(None, (node.detail, f"→ {output}" if output else "", called(node)))
                ),
                state=node.state,
                status=state_line(node, snapshot.taken_at),
                node=node,
            )
        )
    sources: dict[str, int] = {}
    arrows: list[Arrow] = []
    arrows_left_out = 0
    for head, node in enumerate(chosen.nodes):
        for variable_id in node.inputs:
            if len(arrows) >= max_arrows:
                arrows_left_out += 1
                continue
            variable = variables[variable_id]
            if variable_id in writer:
                arrows.append(Arrow(writer[variable_id], head, variable.name))
                continue
            if variable_id not in sources:
                sources[variable_id] = len(boxes)
                title, state = variable.full_name, variable.state
                boxes.append(Box("variable", title, "", state, state))
            arrows.append(Arrow(sources[variable_id], head, ""))
    numbers = {node.id: number for number, node in enumerate(chosen.nodes)}
    for (source, target), (kinds, confidence) in link_labels(snapshot).items():
        if source not in numbers or target not in numbers:
            continue
        if len(arrows) >= max_arrows:
            arrows_left_out += 1
            continue
        label = f"{kinds} {confidence:.2f}"
        arrows.append(Arrow(numbers[source], numbers[target], label, True))
    return Diagram(boxes, arrows, chosen.left_out, arrows_left_out)


def groups_of(diagram: Diagram) -> dict[str, list[int]]:
    """Boxes of each declared task group of which more than one is drawn."""
    groups: dict[str, list[int]] = {}
    for number, box in enumerate(diagram.boxes):
        if box.node is not None and box.node.group is not None:
            groups.setdefault(box.node.group, []).append(number)
    return {group: members for group, members in groups.items() if len(members) > 1}


def left_out_note(diagram: Diagram) -> str:
    """How much is not drawn; empty if everything is."""
    parts = []
    if diagram.nodes_left_out:
        parts.append(f"{diagram.nodes_left_out} calls")
    if diagram.arrows_left_out:
        parts.append(f"{diagram.arrows_left_out} arrows")
    return f"… not drawn: {' and '.join(parts)}" if parts else ""
