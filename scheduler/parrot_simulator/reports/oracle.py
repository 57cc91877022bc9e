"""Tables of how far policies are from the best schedules."""

from __future__ import annotations

from collections.abc import Sequence

from parrot_simulator.experiments.oracle import OracleFigure, mean_distance
from parrot_simulator.reports.tables import markdown, number


def oracle_table(figures: Sequence[OracleFigure]) -> str:
    """Each mean at each load: policies, the best schedule that was found, the bound, and distances.

    The distances are of all means of an application together.
    """
    if not figures:
        return ""
    policies = list(figures[0].values)
    rows = [
        (
            figure.application,
            f"{figure.load:g} {figure.unit}",
            figure.figure,
            *map(number, figure.values.values()),
            number(figure.oracle),
            number(figure.bound),
            f"{figure.oracle / figure.bound:.2f}x",
            f"{figure.distances[policies[0]]:.2f}x",
            f"{figure.distances[figure.best_policy]:.2f}x ({figure.best_policy})",
        )
        for figure in figures
    ]
    head = (
        "application", "load", "figure", *policies, "oracle", "bound", "oracle / bound",
        f"{policies[0]} / oracle", "best / oracle",
    )  # fmt: skip
    means = ", ".join(f"{name} {mean_distance(figures, name):.2f}x" for name in policies)
    return "\n".join([markdown(head, rows, left=3), "", f"Over the oracle, in the mean: {means}."])
