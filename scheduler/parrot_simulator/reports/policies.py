"""Tables of policies side by side."""

from __future__ import annotations

from collections.abc import Sequence

from parrot_simulator.experiments.mixing import ApartFigure, StepCost
from parrot_simulator.experiments.policies import PolicyFigure, behind
from parrot_simulator.experiments.robustness import BASELINE, RobustnessFigure
from parrot_simulator.reports.tables import markdown, number


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
    lines = [markdown(head, rows, left=3), ""]
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
    return markdown(("application", "load", "figure", first, *others), rows, left=3)


def robustness_table(policy: str, figures: Sequence[RobustnessFigure]) -> str:
    """One row for each figure of each case of bad input, and what is wrong in each."""
    rows = [
        (
            figure.case,
            figure.figure,
            number(figure.policy),
            number(figure.baseline),
            f"{figure.ratio:.2f}x",
            f"{figure.fairness:.2f}",
            f"{figure.baseline_fairness:.2f}",
            str(figure.failed or ""),
        )
        for figure in figures
    ]
    head = ("case", "figure", policy, BASELINE, f"{policy} over it", "fairness", "its", "failed")
    meanings = {figure.case.partition(",")[0]: figure.what for figure in figures}
    notes = [f"- {name}: {what}." for name, what in meanings.items()]
    return "\n".join([markdown(head, rows, left=2), "", *notes])


def steps_table(steps: Sequence[StepCost]) -> str:
    """Milliseconds of a step: a row for each number of decodes, a column for what is filled."""
    filled = list(dict.fromkeys(step.filled for step in steps))
    rows = [
        (str(decodes), *(number(1000 * step.seconds) for step in steps if step.decodes == decodes))
        for decodes in dict.fromkeys(step.decodes for step in steps)
    ]
    head = ("decodes, ms a step", *(f"{tokens} filled" for tokens in filled))
    return markdown(head, rows)


def apart_table(figures: Sequence[ApartFigure]) -> str:
    """Chats and jobs together, and on engines of their own."""
    names = list(figures[0].chats)
    rows = [
        (
            f"{figure.load:g} chats/s",
            f"x {figure.jobs_share:g}",
            what,
            *(f"**{number(v)}**" if v == min(values.values()) else number(v)
              for v in values.values()),
        )
        for figure in figures
        for what, values in (("chats, ms/token", figure.chats), ("jobs, s", figure.jobs))
    ]  # fmt: skip
    return markdown(("load", "jobs", "figure", *names), rows, left=3)
