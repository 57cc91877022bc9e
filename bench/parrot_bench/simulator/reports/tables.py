"""Results as tables, plain or Markdown, and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from parrot_bench.simulator.experiments.definitions import Experiment
from parrot_bench.simulator.experiments.runner import ArmResult, Comparison
from parrot_bench.simulator.fitting import Fit
from parrot_bench.simulator.metrics import Measures, Results
from parrot_bench.tables import markdown, number, percent, text_table

#: Of the metrics of experiments.
UNITS = {"job_s": "s", "call_s": "s", "ms_per_token": "ms/token", "decode_ms_per_token": "ms/token"}

_HEAD = (
    "jobs", "failed", "job s", "p50", "p90", "p99", "ttft p50", "p99", "s/token", "wait p99",
    "filled", "hit",
)  # fmt: skip


def table(results: Mapping[str, Results]) -> str:
    """One row for each run and each kind of application, and a line on the engines of each run.

    Columns: applications that ended, and failed of them; seconds from arrival to end (mean, p50,
    p90, p99); seconds to a call's first token (p50, p99); mean of a call's latency per output
    token; seconds in queues (p99 of both together, at most); tokens filled; share of prompt tokens
    found in a cache.
    """
    rows: list[Sequence[str]] = [("policy", "kind", *_HEAD)]
    for name, result in results.items():
        kinds = sorted(result.kinds)
        if len(kinds) > 1:
            rows.extend((name, kind, *_cells(result.kinds[kind])) for kind in kinds)
        rows.append((name, "all" if len(kinds) != 1 else kinds[0], *_cells(result.total)))
    more: list[Sequence[str]] = [
        ("policy", "virtual s", "jobs/s", "good jobs/s", "good", "busy", "batch", "fairness",
         "preempted", "reloaded", "evicted"),
    ]  # fmt: skip
    for name, result in results.items():
        busy = sum(e.busy_s for e in result.engines) or 1.0
        done = result.total.applications - result.total.failed
        more.append(
            (
                name,
                number(result.duration_s),
                number(done / result.measured_s if result.measured_s else math.nan),
                number(result.goodput if result.total.with_goal else math.nan),
                percent(result.good_share),
                percent(result.utilisation),
                number(sum(e.mean_batch * e.busy_s for e in result.engines) / busy),
                number(result.fairness),
                str(sum(e.preemptions for e in result.engines)),
                _count(sum(e.reloaded_tokens for e in result.engines)),
                _count(sum(e.evicted_tokens for e in result.engines)),
            )
        )
    text = text_table(rows[0], rows[1:], texts=2) + "\n\n" + text_table(more[0], more[1:])
    failures = [
        f"{name}: {count} applications failed: {code}"
        for name, result in results.items()
        for code, count in sorted(result.failures.items())
    ]
    return "\n".join([text, *([""] if failures else []), *failures])


def experiment_table(
    experiment: Experiment, outcomes: Sequence[ArmResult], comparisons: Sequence[Comparison]
) -> str:
    """One experiment: every arm at every point, how many times its base is better, and what the
    paper printed and measured.
    """
    ratios = {(c.point, c.baseline): c for c in comparisons}
    unit = UNITS[experiment.metric]
    points = {point.label: point for point in experiment.points}
    rows = []
    for outcome in outcomes:
        found = ratios.get((outcome.point, outcome.arm))
        measured = points[outcome.point].measured.get(outcome.arm)
        rows.append(
            (
                outcome.point,
                outcome.arm + (f" ({outcome.failed} failed)" if outcome.failed else ""),
                number(outcome.mean),
                number(outcome.p50),
                number(outcome.p99),
                percent(outcome.good_share),
                percent(outcome.hit_rate),
                f"{found.ratio:.2f}x" if found else "",
                f"{found.printed:g}x" if found and found.printed else "",
                "" if measured is None else f"{measured:g}",
            )
        )
    lines = [
        f"Figure {experiment.figure}: {experiment.title} "
        f"({experiment.engines} x {experiment.profile}), {unit}\n",
        markdown(
            ("point", "arm", "mean", "p50", "p99", "in time", "hit", f"over {experiment.base}",
             "printed", "measured"),
            rows,
            texts=2,
        ),
    ]  # fmt: skip
    for comparison in comparisons:
        if comparison.point not in points:
            printed = f" (printed {comparison.printed:g}x)" if comparison.printed else ""
            lines.append(
                f"\n{comparison.point}: {comparison.baseline} {number(comparison.theirs)}, "
                f"{experiment.base} {number(comparison.ours)}: {number(comparison.ratio)}x{printed}"
            )
    for name in outcomes[0].besides if outcomes else ():
        parts = [f"{o.point}, {o.arm}: {number(o.besides[name])}" for o in outcomes]
        lines.append(f"\n{name}: " + "; ".join(parts))
    if experiment.note:
        lines.append("\n" + experiment.note)
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


def fit_table(fit: Fit) -> str:
    """What adds how much to a step, and steps as measured beside the fit."""
    step = fit.profile.step_model
    terms: list[Sequence[str]] = [
        ("adds to a step", "us"),
        ("every step", number(1e6 * (step.weights_s + step.overhead_s))),
        ("each sequence that decodes", number(1e6 * step.sequence_s)),
        ("each token of their contexts", number(1e6 * step.context_token_s)),
        ("each token of prompts filled", number(1e6 * step.prefill_token_s)),
    ]
    steps: list[Sequence[str]] = [("steps of", "observed", "measured, ms", "fitted, ms")]
    steps += [
        (each.what, f"{each.observations}", number(each.measured_ms), number(each.fitted_ms))
        for each in fit.residuals
    ]
    return f"{text_table(terms[0], terms[1:])}\n\n{text_table(steps[0], steps[1:])}"


def write_json(results: Mapping[str, Results], path: Path) -> None:
    """Everything, by the name of the run.

    Raises:
        OSError: the file cannot be written.
    """
    data = {name: result.to_dict() for name, result in results.items()}
    path.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _cells(measures: Measures) -> Sequence[str]:
    job, ttft = measures.job_s, measures.ttft_s
    return (
        str(measures.applications),
        str(measures.failed),
        number(job.mean),
        number(job.quantile(0.5)),
        number(job.quantile(0.9)),
        number(job.quantile(0.99)),
        number(ttft.quantile(0.5)),
        number(ttft.quantile(0.99)),
        number(measures.normalised_s.mean),
        number(measures.held_s.quantile(0.99) + measures.queued_s.quantile(0.99)),
        _count(measures.prefilled_tokens),
        percent(measures.hit_rate),
    )


def _count(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return str(int(value))
