"""A graph as one SVG file: no scripts, no fonts or images from elsewhere.

States are told by colour, by outline, by a sign and by a word. The bar below a box shows when its
call ran, within the time of the whole graph. Hovering over a box tells more.
"""

from __future__ import annotations

from typing import NamedTuple
from xml.sax.saxutils import escape

from parrot_gateway.core.drawing.diagram import Box, Diagram, diagram_of, left_out_note
from parrot_gateway.core.drawing.labels import SIGNS, clean, clip, duration, span, summary, waited_s
from parrot_gateway.core.drawing.layout import layers_of
from parrot_gateway.core.snapshot import GraphSnapshot

_MAX_NODES = 1_000
_MAX_ARROWS = 2_000
#: Sizes in pixels: a box, the gaps between layers and within one, the head line, the margin.
_WIDTH, _HEIGHT = 184, 64
_LAYER_GAP, _ROW_GAP = 72, 18
_HEAD, _MARGIN = 52, 20
#: Cells of text that fit into a box.
_CELLS = 24
_HEAD_CELLS = 110
_MAX_ARROW_LABELS = 150

_STYLE = """\
text{font-family:ui-sans-serif,system-ui,"Segoe UI",Helvetica,Arial,sans-serif;font-size:12px;\
fill:#18181b}
.title{font-weight:600}.small{font-size:11px;fill:#3f3f46}.head{font-size:14px;font-weight:600}
.arrow{fill:none;stroke:#a1a1aa;stroke-width:1.3}
.box{stroke-width:1.4}
.waiting{fill:#f4f4f5;stroke:#71717a;stroke-dasharray:5 3}
.running{fill:#dbeafe;stroke:#1d4ed8;stroke-width:3}
.done{fill:#dcfce7;stroke:#15803d}
.failed{fill:#fee2e2;stroke:#b91c1c;stroke-width:2.4}
.cancelled{fill:#f3e8ff;stroke:#7e22ce;stroke-dasharray:1.5 3}
.track{fill:#d4d4d8}.ran{fill:#52525b}"""
_CLASS_OF = {"empty": "waiting", "ready": "done"}


class _Times(NamedTuple):
    """First submission, last end, and the moment of the snapshot."""

    begin: float
    end: float
    now: float


def to_svg(snapshot: GraphSnapshot) -> str:
    """An SVG document. Long graphs run down, wide ones to the right."""
    diagram = diagram_of(snapshot, max_nodes=_MAX_NODES, max_arrows=_MAX_ARROWS)
    layers = layers_of(len(diagram.boxes), [(a.tail, a.head) for a in diagram.arrows])
    widest = max(map(len, layers), default=0)
    runs_down = widest * (_WIDTH + _ROW_GAP) < len(layers) * (_WIDTH + _LAYER_GAP)
    corners = _corners(layers, widest, runs_down=runs_down)
    right = max((x for x, _ in corners.values()), default=0) + _WIDTH + _MARGIN
    bottom = max((y for _, y in corners.values()), default=_HEAD) + _HEIGHT + _MARGIN
    times = _Times(*span(snapshot), snapshot.taken_at)
    title = f"session {clean(snapshot.session_name)} · {summary(snapshot)}"
    note = left_out_note(diagram)
    head = clip(title + (f" · {note}" if note else ""), _HEAD_CELLS)
    width = max(right, _MARGIN * 2 + 8 * len(head))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{bottom}" '
        f'viewBox="0 0 {width} {bottom}" role="img" aria-labelledby="title">',
        f'<title id="title">{_text(title)}</title>',
        f"<style>{_STYLE}</style>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="#a1a1aa"/></marker></defs>',
        f'<rect width="{width}" height="{bottom}" fill="#ffffff"/>',
        f'<text class="head" x="{_MARGIN}" y="{_MARGIN + 10}">{_text(head)}</text>',
        *_arrows(diagram, corners, runs_down=runs_down),
        *(_box(box, *corners[i], times) for i, box in enumerate(diagram.boxes)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _text(text: str) -> str:
    return escape(clean(text), {'"': "&quot;"})


def _corners(
    layers: list[list[int]], widest: int, *, runs_down: bool
) -> dict[int, tuple[int, int]]:
    """Upper left corner of every box; each layer is centred on the widest one."""
    corners = {}
    along = (_HEIGHT if runs_down else _WIDTH) + _LAYER_GAP
    across = (_WIDTH if runs_down else _HEIGHT) + _ROW_GAP
    for number, boxes in enumerate(layers):
        shift = (widest - len(boxes)) * across // 2
        for row, box in enumerate(boxes):
            far, aside = number * along, shift + row * across
            x, y = (aside, far) if runs_down else (far, aside)
            corners[box] = (_MARGIN + x, _HEAD + y)
    return corners


def _arrows(diagram: Diagram, corners: dict[int, tuple[int, int]], *, runs_down: bool) -> list[str]:
    """Curves from side to side; names on them as long as they can be told apart."""
    drawn = []
    labels = len(diagram.arrows) <= _MAX_ARROW_LABELS
    for tail, head, label in diagram.arrows:
        (x1, y1), (x2, y2) = corners[tail], corners[head]
        if runs_down:
            x1, y1, x2 = x1 + _WIDTH // 2, y1 + _HEIGHT, x2 + _WIDTH // 2
            bend = (y2 - y1) // 2
            path = f"M{x1} {y1}C{x1} {y1 + bend} {x2} {y2 - bend} {x2} {y2}"
        else:
            x1, y1, y2 = x1 + _WIDTH, y1 + _HEIGHT // 2, y2 + _HEIGHT // 2
            bend = (x2 - x1) // 2
            path = f"M{x1} {y1}C{x1 + bend} {y1} {x2 - bend} {y2} {x2} {y2}"
        hover = f"<title>{_text(label)}</title>" if label else ""
        drawn.append(f'<path class="arrow" marker-end="url(#tip)" d="{path}">{hover}</path>')
        if label and labels:
            # Close to the head, where curves from one producer have parted.
            x, y = x1 + (x2 - x1) * 7 // 10, y1 + (y2 - y1) * 7 // 10
            drawn.append(
                f'<text class="small" text-anchor="middle" x="{x}" y="{y - 4}">'
                f"{_text(clip(label, 11))}</text>"
            )
    return drawn


def _box(box: Box, x: int, y: int, times: _Times) -> str:
    look = f'class="box {_CLASS_OF.get(box.state, box.state)}"'
    status = f"{SIGNS.get(box.state, '')} {box.status}"
    middle = x + _WIDTH // 2
    if box.shape == "variable":
        shape = (
            f'<rect {look} x="{x + 12}" y="{y + 10}" width="{_WIDTH - 24}" '
            f'height="{_HEIGHT - 20}" rx="{(_HEIGHT - 20) // 2}"/>'
        )
        lines = [("title", y + 29, clip(box.title, _CELLS - 4)), ("small", y + 45, status)]
    else:
        if box.shape == "transform":
            points = [(x, y + _HEIGHT // 2), (x + 14, y), (x + _WIDTH - 14, y)]
            points += [(x + _WIDTH, y + _HEIGHT // 2), (x + _WIDTH - 14, y + _HEIGHT)]
            points += [(x + 14, y + _HEIGHT)]
            corners = " ".join(f"{px},{py}" for px, py in points)
            shape = f'<polygon {look} points="{corners}"/>'
        else:
            shape = f'<rect {look} x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="6"/>'
        lines = [
            ("title", y + 18, clip(box.title, _CELLS)),
            ("small", y + 33, clip(box.detail, _CELLS)),
            ("small", y + 48, status),
        ]
    drawn = [f'<g class="node"><title>{_text(_hover(box, times.now))}</title>{shape}']
    drawn += [
        f'<text class="{style}" text-anchor="middle" x="{middle}" y="{line}">{_text(text)}</text>'
        for style, line, text in lines
        if text
    ]
    return "".join([*drawn, _bar(box, x, y, times), "</g>"])


def _bar(box: Box, x: int, y: int, times: _Times) -> str:
    """When the call ran, on a track that is the time of the whole graph."""
    begin, end, now = times
    node = box.node
    if node is None or node.started is None or end <= begin:
        return ""
    left, track, top = x + 20, _WIDTH - 40, y + _HEIGHT - 9
    finished = node.finished if node.finished is not None else now
    first = min(1.0, max(0.0, (node.started - begin) / (end - begin)))
    last = min(1.0, max(first, (finished - begin) / (end - begin)))
    long = max(2.0, (last - first) * track)
    return (
        f'<rect class="track" x="{left}" y="{top}" width="{track}" height="3"/>'
        f'<rect class="ran" x="{min(left + first * track, left + track - long):.1f}" y="{top}" '
        f'width="{long:.1f}" height="3"/>'
    )


def _hover(box: Box, now: float) -> str:
    node = box.node
    if node is None:
        return f"variable {box.title}: {box.status}"
    told = [f"{node.kind} {node.name}: {box.status}"]
    told.append(f"waited {duration(waited_s(node, now))}")
    told += [text for text in (box.detail, node.model, node.objective) if text]
    if node.first_token is not None and node.started is not None:
        told.append(f"first token after {duration(node.first_token - node.started)}")
    if node.tokens:
        told.append(f"{node.tokens} tokens")
    if node.engine:
        told.append(f"on {node.engine}")
    if node.failure:
        told.append(node.failure)
    return " · ".join(told)
