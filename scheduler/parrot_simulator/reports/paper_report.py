"""Experiments and ablations as Markdown tables and pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from parrot_simulator.experiments.ablation import Row
from parrot_simulator.experiments.experiments import OURS, Experiment
from parrot_simulator.experiments.goodput import (
    BASELINE,
    FIGURE,
    OBJECTIVES,
    SHARE,
    STEPS,
    Case,
    Found,
)
from parrot_simulator.experiments.paper import Comparison, Outcome
from parrot_simulator.reports.plots import require_matplotlib

_UNITS = {
    "job_s": "s",
    "call_s": "s",
    "ms_per_token": "ms/token",
    "decode_ms_per_token": "ms/token",
}


def experiment_table(
    experiment: Experiment, outcomes: Sequence[Outcome], comparisons: Sequence[Comparison]
) -> str:
    """One experiment: every arm at every point, and how many times ours is better."""
    ratios = {(c.point, c.baseline): c for c in comparisons}
    unit = _UNITS[experiment.metric]
    lines = [
        f"Figure {experiment.figure}: {experiment.title} "
        f"({experiment.engines} x {experiment.profile}), {unit}",
        "",
        "| point | arm | mean | p50 | p99 | in time | hit | over ours | printed |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    measured = {p.label: p.measured for p in experiment.points}
    for outcome in outcomes:
        found = ratios.get((outcome.point, outcome.arm))
        paper = measured.get(outcome.point, {}).get(outcome.arm)
        printed = f"{found.printed:g}x" if found and found.printed else ""
        cells = [
            outcome.point,
            outcome.arm + (f" ({outcome.failed} failed)" if outcome.failed else ""),
            number(outcome.mean),
            number(outcome.p50),
            number(outcome.p99),
            percent(outcome.good_share),
            percent(outcome.hit_rate),
            f"{found.ratio:.2f}x" if found else "",
            f"{paper:g} {unit}" if paper is not None else printed,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    points = {p.label for p in experiment.points}
    for comparison in comparisons:
        if comparison.point not in points:
            printed = f" (printed {comparison.printed:g}x)" if comparison.printed else ""
            lines.append(
                f"\n{comparison.point}: {comparison.baseline} {number(comparison.theirs)}, ours "
                f"{number(comparison.ours)}: {number(comparison.ratio)}x{printed}"
            )
    for name in outcomes[0].besides if outcomes else ():
        parts = [f"{o.point}, {o.arm}: {number(o.besides[name])}" for o in outcomes]
        lines += ["", f"{name}: " + "; ".join(parts)]
    if experiment.note:
        lines += ["", experiment.note]
    return "\n".join(lines)


def losses(comparisons: Sequence[Comparison]) -> str:
    """Where another arm is better than ours by more than one percent, worst first."""
    lost = sorted((c for c in comparisons if c.ratio < 0.99), key=lambda c: c.ratio)
    if not lost:
        return "Ours is nowhere more than 1 % behind another arm."
    lines = ["Ours is behind:", ""]
    lines += [
        f"- figure {c.figure}, {c.point}: {c.baseline} {number(c.theirs)}, ours {number(c.ours)}"
        for c in lost
    ]
    return "\n".join(lines)


def goodput_table(case: Case, found: Sequence[Found]) -> str:
    """The goodput of each arm on one workload, and what its applications had to meet."""
    lines = [
        f"{FIGURE}: {case.workload} ({case.engines} engine{'s' if case.engines > 1 else ''}; "
        f"{case.note}), {case.unit} at which {percent(SHARE)} of each kind meet their objective",
        "",
        "| arm | highest load | in time | next load | in time | worst kind | "
        f"over {BASELINE.name} | runs |",
        "|---|--:|--:|--:|--:|---|--:|--:|",
    ]
    for arm in found:
        cells = [
            arm.arm,
            "none" if arm.load is None else number(arm.load),
            percent(_given(arm.share)),
            number(_given(arm.beyond)),
            percent(_given(arm.share_beyond)),
            arm.limit or "",
            "" if arm.ratio is None else f"{arm.ratio:.2f}x",
            str(arm.runs),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def objectives_table() -> str:
    """What applications have to meet, by kind, and why."""
    lines = [
        f"Loads are 2^(1/{STEPS}) apart. Objectives:",
        "",
        "| kinds | first token | each after it | whole | why |",
        "|---|--:|--:|--:|---|",
    ]
    for objective in dict.fromkeys(OBJECTIVES.values()):
        kinds = ", ".join(kind for kind, bound in OBJECTIVES.items() if bound is objective)
        cells = [
            kinds,
            "" if objective.ttft_s is None else f"{objective.ttft_s:g} s",
            "" if objective.tpot_s is None else f"{1000 * objective.tpot_s:g} ms",
            "" if objective.times_alone is None else f"{objective.times_alone:g} x alone",
            objective.why,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _given(value: float | None) -> float:
    return math.nan if value is None else value


def ablation_table(rows: Sequence[Row]) -> str:
    """All cases, a row for each switch."""
    lines = [
        "| workload | switch | mean s | p99 s | in time | hit | mean over all on |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {row.workload} | {row.switch} | {number(row.mean_s)} | {number(row.p99_s)} | "
        f"{percent(row.good_share)} | {percent(row.hit_rate)} | {row.ratio:.2f} |"
        for row in rows
    ]
    return "\n".join(lines)


def draw_experiment(experiment: Experiment, outcomes: Sequence[Outcome], folder: Path) -> Path:
    """The mean of each arm at each point, as `figure-NAME.svg`.

    Raises:
        PlotsUnavailableError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    plt = require_matplotlib()
    # Letters as letters: a fifth of the size.
    plt.rcParams["svg.fonttype"] = "none"
    folder.mkdir(parents=True, exist_ok=True)
    labels = [point.label for point in experiment.points]
    figure, axis = plt.subplots(figsize=(6.4, 4))
    for arm in experiment.arms:
        values = {o.point: o.mean for o in outcomes if o.arm == arm.name}
        if values:
            axis.plot(
                labels,
                [values.get(label, math.nan) for label in labels],
                {"paper": "s--", "modern": "o-", "ours": "^-"}[arm.kind],
                label=arm.name,
                linewidth=2.5 if arm.name == OURS.name else 1.2,
            )
    axis.set(ylabel=f"mean, {_UNITS[experiment.metric]}", yscale="log", title=experiment.title)
    axis.tick_params(axis="x", labelrotation=30)
    axis.grid(alpha=0.3)
    axis.legend(fontsize="x-small")
    figure.tight_layout()
    path = folder / f"figure-{experiment.figure.replace(' ', '-')}.svg"
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path


def number(value: float) -> str:
    """Three digits, or `-`."""
    if math.isnan(value):
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def percent(value: float) -> str:
    """A share, or `-`."""
    return "-" if math.isnan(value) else f"{100 * value:.0f} %"
