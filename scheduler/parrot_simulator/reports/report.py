"""Results as a table of plain text, and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from parrot_simulator.metrics import Measures, Results

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
                _number(result.duration_s),
                _number(done / result.measured_s if result.measured_s else math.nan),
                _number(result.goodput if result.total.with_goal else math.nan),
                _share(result.good_share),
                _share(result.utilisation),
                _number(sum(e.mean_batch * e.busy_s for e in result.engines) / busy),
                _number(result.fairness),
                str(sum(e.preemptions for e in result.engines)),
                _count(sum(e.reloaded_tokens for e in result.engines)),
                _count(sum(e.evicted_tokens for e in result.engines)),
            )
        )
    text = _aligned(rows, 2) + "\n\n" + _aligned(more, 1)
    failures = [
        f"{name}: {count} applications failed: {code}"
        for name, result in results.items()
        for code, count in sorted(result.failures.items())
    ]
    return "\n".join([text, *([""] if failures else []), *failures])


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
        _number(job.mean),
        _number(job.quantile(0.5)),
        _number(job.quantile(0.9)),
        _number(job.quantile(0.99)),
        _number(ttft.quantile(0.5)),
        _number(ttft.quantile(0.99)),
        _number(measures.normalised_s.mean),
        _number(measures.held_s.quantile(0.99) + measures.queued_s.quantile(0.99)),
        _count(measures.prefilled_tokens),
        _share(measures.hit_rate),
    )


def _number(value: float) -> str:
    """Three digits that matter."""
    if math.isnan(value):
        return "-"
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(digits, 4)}f}"


def _share(value: float) -> str:
    return "-" if math.isnan(value) else f"{100 * value:.1f} %"


def _count(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return str(int(value))


def _aligned(rows: Sequence[Sequence[str]], left: int) -> str:
    """Columns of equal width: the first `left` to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)
