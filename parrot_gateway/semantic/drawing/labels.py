"""Names, durations and states in the form that all pictures use."""

from __future__ import annotations

import unicodedata
from collections import Counter
from typing import NamedTuple

from parrot_gateway.semantic.graph.snapshot import GraphSnapshot, NodeView

#: By state of a call or variable.
SIGNS = {
    "waiting": "○",
    "empty": "○",
    "running": "▶",
    "done": "✓",
    "ready": "✓",
    "failed": "✗",
    "cancelled": "⊘",
}


def style_of(state: str) -> str:
    """Return the style class of a state. Variables use the classes of calls."""
    return {"empty": "waiting", "ready": "done"}.get(state, state)


class Selection(NamedTuple):
    """The nodes of a picture in order of submission, and the number of others."""

    nodes: list[NodeView]
    left_out: int


def clean(text: str) -> str:
    """Reduce a text to one line of printable characters: no escapes, direction marks or lone
    surrogates.
    """
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def width_of(text: str) -> int:
    """Return the terminal cells that a clean text takes."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def clip(text: str, width: int) -> str:
    """Clean a text and cut it to `width` cells with …."""
    return cut(clean(text), width)


def cut(text: str, width: int) -> str:
    """Cut a printable text to `width` cells; a cut ends with …."""
    if width_of(text) <= width:
        return text
    used = 0
    for end, character in enumerate(text):
        used += width_of(character)
        if used > width - 1:
            return text[:end] + ("…" if width > 0 else "")
    return text


def duration(seconds: float) -> str:
    """Format a time: 340 ms, 1.2 s, 2 min 05 s, or 3 h 20 min."""
    seconds = max(0.0, seconds)
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def state_line(node: NodeView, now: float) -> str:
    """Return the state with the duration of the run, or of the wait before it."""
    ran = node.ran_s(now)
    return f"{node.state} {duration(node.waited_s(now) if ran is None else ran)}"


def link_labels(snapshot: GraphSnapshot) -> dict[tuple[str, str], tuple[str, float]]:
    """Return the inferred edges by source and target: their kinds, and the highest confidence."""
    found: dict[tuple[str, str], tuple[list[str], float]] = {}
    for link in snapshot.links:
        kinds, confidence = found.get((link.source, link.target), ([], 0.0))
        found[link.source, link.target] = ([*kinds, link.kind], max(confidence, link.confidence))
    return {pair: (", ".join(kinds), confidence) for pair, (kinds, confidence) in found.items()}


def called(node: NodeView) -> str:
    """Return the tools that a call's answer calls; empty if none."""
    return f"calls {', '.join(node.tools)}" if node.tools else ""


def title_of(snapshot: GraphSnapshot) -> str:
    """Return the session's name with its `summary`, or the summary alone."""
    if not snapshot.session_name:
        return summary(snapshot)
    kind = "inferred session" if snapshot.inferred else "session"
    return f"{kind} {snapshot.session_name} · {summary(snapshot)}"


def summary(snapshot: GraphSnapshot) -> str:
    """Return one line with the number of calls by state, and the time from first to last."""
    counts = Counter(node.state for node in snapshot.nodes)
    states = ("done", "running", "waiting", "failed", "cancelled")
    parts = [f"{counts[s]} {s}" for s in states if counts[s]]
    begin, end = snapshot.span
    total = f"{len(snapshot.nodes)} call{'' if len(snapshot.nodes) == 1 else 's'}"
    if parts:
        total += f": {', '.join(parts)} · {duration(end - begin)}"
    return total + (f" · {snapshot.pruned} earlier not kept" if snapshot.pruned else "")


def select(snapshot: GraphSnapshot, limit: int) -> Selection:
    """Return at most `limit` nodes: unfinished ones first, then the last submitted."""
    if len(snapshot.nodes) <= limit:
        return Selection(list(snapshot.nodes), 0)
    order = range(len(snapshot.nodes))
    ranked = sorted(
        order, key=lambda i: (snapshot.nodes[i].state not in ("waiting", "running"), -i)
    )
    return Selection([snapshot.nodes[i] for i in sorted(ranked[:limit])], len(order) - limit)
