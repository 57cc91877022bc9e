"""What a comparison of policies tells: a table for people, JSON for machines."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from parrot_gateway.bench.apps.applications import RECIPES
from parrot_gateway.bench.apps.policies import PoliciesOutcome, PolicyOutcome, Times
from parrot_gateway.bench.report import machine, print_table


def show(outcomes: Sequence[PoliciesOutcome]) -> None:
    """Print a table for each application."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for outcome in outcomes:
        console.print(
            f"[bold]{outcome.app}[/]: {outcome.count} {RECIPES[outcome.app].what}, "
            f"{outcome.calls} calls, {outcome.tokens:,} tokens of output, the paper's lengths x "
            f"{outcome.scale:g}, {outcome.engines} engines under each policy",
            highlight=False,
        )
        table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 1, 0, 0))
        for name in ("", "policy"):
            table.add_column(name, no_wrap=True)
        for name in ("mean", "of rounds", "p50", "n", "faster", "of rounds", "filled"):
            table.add_column(name, justify="right", no_wrap=True)
        for policy in outcome.policies:
            for index, times in enumerate(policy.times):
                table.add_row(*_cells(outcome, policy, times, first=index == 0))
        print_table(table)
        same = "the same" if outcome.same_texts else "DIFFERENT"
        console.print(
            f"Final texts under all policies: {same}.",
            style="dim" if outcome.same_texts else "red",
            highlight=False,
        )
        console.print()
    console.print(
        "Times from a job's start until its client has what it reads, of the n jobs of all rounds; "
        "of rounds: the smallest and the largest mean of a round. Faster: so many times is the "
        "first policy than this one in the mean of all jobs, and in the means of the round where "
        "it was least so and where it was most; where 1 lies between them, take more rounds. "
        "Filled: prompt tokens that engines computed in a round, the median. "
        f"Load average of this machine: {_load()}.",
        style="dim",
        highlight=False,
    )


def _cells(
    outcome: PoliciesOutcome, policy: PolicyOutcome, times: Times, *, first: bool
) -> list[str]:
    digits = 1 if times.unit == "ms/token" else 2
    found = ["", ""]
    for each in outcome.speed_ups:
        if (each.kind, each.against) == (times.kind, policy.policy):
            found = [f"{each.of_all:.2f}", f"{each.least:.2f}-{each.largest:.2f}"]
    return [
        f"{times.kind} {times.unit}",
        policy.policy,
        f"{times.mean:.{digits}f}",
        f"{times.least_mean:.{digits}f}-{times.largest_mean:.{digits}f}",
        f"{times.p50:.{digits}f}",
        f"{times.jobs}",
        *found,
        f"{policy.prefilled():,.0f}" if first else "",
    ]


def _load() -> str:
    try:
        return ", ".join(f"{value:.1f}" for value in os.getloadavg())
    except OSError:
        return "unknown"


def write_json(path: Path, outcomes: Sequence[PoliciesOutcome], *, model: str, rounds: int) -> None:
    """Write everything that was measured, and where."""
    content: dict[str, Any] = {
        "benchmark": "apps, by policy",
        "machine": machine(),
        "load_average": _load(),
        "model": model,
        "rounds": rounds,
        "apps": [to_dict(outcome) for outcome in outcomes],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")


def to_dict(outcome: PoliciesOutcome) -> dict[str, Any]:
    """All of it as plain types."""
    content: dict[str, Any] = msgspec.to_builtins(outcome)
    for plain, policy in zip(content["policies"], outcome.policies, strict=True):
        plain["prefilled_tokens"] = policy.prefilled()
    return content
