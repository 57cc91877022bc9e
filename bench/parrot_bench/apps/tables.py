"""Comparisons as tables: of ways of calling, and of arms."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from parrot_bench.apps.comparison import ArmOutcome, Outcome, Ratio, Times
from parrot_bench.apps.measure import AppOutcome, Comparison
from parrot_bench.apps.recipes import BY_WAY
from parrot_bench.report import load_average, print_table
from parrot_bench.tables import percent, yes_or_no

#: Below texts that differ.
_ROUNDING = (
    "Rounding may be why: sums of floats end in other digits with other sequences in a step, or "
    "other chunks of a prompt, which now and then decides a draw, and what is read from then on: "
    "in a few texts in 32 bits, in most long ones in 16. Many in 32 bits, or any from the first "
    "characters on, are a mistake."
)
_WAYS = (
    "p50 and p99 of the time from an application's start until its client has what it reads (of "
    "chats: per token). One by one: the client sends a call when it has the answer to the last; "
    "parallel: as soon as it has what the call reads; semantic: all at once. Speed-up: median over "
    "the rounds. Trips: round trips one after another, the client's and with semantic variables."
)
_ARMS = (
    "Times from an application's start until its client has what it reads, tools included, of the "
    "n of all rounds. Ratio: the first arm's mean over this one's, of all rounds, and the smallest "
    "and the largest of a round; above 1 this arm is faster, or computes fewer prompt tokens. "
    "Noise: the rounds differ by more than 10 %, or 1 lies between them. Busy: the share of the "
    "time that engines spent in steps."
)


def show_ways(outcomes: Sequence[AppOutcome]) -> None:
    for outcome in outcomes:
        title = (
            f"{outcome.app}: {outcome.count} {BY_WAY[outcome.app].what}, {outcome.calls} calls, "
            f"{outcome.tokens:,} tokens of output, the paper's lengths x {outcome.scale:g}"
        )
        requests = ", ".join(f"{way} {number}" for way, number in outcome.requests.items())
        print_table(
            (
                "network",
                "client",
                "p50",
                "p99",
                "semantic",
                "p99",
                "speed-up",
                "aim",
                "met",
                "trips",
            ),
            [_way_cells(each) for each in outcome.comparisons],
            texts=2,
            title=title,
            notes=[
                *_sameness(outcome.same_texts, "", outcome.differences),
                f"Requests of a run: {requests}.\n",
            ],
        )
    typer.echo(_WAYS)


def _way_cells(each: Comparison) -> list[str]:
    unit, digits = (" ms", 1) if each.unit == "ms/token" else (" s", 2)
    times = (each.client_p50, each.client_p99, each.semantic_p50, each.semantic_p99)
    return [
        f"{each.delay_ms:g} ms",
        each.client if each.kind == each.app else each.kind,
        *(f"{time:.{digits}f}{unit}" for time in times),
        f"{each.speedup:.2f}x",
        "" if each.at_least is None else f"≥ {each.at_least:g}",
        yes_or_no(each.met),
        f"{each.client_round_trips}→{each.semantic_round_trips}",
    ]


def show_arms(outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        seeds = ", ".join(map(str, dict.fromkeys(outcome.seeds)))
        share = percent(outcome.kv_tokens / outcome.distinct_tokens)
        memory = f" (KV holds {share} of a run)" if outcome.kv_tokens else ""
        pauses = f"; tools take {outcome.pauses_s:.1f} s each" if outcome.pauses_s else ""
        title = (
            f"{outcome.app}: {outcome.count} {outcome.what}, {outcome.calls} calls, "
            f"{outcome.tokens:,} tokens of output, lengths x {outcome.scale:g}, arrivals x "
            f"{outcome.load:g}; {outcome.engines} engines an arm{memory}{pauses}; "
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
        number = f" in {outcome.different} of {outcome.texts}"
        for line in (*_sameness(outcome.same_texts, number, outcome.differences), *skipped, ""):
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


def _sameness(same: bool, number: str, differences: Sequence[str]) -> list[str]:
    """Whether final texts agree; otherwise which do not, and what that may be."""
    if same:
        return ["Final texts: the same in all arms."]
    return [f"Final texts: DIFFERENT{number}.", *differences, _ROUNDING]
