"""Comparisons of arms as tables."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from parrot_bench.apps.comparison import ArmOutcome, Outcome, Ratio, Times
from parrot_bench.report import load_average, print_table
from parrot_bench.tables import percent

#: Below texts that differ.
_ROUNDING = (
    "Rounding may be why: sums of floats end in other digits with other sequences in a step, or "
    "other chunks of a prompt, which now and then decides a draw, and what is read from then on: "
    "in a few texts in 32 bits, in most long ones in 16. Many in 32 bits, or any from the first "
    "characters on, are a mistake."
)
_ARMS = (
    "Times from an application's start until its client has what it reads, tools included, of the "
    "n of all rounds. Ratio: the first arm's mean over this one's, of all rounds, and the smallest "
    "and the largest of a round; above 1 this arm is faster, or computes fewer prompt tokens. "
    "Noise: the rounds differ by more than 10 %, or 1 lies between them. Busy: the share of the "
    "time that engines spent in steps. One by one: the client sends a call when it has the answer "
    "to the last; parallel: as soon as it has what the call reads; semantic variables: all at once."
)


def show_arms(outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        seeds = ", ".join(map(str, dict.fromkeys(outcome.seeds)))
        share = percent(outcome.kv_tokens / outcome.distinct_tokens)
        memory = f" (KV holds {share} of a run)" if outcome.kv_tokens else ""
        pauses = f"; tools take {outcome.pauses_s:.1f} s each" if outcome.pauses_s else ""
        title = (
            f"{outcome.app}: {outcome.count} {outcome.what}, {outcome.calls} calls, "
            f"{outcome.tokens:,} tokens of output, lengths x {outcome.scale:g}, arrivals x "
            f"{outcome.load:g}; network {outcome.delay_ms:g} ms; {outcome.engines} engines an arm"
            f"{memory}{pauses}; "
            f"{len(outcome.seeds)} rounds, seeds {seeds}"
        )
        ratios = {(each.arm, each.figure): each for each in outcome.ratios}
        rows = [
            _time_cells(arm, times, ratios.get((arm.arm, times.kind)))
            for number, first in enumerate(outcome.arms[0].times)
            for arm in outcome.arms
            for times in [arm.times[number]]
            if times.kind == first.kind
        ]
        print_table(
            ("figure", "arm", "mean", "p50", "p99", "n", "ratio", "of rounds", ""),
            rows,
            texts=2,
            title=title,
        )
        print_table(
            ("prompt tokens", "computed", "hits", "ratio", "of rounds", "", "busy"),
            [_work_cells(arm, ratios.get((arm.arm, "computed"))) for arm in outcome.arms],
        )
        skipped = [
            f"{arm}: {counted['skipped']:,} of {counted['sent']:,} messages to the linking process "
            "skipped."
            for arm, counted in outcome.linking.items()
            if counted["enabled"] and counted["skipped"]
        ]
        same = ["Final texts: the same in all arms."]
        if not outcome.same_texts:
            count = f"{outcome.different} of {outcome.texts}"
            same = [f"Final texts: DIFFERENT in {count}.", *outcome.differences, _ROUNDING]
        for line in (*same, *skipped, ""):
            typer.echo(line)
    typer.echo(f"{_ARMS} Load average of this machine: {load_average()}.")


def _time_cells(arm: ArmOutcome, times: Times, ratio: Ratio | None) -> list[str]:
    digits = 1 if times.unit == "ms/token" else 2
    return [
        f"{times.kind} {times.unit}",
        arm.arm,
        *(f"{value:.{digits}f}" for value in (times.mean, times.p50, times.p99)),
        f"{times.jobs}",
        *_ratio_cells(ratio),
    ]


def _work_cells(arm: ArmOutcome, ratio: Ratio | None) -> list[str]:
    cells = [arm.arm, f"{arm.computed:,.0f}", percent(arm.hit_rate)]
    return [*cells, *_ratio_cells(ratio), percent(arm.busy)]


def _ratio_cells(ratio: Ratio | None) -> list[str]:
    if ratio is None:
        return ["", "", ""]
    rounds = f"{ratio.least:.2f}-{ratio.largest:.2f}"
    return [f"{ratio.of_all:.2f}x", rounds, "noise" if ratio.is_noise else ""]
