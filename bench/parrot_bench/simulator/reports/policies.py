"""Tables of policies side by side."""

from __future__ import annotations

from collections.abc import Sequence

from parrot_bench.simulator.experiments.policies import PolicyFigure, behind
from parrot_bench.tables import markdown, number


def policies_table(figures: Sequence[PolicyFigure]) -> str:
    """One row for each figure at each load, and where the first policy is behind in both."""
    if not figures:
        return ""
    first, *others = figures[0].values
    rows = []
    for figure in figures:
        cells = [
            f"**{number(value)}**" if value == min(figure.values.values()) else number(value)
            for value in figure.values.values()
        ]
        rows.append(
            (
                figure.application,
                f"{figure.load:g} {figure.unit}",
                figure.figure,
                *cells,
                figure.best_other,
                f"{figure.ratio:.2f}x",
            )
        )
    head = ("application", "load", "figure", first, *others, "best other", f"{first} over it")
    lost = behind(figures)
    places = len(figures) // 2
    lines = [markdown(head, rows, texts=3), ""]
    if lost:
        where = ", ".join(f"{application} at {load:g}" for application, load in lost)
        lines.append(
            f"{first} is behind the best other policy in both figures at {len(lost)} of {places} "
            f"loads: {where}."
        )
    else:
        lines.append(f"{first} is nowhere behind the best other policy in both figures.")
    return "\n".join(lines)


def arms_table(figures: Sequence[PolicyFigure]) -> str:
    """One row for each figure at each load: the first arm, and how many times as good others."""
    if not figures:
        return ""
    first, *others = figures[0].values
    rows = [
        (
            figure.application,
            f"{figure.load:g} {figure.unit}",
            figure.figure,
            number(figure.values[first]),
            *(f"{figure.values[first] / figure.values[name]:.2f}x" for name in others),
        )
        for figure in figures
    ]
    return markdown(("application", "load", "figure", first, *others), rows, texts=3)
