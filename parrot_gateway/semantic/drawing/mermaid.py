"""A graph as Mermaid text, cut to GitHub's limits of 50,000 characters and 500 arrows."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from parrot_gateway.semantic.drawing.labels import (
    SIGNS,
    called,
    clip,
    link_labels,
    select,
    state_line,
    style_of,
    summary,
)
from parrot_gateway.semantic.graph.snapshot import GraphSnapshot

MAX_CHARACTERS = 49_000
MAX_ARROWS = 490
_MAX_NODES = 256
_LABEL_WIDTH = 40

_Shape: TypeAlias = Literal["call", "transform", "variable"]

#: Brackets for Mermaid's shapes: rectangle, hexagon, stadium.
_BRACKETS: dict[_Shape, tuple[str, str]] = {
    "call": ("[", "]"),
    "transform": ("{{", "}}"),
    "variable": ("([", "])"),
}

_CLASSES = """\
  classDef waiting fill:#f4f4f5,stroke:#71717a,color:#18181b,stroke-dasharray:4 3
  classDef running fill:#dbeafe,stroke:#1d4ed8,color:#18181b,stroke-width:3px
  classDef done fill:#dcfce7,stroke:#15803d,color:#18181b
  classDef failed fill:#fee2e2,stroke:#b91c1c,color:#18181b,stroke-width:2px
  classDef cancelled fill:#f3e8ff,stroke:#7e22ce,color:#18181b,stroke-dasharray:1 3"""


class _Box(NamedTuple):
    """A box; its texts are neither cleaned nor cut."""

    shape: _Shape
    title: str
    #: A second line: a transform's pipeline, the output's name, or the tools called.
    detail: str
    state: str
    #: The last line, see `state_line`.
    status: str
    #: The task group of a call.
    group: str | None = None


class _Arrow(NamedTuple):
    """An arrow from box to box, by number.

    Its label is the variable's name, unless the variable has a box. An inferred edge is dashed and
    labelled with its kinds and confidence.
    """

    tail: int
    head: int
    label: str
    is_inferred: bool = False


class _Diagram(NamedTuple):
    boxes: list[_Box]
    arrows: list[_Arrow]
    nodes_left_out: int
    arrows_left_out: int


def to_mermaid(snapshot: GraphSnapshot) -> str:
    """Return a `flowchart` for use between ```mermaid fences."""
    max_nodes, max_arrows = _MAX_NODES, MAX_ARROWS
    while True:
        text = _write(snapshot, _diagram(snapshot, max_nodes=max_nodes, max_arrows=max_arrows))
        if len(text) <= MAX_CHARACTERS:
            return text
        max_nodes, max_arrows = max_nodes // 2, max_arrows // 2


def escape(text: str) -> str:
    """Escape for Mermaid, Markdown and HTML: ASCII signs as numbered entities.

    NOTE: the colon too, because Mermaid reads `style …: …;` in a label as a style.
    """
    return "".join(
        c if c.isalnum() or c in " _.,-/" or ord(c) > 127 else f"#{ord(c)};" for c in text
    )


def _diagram(snapshot: GraphSnapshot, *, max_nodes: int, max_arrows: int) -> _Diagram:
    """Return boxes in order of submission, then variables; arrows in order of heads, then inferred
    ones.

    A variable is an arrow from its producer to each reader. It is a box if its producer is not
    drawn: the user set it, the call is no longer kept, or it belongs to another session.
    """
    chosen = select(snapshot, max_nodes)
    variables = {variable.id: variable for variable in snapshot.variables}
    boxes: list[_Box] = []
    writer: dict[str, int] = {}
    for node in chosen.nodes:
        output = variables[node.output].name if node.output in variables else ""
        if node.output is not None:
            writer[node.output] = len(boxes)
        detail = (node.detail, f"→ {output}" if output else "", called(node))
        boxes.append(
            _Box(
                shape="transform" if node.kind == "transform" else "call",
                title=node.name,
                detail=" ".join(filter(None, detail)),
                state=node.state,
                status=state_line(node, snapshot.taken_at),
                group=node.group,
            )
        )
    sources: dict[str, int] = {}
    arrows: list[_Arrow] = []
    arrows_left_out = 0
    for head, node in enumerate(chosen.nodes):
        for variable_id in node.inputs:
            if len(arrows) >= max_arrows:
                arrows_left_out += 1
                continue
            variable = variables[variable_id]
            if variable_id in writer:
                arrows.append(_Arrow(writer[variable_id], head, variable.name))
                continue
            if variable_id not in sources:
                sources[variable_id] = len(boxes)
                title, state = variable.full_name, variable.state
                boxes.append(_Box("variable", title, "", state, state))
            arrows.append(_Arrow(sources[variable_id], head, ""))
    numbers = {node.id: number for number, node in enumerate(chosen.nodes)}
    for (source, target), (kinds, confidence) in link_labels(snapshot).items():
        if source not in numbers or target not in numbers:
            continue
        if len(arrows) >= max_arrows:
            arrows_left_out += 1
            continue
        label = f"{kinds} {confidence:.2f}"
        arrows.append(_Arrow(numbers[source], numbers[target], label, True))
    return _Diagram(boxes, arrows, chosen.left_out, arrows_left_out)


def _write(snapshot: GraphSnapshot, diagram: _Diagram) -> str:
    lines = ["flowchart LR"]
    lines += [f"  n{number}{_box(box)}" for number, box in enumerate(diagram.boxes)]
    for number, (group, members) in enumerate(_groups(diagram.boxes).items()):
        lines.append(f'  subgraph g{number}["{escape(clip(f"group {group}", _LABEL_WIDTH))}"]')
        lines += [*(f"    n{member}" for member in members), "  end"]
    for tail, head, label, is_inferred in diagram.arrows:
        line = "-.->" if is_inferred else "-->"
        name = f'|"{escape(clip(label, _LABEL_WIDTH))}"|' if label else ""
        lines.append(f"  n{tail} {line}{name} n{head}")
    note = _left_out_note(diagram)
    title = f"session {clip(snapshot.session_name, _LABEL_WIDTH)} · {summary(snapshot)}"
    lines.append(f'  about["{escape(title)}{f"<br>{escape(note)}" if note else ""}"]')
    lines.append("  style about fill:none,stroke:none")
    return "\n".join([*lines, _CLASSES]) + "\n"


def _box(box: _Box) -> str:
    opening, closing = _BRACKETS[box.shape]
    texts = [box.title, box.detail, f"{SIGNS.get(box.state, '')} {box.status}"]
    label = "<br>".join(escape(clip(text, _LABEL_WIDTH)) for text in texts if text)
    return f'{opening}"{label}"{closing}:::{style_of(box.state)}'


def _groups(boxes: list[_Box]) -> dict[str, list[int]]:
    """Return the boxes of each declared task group with more than one box."""
    groups: dict[str, list[int]] = {}
    for number, box in enumerate(boxes):
        if box.group is not None:
            groups.setdefault(box.group, []).append(number)
    return {group: members for group, members in groups.items() if len(members) > 1}


def _left_out_note(diagram: _Diagram) -> str:
    """Return a line that counts the omitted parts; empty if everything is drawn."""
    parts = []
    if diagram.nodes_left_out:
        parts.append(f"{diagram.nodes_left_out} calls")
    if diagram.arrows_left_out:
        parts.append(f"{diagram.arrows_left_out} arrows")
    return f"… not drawn: {' and '.join(parts)}" if parts else ""
