"""A graph as one SVG file, without scripts, external fonts or images.

States are shown by colour, outline, sign and word; the bar in a box shows when its call ran, within
the time of the whole graph; further details are in tooltips.
"""

from __future__ import annotations

from xml.sax.saxutils import escape

from parrot_gateway.semantic.drawing.diagram import Box, Diagram, diagram_of, left_out_note
from parrot_gateway.semantic.drawing.labels import SIGNS, clean, clip, duration, style_of, summary
from parrot_gateway.semantic.drawing.layout import Layout, layout_of
from parrot_gateway.semantic.graph.snapshot import GraphSnapshot

_MAX_NODES = 1_000
_MAX_ARROWS = 2_000
#: Sizes in pixels: a box, the gaps between layers and within one, the head line, the margin.
_WIDTH, _HEIGHT = 184, 64
_LAYER_GAP, _ROW_GAP = 72, 18
_HEAD, _MARGIN = 52, 20
#: Cells of text that fit into a box.
_CELLS = 24
_HEAD_CELLS = 110
#: Room across for an arrow that passes a layer.
_BEND = 16
#: How much smaller than a box the box of a variable is, on each side.
_INSET_X, _INSET_Y = 12, 10

_STYLE = """\
text{font-family:ui-sans-serif,system-ui,"Segoe UI",Helvetica,Arial,sans-serif;font-size:12px;\
fill:#18181b}
.title{font-weight:600}.small{font-size:11px;fill:#3f3f46}.head{font-size:14px;font-weight:600}
.arrow{fill:none;stroke:#a1a1aa;stroke-width:1.3}
.inferred{stroke-dasharray:5 4}
.box{stroke-width:1.4}
.waiting{fill:#f4f4f5;stroke:#71717a;stroke-dasharray:5 3}
.running{fill:#dbeafe;stroke:#1d4ed8;stroke-width:3}
.done{fill:#dcfce7;stroke:#15803d}
.failed{fill:#fee2e2;stroke:#b91c1c;stroke-width:2.4}
.cancelled{fill:#f3e8ff;stroke:#7e22ce;stroke-dasharray:1.5 3}
.track{fill:#d4d4d8}.ran{fill:#52525b}"""


def to_svg(snapshot: GraphSnapshot) -> str:
    """An SVG document. Long graphs run down, wide ones to the right."""
    diagram = diagram_of(snapshot, max_nodes=_MAX_NODES, max_arrows=_MAX_ARROWS)
    layout = layout_of(len(diagram.boxes), [(a.tail, a.head) for a in diagram.arrows])
    widest = max((sum(i < len(diagram.boxes) for i in row) for row in layout.layers), default=0)
    runs_down = widest * (_WIDTH + _ROW_GAP) < len(layout.layers) * (_WIDTH + _LAYER_GAP)
    places = _places(layout, len(diagram.boxes), runs_down=runs_down)
    right = max((x for x, _ in places.values()), default=0) + _WIDTH + _MARGIN
    bottom = max((y for _, y in places.values()), default=_HEAD) + _HEIGHT + _MARGIN
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
        *_arrows(diagram, layout, places, runs_down=runs_down),
        *(_box(box, *places[i], snapshot) for i, box in enumerate(diagram.boxes)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _text(text: str) -> str:
    return escape(clean(text), {'"': "&quot;"})


def _places(layout: Layout, num_boxes: int, *, runs_down: bool) -> dict[int, tuple[int, int]]:
    """Upper left corner of every box, and where each bend enters its layer."""
    box_across = (_WIDTH if runs_down else _HEIGHT) + _ROW_GAP
    sizes = [[box_across if i < num_boxes else _BEND for i in row] for row in layout.layers]
    widest = max(map(sum, sizes), default=0)
    places = {}
    far = 0
    for row, across in zip(layout.layers, sizes, strict=True):
        aside = (widest - sum(across)) // 2
        for item, size in zip(row, across, strict=True):
            middle = aside + (0 if item < num_boxes else _BEND // 2)
            x, y = (middle, far) if runs_down else (far, middle)
            places[item] = (_MARGIN + x, _HEAD + y)
            aside += size
        far += (_HEIGHT if runs_down else _WIDTH) + _LAYER_GAP
    return places


def _arrows(
    diagram: Diagram, layout: Layout, places: dict[int, tuple[int, int]], *, runs_down: bool
) -> list[str]:
    """Curves from side to side, straight along the layers that they pass.

    Computed as (across the layers' direction, along it), and swapped when written.
    """
    turn = 1 if runs_down else -1
    breadth, depth = (_WIDTH, _HEIGHT)[::turn]
    inset = _INSET_Y if runs_down else _INSET_X

    def point(across: int, along: int) -> str:
        x, y = (across, along)[::turn]
        return f"{x} {y}"

    def curve(start: tuple[int, int], end: tuple[int, int]) -> str:
        middle = (start[1] + end[1]) // 2
        return f"C{point(start[0], middle)} {point(end[0], middle)} {point(*end)}"

    drawn = []
    for number, (tail, head, label, is_inferred) in enumerate(diagram.arrows):
        across, along = places[tail][::turn]
        is_small = diagram.boxes[tail].shape == "variable"
        at = (across + breadth // 2, along + depth - (inset if is_small else 0))
        path = f"M{point(*at)}"
        for bend in layout.bends.get(number, ()):
            across, along = places[bend][::turn]
            path += curve(at, (across, along))
            at = (across, along + depth)
            path += f"L{point(*at)}"
        across, along = places[head][::turn]
        path += curve(at, (across + breadth // 2, along))
        style = "arrow inferred" if is_inferred else "arrow"
        drawn.append(
            f'<path class="{style}" marker-end="url(#tip)" d="{path}">'
            f"<title>{_text(label or diagram.boxes[tail].title)}</title></path>"
        )
    return drawn


def _box(box: Box, x: int, y: int, snapshot: GraphSnapshot) -> str:
    look = f'class="box {style_of(box.state)}"'
    status = f"{SIGNS.get(box.state, '')} {box.status}"
    middle = x + _WIDTH // 2
    if box.shape == "variable":
        shape = (
            f'<rect {look} x="{x + _INSET_X}" y="{y + _INSET_Y}" width="{_WIDTH - 2 * _INSET_X}" '
            f'height="{_HEIGHT - 2 * _INSET_Y}" rx="{_HEIGHT // 2 - _INSET_Y}"/>'
        )
        lines = [("title", y + 29, clip(box.title, _CELLS - 4)), ("small", y + 45, status)]
    else:
        if box.shape == "transform":
            right, bottom, half = x + _WIDTH, y + _HEIGHT, y + _HEIGHT // 2
            corners = f"{x},{half} {x + 14},{y} {right - 14},{y} "
            corners += f"{right},{half} {right - 14},{bottom} {x + 14},{bottom}"
            shape = f'<polygon {look} points="{corners}"/>'
        else:
            shape = f'<rect {look} x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="6"/>'
        lines = [
            ("title", y + 18, clip(box.title, _CELLS)),
            ("small", y + 33, clip(box.detail, _CELLS)),
            ("small", y + 48, status),
        ]
    drawn = [f'<g class="node"><title>{_text(_hover(box, snapshot.taken_at))}</title>{shape}']
    drawn += [
        f'<text class="{style}" text-anchor="middle" x="{middle}" y="{line}">{_text(text)}</text>'
        for style, line, text in lines
        if text
    ]
    return "".join([*drawn, _bar(box, x, y, snapshot), "</g>"])


def _bar(box: Box, x: int, y: int, snapshot: GraphSnapshot) -> str:
    """When the call ran, within the time of the whole graph."""
    begin, end = snapshot.span
    node = box.node
    if node is None or node.started is None or end <= begin:
        return ""
    left, track, top = x + 20, _WIDTH - 40, y + _HEIGHT - 9
    finished = snapshot.taken_at if node.finished is None else node.finished
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
    parts = [f"{node.kind} {node.name}: {box.status}", f"waited {duration(node.waited_s(now))}"]
    parts += [text for text in (box.detail, node.model, node.objective) if text]
    if node.first_token is not None and node.started is not None:
        parts.append(f"first token after {duration(node.first_token - node.started)}")
    if node.tokens:
        parts.append(f"{node.tokens} tokens")
    if node.group:
        parts.append(f"in group {node.group}")
    if node.engine:
        parts.append(f"on {node.engine}")
    if node.failure:
        parts.append(node.failure)
    return " · ".join(parts)
