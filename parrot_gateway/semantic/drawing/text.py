"""A graph for the terminal: stage by stage, a line a call, with states, times and a time line.

    session demo · 3 calls: 2 done, 1 running · 2.4 s
    stage 0
      ✓ outline  done 1.2 s     ▕████      ▏ topic → outline
      ✓ research done 1.0 s     ▕████      ▏ topic → facts
    stage 1
      ▶ write    running 1.2 s  ▕    ██████▏ outline, facts → story

Plain text without colours or cursor movements.
"""

from __future__ import annotations

from itertools import groupby

from parrot_gateway.semantic.drawing.labels import (
    SIGNS,
    clean,
    clip,
    cut,
    select,
    state_line,
    summary,
    width_of,
)
from parrot_gateway.semantic.graph.snapshot import GraphSnapshot, NodeView

_MAX_LINES = 500
_MIN_WIDTH = 40
_MAX_NAME = 24
_MAX_BAR = 24


def to_text(snapshot: GraphSnapshot, width: int = 100) -> str:
    """Lines of at most `width` cells (40 at least), calls ordered by stage and submission."""
    width = max(width, _MIN_WIDTH)
    chosen = select(snapshot, _MAX_LINES)
    names = {variable.id: variable.full_name for variable in snapshot.variables}
    sources = _sources(snapshot)
    title = f"session {snapshot.session_name} · " if snapshot.session_name else ""
    lines = [title + summary(snapshot)]
    statuses = [state_line(node, snapshot.taken_at) for node in chosen.nodes]
    status_width = max(map(len, statuses), default=0)
    widest = max((width_of(clean(node.name)) for node in chosen.nodes), default=0)
    name_width = min(widest, _MAX_NAME, width // 4)
    begin_end = snapshot.span
    bar_width = max(0, min(_MAX_BAR, width - name_width - status_width - 30))
    rows = sorted(zip(chosen.nodes, statuses, strict=True), key=lambda row: row[0].stage)
    for stage, members in groupby(rows, key=lambda row: row[0].stage):
        lines.append(f"stage {stage}")
        for node, status in members:
            name = clip(node.name, name_width)
            row = f"  {SIGNS[node.state]} {name}{' ' * (name_width - width_of(name))} "
            row += f"{status:<{status_width}} "
            if bar_width >= 4:
                row += f"▕{_bar(node, snapshot.taken_at, begin_end, bar_width)}▏ "
            lines.append(row + _flow(node, names, sources.get(node.id, [])))
            if node.failure:
                lines.append(f"      {node.failure}")
    if chosen.left_out:
        lines.append(f"… not shown: {chosen.left_out} calls")
    return "\n".join(_fit(line, width) for line in lines) + "\n"


def _sources(snapshot: GraphSnapshot) -> dict[str, list[str]]:
    """The inferred edges to each call, as text."""
    calls = {node.id: node.name for node in snapshot.nodes}
    sources: dict[str, list[str]] = {}
    for link in snapshot.links:
        if link.source not in calls:
            continue
        text = f"{calls[link.source]} ({link.kind} {link.confidence:.2f})"
        sources.setdefault(link.target, []).append(text)
    return sources


def _flow(node: NodeView, names: dict[str, str], sources: list[str]) -> str:
    inferred = f"⇠ {', '.join(sources)}" if sources else ""
    reads = ", ".join(names[variable_id] for variable_id in node.inputs)
    writes = f"→ {names[node.output]}" if node.output is not None else ""
    pipeline = f"| {node.detail}" if node.detail else ""
    where = f"· {node.engine}: {node.placement}" if node.placement else ""
    return " ".join(part for part in (reads, pipeline, writes, inferred, where) if part)


def _bar(node: NodeView, now: float, begin_end: tuple[float, float], width: int) -> str:
    """When it waited (·) and ran (█), within the time of the whole graph."""
    begin, end = begin_end
    scale = width / (end - begin) if end > begin else 0.0
    finished = node.finished if node.finished is not None else now
    started = node.started if node.started is not None else finished
    first = min(width - 1, max(0, int((node.submitted - begin) * scale)))
    middle = min(width - 1, max(first, int((started - begin) * scale)))
    last = min(width, max(middle, round((finished - begin) * scale)))
    if node.started is not None:
        last = max(last, middle + 1)
    return (
        " " * first
        + "·" * (middle - first)
        + (("█" if node.started is not None else "·") * (last - middle) + " " * (width - last))
    )


def _fit(line: str, width: int) -> str:
    """Cut to the width; blanks at the beginning and between columns stay."""
    return cut("".join(c if c.isprintable() else " " for c in line).rstrip(), width)
