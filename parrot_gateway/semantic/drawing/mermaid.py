"""A graph as Mermaid text, cut to GitHub's limits of 50,000 characters and 500 arrows."""

from __future__ import annotations

from parrot_gateway.semantic.drawing.diagram import (
    Box,
    Diagram,
    diagram_of,
    groups_of,
    left_out_note,
)
from parrot_gateway.semantic.drawing.labels import SIGNS, clip, style_of, summary
from parrot_gateway.semantic.graph.snapshot import GraphSnapshot

MAX_CHARACTERS = 49_000
MAX_ARROWS = 490
_MAX_NODES = 256
_LABEL_WIDTH = 40

#: Brackets that make Mermaid's shapes: rectangle, hexagon, stadium.
_BRACKETS = {"call": ("[", "]"), "transform": ("{{", "}}"), "variable": ("([", "])")}

_CLASSES = """\
  classDef waiting fill:#f4f4f5,stroke:#71717a,color:#18181b,stroke-dasharray:4 3
  classDef running fill:#dbeafe,stroke:#1d4ed8,color:#18181b,stroke-width:3px
  classDef done fill:#dcfce7,stroke:#15803d,color:#18181b
  classDef failed fill:#fee2e2,stroke:#b91c1c,color:#18181b,stroke-width:2px
  classDef cancelled fill:#f3e8ff,stroke:#7e22ce,color:#18181b,stroke-dasharray:1 3"""


def to_mermaid(snapshot: GraphSnapshot) -> str:
    """A `flowchart`, ready to be put between ```mermaid fences."""
    max_nodes, max_arrows = _MAX_NODES, MAX_ARROWS
    while True:
        diagram = diagram_of(snapshot, max_nodes=max_nodes, max_arrows=max_arrows)
        text = _write(snapshot, diagram)
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


def _write(snapshot: GraphSnapshot, diagram: Diagram) -> str:
    lines = ["flowchart LR"]
    lines += [f"  n{number}{_box(box)}" for number, box in enumerate(diagram.boxes)]
    for number, (group, members) in enumerate(groups_of(diagram).items()):
        lines.append(f'  subgraph g{number}["{escape(clip(f"group {group}", _LABEL_WIDTH))}"]')
        lines += [*(f"    n{member}" for member in members), "  end"]
    for tail, head, label, is_inferred in diagram.arrows:
        line = "-.->" if is_inferred else "-->"
        name = f'|"{escape(clip(label, _LABEL_WIDTH))}"|' if label else ""
        lines.append(f"  n{tail} {line}{name} n{head}")
    note = left_out_note(diagram)
    title = f"session {clip(snapshot.session_name, _LABEL_WIDTH)} · {summary(snapshot)}"
    lines.append(f'  about["{escape(title)}{f"<br>{escape(note)}" if note else ""}"]')
    lines.append("  style about fill:none,stroke:none")
    return "\n".join([*lines, _CLASSES]) + "\n"


def _box(box: Box) -> str:
    opening, closing = _BRACKETS[box.shape]
    texts = [box.title, box.detail, f"{SIGNS.get(box.state, '')} {box.status}"]
    label = "<br>".join(escape(clip(text, _LABEL_WIDTH)) for text in texts if text)
    return f'{opening}"{label}"{closing}:::{style_of(box.state)}'
