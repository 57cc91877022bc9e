"""`parrot-gateway bench scheduler`: what a call pays for its place, a table and JSON."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import Annotated

import typer

from parrot_bench.report import JsonFile, print_table, write_json


def scheduler_command(
    engines: Annotated[
        str, typer.Option(metavar="N,N,…", help="Numbers of engines.")
    ] = "4,64,1000",
    calls: Annotated[int, typer.Option(min=1, help="Calls of each row.")] = 3000,
    policy: Annotated[str, typer.Option(help="A preset: parrot, paper, lmetric, …")] = "parrot",
    explain: Annotated[
        bool, typer.Option(help="Compare with other engines, as `explain_calls` does.")
    ] = True,
    json_file: JsonFile = None,
) -> None:
    """Measure the scheduler's decisions: CPU time of each call, on engines with room."""
    from parrot_bench.policies import preset_of
    from parrot_bench.scheduler_decisions import REFERENCE_PAIRS_PER_S, measure

    try:
        counts = [int(count) for count in engines.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise typer.BadParameter("expected numbers like 4,64,1000", param_hint="--engines")
    try:
        config = replace(preset_of(policy), explain=explain)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--policy") from None
    rows = measure(time.process_time, engines=counts, calls=calls, config=config)
    head = (
        *("engines", "decision", "p99", "prompt computed", "end", "heap pairs/s"),
        *("reference: decision", "call"),
    )
    lines = [
        (
            f"{row.engines:,}",
            *(
                f"{value:.0f} us"
                for value in (row.decision_us, row.decision_p99_us, row.progress_us, row.end_us)
            ),
            f"{row.heap_pairs_per_s:,.0f}",
            f"{row.reference_decision_us:.0f} us",
            f"{row.reference_call_us:.0f} us",
        )
        for row in rows
    ]
    note = (
        "CPU time, medians. Heap pairs: push and pop of Python's heap, in between. Reference: "
        f"scaled to a core that does {REFERENCE_PAIRS_PER_S:,.0f} of them a second; a call is all "
        "three steps."
    )
    title = f"What a call pays for its place ({policy})"
    print_table(head, lines, texts=0, title=title, notes=[note])
    if json_file is not None:
        references = [
            {
                "reference_decision_us": row.reference_decision_us,
                "reference_call_us": row.reference_call_us,
            }
            for row in rows
        ]
        content = {
            "policy": policy,
            "explain": explain,
            "rows": [asdict(row) | scaled for row, scaled in zip(rows, references, strict=True)],
        }
        write_json(json_file, "scheduler", content)
