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
    called,
    clean,
    clip,
    cut,
    link_labels,
    select,
    state_line,
    title_of,
    width_of,
)
from parrot_gateway.semantic.graph.snapshot import GraphSnapshot, NodeView

_MAX_CALLS = 500
_MIN_WIDTH = 40
_MAX_NAME = 32
_MAX_BAR = 24


def to_text(snapshot: GraphSnapshot, width: int = 100, max_lines: int | None = None) -> str:
    """Return lines of at most `width` cells (40 at least), calls ordered by stage and submission.

    Args:
        max_lines: beyond this, ended calls are left out, the earliest first.
    """
    width = max(width, _MIN_WIDTH)
    num_calls = _MAX_CALLS
    while True:
        lines = _lines(snapshot, width, num_calls)
        surplus = 0 if max_lines is None else len(lines) - max_lines
        if surplus <= 0 or num_calls <= 1:
            return "\n".join(_fit(line, width) for line in lines) + "\n"
        # A call takes a line or two.
        num_calls = max(1, min(num_calls, len(snapshot.nodes)) - (surplus + 1) // 2)


def _lines(snapshot: GraphSnapshot, width: int, num_calls: int) -> list[str]:
    """Return the text with at most `num_calls` calls, in lines of any length."""
    chosen = select(snapshot, num_calls)
    names = {variable.id: variable.full_name for variable in snapshot.variables}
    sources = _sources(snapshot)
    has_models = len({node.model for node in chosen.nodes if node.model}) > 1
    lines = [title_of(snapshot)]
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
            row += _flow(node, names, sources.get(node.id, ""))
            lines.append(row + (f" · {node.model}" if has_models and node.model else ""))
            if node.failure:
                lines.append(f"      {node.failure}")
    if chosen.left_out:
        plural = "" if chosen.left_out == 1 else "s"
        lines.append(f"… not shown: {chosen.left_out} call{plural}")
    return lines


def _sources(snapshot: GraphSnapshot) -> dict[str, str]:
    """Return the inferred edges to each call, as text: `chat 1-4, chat 7 (output 0.90)`."""
    calls = {node.id: node.name for node in snapshot.nodes}
    by_target: dict[str, list[tuple[str, float, str]]] = {}
    for (source, target), (kinds, confidence) in link_labels(snapshot).items():
        if source in calls:
            by_target.setdefault(target, []).append((kinds, confidence, calls[source]))
    texts: dict[str, str] = {}
    for target, edges in by_target.items():
        parts: list[str] = []
        for kinds in dict.fromkeys(kinds for kinds, _, _ in edges):
            equal = [(confidence, name) for kind, confidence, name in edges if kind == kinds]
            least, most = min(equal)[0], max(equal)[0]
            sure = f"{least:.2f}" if f"{least:.2f}" == f"{most:.2f}" else f"{least:.2f}-{most:.2f}"
            parts.append(f"{_ranges([name for _, name in equal])} ({kinds} {sure})")
        texts[target] = "⇠ " + ", ".join(parts)
    return texts


def _ranges(names: list[str]) -> str:
    """Combine names that differ in a final number, as `chat 1-3, chat 7`."""
    found: list[tuple[str, int, int]] = []
    plain: list[str] = []
    numbered: list[tuple[str, int]] = []
    for name in names:
        word, _, digits = name.rpartition(" ")
        if word and digits.isdecimal():
            numbered.append((word, int(digits)))
        else:
            plain.append(name)
    for word, number in sorted(numbered):
        if found and found[-1][0] == word and found[-1][2] == number - 1:
            found[-1] = (word, found[-1][1], number)
        else:
            found.append((word, number, number))
    ranges = [f"{word} {a}" if a == b else f"{word} {a}-{b}" for word, a, b in found]
    return ", ".join([*plain, *ranges])


def _flow(node: NodeView, names: dict[str, str], inferred: str) -> str:
    reads = ", ".join(names[variable_id] for variable_id in node.inputs)
    writes = f"→ {names[node.output]}" if node.output is not None else ""
    pipeline = f"| {node.detail}" if node.detail else ""
    where = f"· {node.engine}: {node.placement}" if node.placement else ""
    why = f"· {node.explanation}" if node.explanation else ""
    parts = (reads, pipeline, writes, inferred, called(node), where, why)
    return " ".join(part for part in parts if part)


def _bar(node: NodeView, now: float, begin_end: tuple[float, float], width: int) -> str:
    """Draw when a node waited (·) and ran (█), on the time axis of the whole graph."""
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
    """Cut a line to the width; leading blanks and blanks between columns stay."""
    return cut("".join(c if c.isprintable() else " " for c in line).rstrip(), width)
