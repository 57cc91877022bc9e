"""`parrot-gateway bench scheduler`: how fast the scheduler decides, a table and JSON."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import Annotated

import typer

from parrot_bench.report import JsonFile, print_table, write_json


def scheduler_command(
    engines: Annotated[
        str, typer.Option(metavar="N,N,…", help="Numbers of engines.")
    ] = "10,100,1000",
    queued: Annotated[int, typer.Option(min=1, help="Tasks that wait.")] = 10_000,
    decisions: Annotated[int, typer.Option(min=1, help="Placements of each row.")] = 20_000,
    policy: Annotated[str, typer.Option(help="A preset: parrot, paper, lmetric, …")] = "parrot",
    cpu_time: Annotated[
        bool, typer.Option("--cpu-time", help="Count CPU time: for machines with other work.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Measure the scheduler's decisions: one core, full engines, a long queue."""
    from parrot_scheduler.config import PRESETS

    from parrot_bench.scheduler_decisions import REFERENCE_ROUNDS_PER_S, measure

    try:
        counts = [int(count) for count in engines.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise typer.BadParameter("expected numbers like 10,100,1000", param_hint="--engines")
    if policy not in PRESETS:
        known = ", ".join(sorted(PRESETS))
        raise typer.BadParameter(f"there are {known}", param_hint="--policy")
    config = replace(
        PRESETS[policy], max_wait_s=1e9, max_hold_s=1e9, starvation_s=1e8, max_queued=2 * queued
    )
    clock = time.process_time if cpu_time else time.perf_counter
    rows = measure(clock, engines=counts, queued=queued, decisions=decisions, config=config)
    waiting = f"{queued:,} tasks waiting" if rows[0].queued else "each task placed at once"
    head = (
        *("engines", "decisions/s", "p50", "p99", "longest step", "memory", "heap rounds/s"),
        *("reference: decisions/s", "p99"),
    )
    lines = [
        (
            f"{row.engines:,}",
            f"{row.decisions_per_s:,.0f}",
            *(f"{value:.3f} ms" for value in (row.p50_ms, row.p99_ms, row.longest_step_ms)),
            f"{row.memory_mb:,.0f} MB",
            f"{row.heap_rounds_per_s:,.0f}",
            f"{row.reference_decisions_per_s:,.0f}",
            f"{row.reference_p99_ms:.3f} ms",
        )
        for row in rows
    ]
    note = (
        "Heap rounds: pushpop, push and pop of Python's heap. Reference: scaled to a core that "
        f"does {REFERENCE_ROUNDS_PER_S:,.0f} of them a second."
    )
    title = f"Decisions of the scheduler ({policy}), {waiting}"
    print_table(head, lines, texts=0, title=title, notes=[note])
    if json_file is not None:
        content = {
            "policy": policy,
            "clock": "cpu" if cpu_time else "wall",
            "rows": [
                {
                    **asdict(row),
                    "reference_decisions_per_s": row.reference_decisions_per_s,
                    "reference_p99_ms": row.reference_p99_ms,
                }
                for row in rows
            ],
        }
        write_json(json_file, "scheduler", content)
