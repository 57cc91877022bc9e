"""Pictures of results, with matplotlib, which the extra `simulate` installs.

Each function raises `PlotsUnavailableError` without it, and OSError where a file cannot be written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from parrot_bench.simulator.experiments.definitions import Experiment
from parrot_bench.simulator.experiments.runner import ArmResult
from parrot_bench.simulator.metrics import Results
from parrot_bench.simulator.reports.tables import UNITS

#: Engines in one picture of timelines.
MAX_ENGINES = 16


class PlotsUnavailableError(Exception):
    """Matplotlib is missing; the message names the extra that installs it."""


def require_matplotlib() -> Any:
    """Matplotlib's `pyplot`, drawing into files.

    Raises:
        PlotsUnavailableError: it is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        raise PlotsUnavailableError(
            "plots need matplotlib: pip install 'parrot-bench[plots]'"
        ) from None
    mpl.use("Agg")
    # The same input gives the same file.
    mpl.rcParams["svg.hashsalt"] = "parrot"
    import matplotlib.pyplot as plt

    return plt


def draw(results: Mapping[str, Results], folder: Path, suffix: str = "svg") -> list[Path]:
    """All pictures that the results are good for.

    Args:
        results: By the name of the run, usually its policy.
        folder: Made if it does not exist.
        suffix: `svg` or `png`.

    Returns:
        The files: `completion.*`, and `engines-NAME.*` for each run whose timelines were recorded.
    """
    plt = require_matplotlib()
    folder.mkdir(parents=True, exist_ok=True)
    files = [_completion(plt, results, folder / f"completion.{suffix}")]
    for name, result in results.items():
        if result.timelines:
            safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in name)
            files.append(_engines(plt, name, result, folder / f"engines-{safe}.{suffix}"))
    return files


def draw_load(
    sweeps: Mapping[str, Mapping[float, Results]], path: Path, xlabel: str = "load"
) -> Path:
    """Hit rate and mean completion time against load, a line for each policy.

    `sweeps` is by policy, then by load: any number that was varied, named by `xlabel`.
    """
    plt = require_matplotlib()
    figure, (upper, lower) = plt.subplots(2, 1, sharex=True, figsize=(6.4, 6.4))
    for name, sweep in sweeps.items():
        loads = sorted(sweep)
        upper.plot(loads, [100 * sweep[x].total.hit_rate for x in loads], "o-", label=name)
        lower.plot(loads, [sweep[x].total.job_s.mean for x in loads], "o-", label=name)
    upper.set(ylabel="prompt tokens found in cache (%)", ylim=(0, 100))
    lower.set(ylabel="mean completion time (s)", xlabel=xlabel, yscale="log")
    upper.legend()
    return _save(plt, figure, path)


def draw_experiment(experiment: Experiment, outcomes: Sequence[ArmResult], folder: Path) -> Path:
    """The mean of each arm at each point, as `figure-NAME.svg`."""
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
                linewidth=2.5 if arm.name == experiment.base else 1.2,
            )
    axis.set(ylabel=f"mean, {UNITS[experiment.metric]}", yscale="log", title=experiment.title)
    axis.tick_params(axis="x", labelrotation=30)
    axis.grid(alpha=0.3)
    axis.legend(fontsize="x-small")
    return _save(plt, figure, folder / f"figure-{experiment.figure.replace(' ', '-')}.svg")


def _completion(plt: Any, results: Mapping[str, Results], path: Path) -> Path:
    """Distribution of applications' times, a panel for each kind."""
    kinds = sorted({kind for result in results.values() for kind in result.kinds})
    columns = max(1, len(kinds))
    figure, axes = plt.subplots(
        1, columns, squeeze=False, sharey=True, figsize=(2.4 + 4 * columns, 4)
    )
    for axis, kind in zip(axes[0], kinds, strict=False):
        for name, result in results.items():
            measures = result.kinds.get(kind)
            if measures is None or not measures.job_s.count:
                continue
            points = measures.job_s.cdf()
            axis.step([x for x, _ in points], [y for _, y in points], where="post", label=name)
        axis.set(title=kind, xlabel="completion time (s)", ylim=(0, 1))
        axis.grid(alpha=0.3)
    axes[0][0].set(ylabel="share of applications")
    axes[0][0].legend()
    return _save(plt, figure, path)


def _engines(plt: Any, name: str, result: Results, path: Path) -> Path:
    """Timeline of each engine: batch, KV in use, tokens filled per second."""
    timelines = dict(list(result.timelines.items())[:MAX_ENGINES])
    figure, axes = plt.subplots(
        len(timelines), 3, squeeze=False, sharex=True, figsize=(12, 1.2 + 1.4 * len(timelines))
    )
    for row, (engine_id, timeline) in zip(axes, timelines.items(), strict=True):
        times = [i * timeline.width_s for i in range(timeline.bins)]
        used = min(timeline.bins, int(result.duration_s / timeline.width_s) + 1)
        for axis, values in zip(row, (timeline.batch, timeline.kv, timeline.filled), strict=True):
            rates = [value / timeline.width_s for value in values[:used]]
            axis.fill_between(times[:used], rates, step="post", alpha=0.6)
            axis.set_ylim(bottom=0)
        row[0].set_ylabel(engine_id, rotation=0, ha="right")
    for axis, title in zip(
        axes[0], ("sequences", "KV tokens in use", "tokens filled per second"), strict=True
    ):
        axis.set_title(title)
    for axis in axes[-1]:
        axis.set_xlabel("virtual time (s)")
    left_out = len(result.timelines) - len(timelines)
    figure.suptitle(name + (f" (and {left_out} engines more)" if left_out else ""))
    return _save(plt, figure, path)


def _save(plt: Any, figure: Any, path: Path) -> Path:
    figure.tight_layout()
    metadata = {"Date": None} if path.suffix == ".svg" else {}
    figure.savefig(path, metadata=metadata)
    plt.close(figure)
    return path
