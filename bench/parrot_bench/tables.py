"""Tables of results, as aligned text or Markdown: nothing is cut, whatever the terminal's width.

Needs the standard library alone: the benches of the engine run where nothing else is installed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Row = Sequence[str]


def text_table(head: Row, rows: Sequence[Row], *, texts: int = 1, title: str = "") -> str:
    """A table in columns of equal width: the first `texts` to the left, the others to the right.

    Columns without any text below their heading are left out.
    """
    used = _used(head, rows, texts)
    lines = [[row[column] for column in used] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = [
        "  ".join(
            cell.ljust(width) if column < texts else cell.rjust(width)
            for column, cell, width in zip(used, line, widths, strict=True)
        ).rstrip()
        for line in lines
    ]
    shown.insert(1, "-" * max(map(len, shown)))
    return "\n".join([*([title] if title else ()), *shown])


def markdown(head: Row, rows: Sequence[Row], *, texts: int = 1) -> str:
    """The same in Markdown."""
    used = _used(head, rows, texts)
    marks = ["---" if column < texts else "--:" for column in used]
    lines = [[row[column] for column in used] for row in (head, *rows)]
    lines.insert(1, marks)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _used(head: Row, rows: Sequence[Row], texts: int) -> list[int]:
    """The columns that have a text in some row; all where there are no rows."""
    return [
        column
        for column in range(len(head))
        if column < texts or not rows or any(row[column] for row in rows)
    ]


def number(value: float | None) -> str:
    """Three digits that matter, thousands apart; `-` for none."""
    if value is None or math.isnan(value):
        return "-"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{min(digits, 5)}f}"
    return text.rstrip("0").rstrip(".") if digits else text


def percent(value: float) -> str:
    """A share; `-` for none."""
    return "-" if math.isnan(value) else f"{100 * value:.0f} %"


def yes_or_no(met: bool | None) -> str:
    return "" if met is None else "yes" if met else "no"
