"""Comparisons as tables: of ways of calling, of policies, and of what linking gains."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from parrot_bench.apps.measure import AppOutcome
from parrot_bench.apps.recipes import BY_WAY as RECIPES
from parrot_bench.report import load_average, print_table

if TYPE_CHECKING:
    from rich.console import Console

    from parrot_bench.apps.gain import GainOutcome
    from parrot_bench.apps.measure import Comparison
    from parrot_bench.apps.policies import PoliciesOutcome, PolicyOutcome, Times


#: Below texts that differ.
_ROUNDING = (
    "Rounding may be why: sums of floats end in other digits with other sequences in a step, or "
    "other chunks of a prompt, which now and then decides a draw, and what is read from then on: "
    "in a few texts in 32 bits, in most long ones in 16. Many in 32 bits, or any from the first "
    "characters on, are a mistake."
)


def show_ways(outcomes: Sequence[AppOutcome]) -> None:
    from rich.console import Console

    console = Console()
    for outcome in outcomes:
        _show_table(
            console,
            outcome,
            ("network", "client"),
            ("p50", "p99", "semantic", "p99", "speed-up", "aim", "trips"),
            map(_way_cells, outcome.comparisons),
        )
        requests = ", ".join(f"{way} {number}" for way, number in outcome.requests.items())
        _show_sameness(console, outcome, f"of all ways: {{}}. Requests of a run: {requests}.")
        console.print()
    console.print(
        "p50 and p99 of the time from a job's start until its client has what it reads (of chats: "
        "per token). One by one: the client sends a call when it has the answer to the last; "
        "parallel: as soon as it has what the call reads; semantic: all at once. Speed-up: median "
        "over the rounds. Trips: round trips one after another, the client's and with semantic "
        "variables.",
        style="dim",
        highlight=False,
    )


def show_policies(outcomes: Sequence[PoliciesOutcome]) -> None:
    from rich.console import Console

    console = Console()
    for outcome in outcomes:
        seeds = ", ".join(map(str, dict.fromkeys(outcome.seeds)))
        console.print(
            f"[bold]{outcome.app}[/]: {outcome.count} {outcome.what}, {outcome.jobs} jobs, "
            f"{outcome.calls} calls, {outcome.tokens:,} tokens of output, lengths x "
            f"{outcome.scale:g}, arrivals x {outcome.load:g}; {outcome.engines} engines under each "
            f"policy; {len(outcome.seeds)} rounds, seeds {seeds}",
            highlight=False,
        )
        for kind in [times.kind for times in outcome.policies[0].times]:
            rows = [
                (policy, times)
                for policy in outcome.policies
                for times in policy.times
                if times.kind == kind
            ]
            _show_rows(
                (f"{kind}, {rows[0][1].unit}",),
                ("mean", "p50", "p99", "n", "faster", "of rounds", "filled"),
                (_policy_cells(outcome, policy, times) for policy, times in rows),
            )
        _show_sameness(console, outcome, "under all policies: {}.")
        console.print()
    _show_verdicts(outcomes)
    console.print(
        "Times from a job's start until its client has what it reads, of the n jobs of all rounds. "
        "Faster: so many times is the first policy than this one in the mean of all jobs, and in "
        "the means of the round where it was least so and where it was most. Filled: prompt tokens "
        "that engines computed in a round, the median. Best other: of each figure for itself, a "
        "mean where nothing else is said. Noise: the ratio differs between rounds by more than "
        "10 %, or 1 lies between them. "
        f"Load average of this machine: {load_average()}.",
        style="dim",
        highlight=False,
    )


def _show_verdicts(outcomes: Sequence[PoliciesOutcome]) -> None:
    """The first policy beside the best of the others, in all figures of all applications."""
    rows = []
    for outcome in outcomes:
        for each in outcome.verdicts:
            digits = 1 if each.unit == "ms/token" else 2
            what = each.figure if len(outcome.policies[0].times) == 1 else each.kind
            rows.append(
                (
                    f"{outcome.app} x{outcome.load:g}",
                    f"{what}, {each.unit.removesuffix('/token')}",
                    f"{each.ours:.{digits}f}",
                    f"{each.best:.{digits}f} {each.policy}",
                    f"{each.ratio:.2f}x",
                    f"{each.least:.2f}-{each.largest:.2f}",
                    "noise" if each.is_noise else "",
                )
            )
    if rows:
        ours = outcomes[0].policies[0].policy
        _show_rows(("arrivals", "figure"), (ours, "best other", "ratio", "of rounds", ""), rows)


def show_gain(outcomes: Sequence[GainOutcome]) -> None:
    from rich.console import Console

    console = Console()
    for outcome in outcomes:
        share = outcome.kv_tokens / outcome.distinct_tokens
        pauses = f" Tools take {outcome.pauses_s:.1f} s a job." if outcome.pauses_s else ""
        console.print(
            f"[bold]{outcome.app}[/]: {outcome.count} {outcome.what}, {outcome.jobs} jobs, "
            f"{outcome.calls} calls, {outcome.tokens:,} tokens of output, lengths x "
            f"{outcome.scale:g}, arrivals x {outcome.load:g}; {outcome.engines} engines, whose KV "
            f"holds {outcome.kv_tokens:,} tokens, {share:.0%} of the {outcome.distinct_tokens:,} "
            f"of a run; {outcome.rounds} rounds after one that is not timed.{pauses}",
            highlight=False,
        )
        _show_rows(
            ("", ""),
            ("mean", "p50", "p99", "faster", "of rounds"),
            (
                _time_cells(outcome, arm.policy, times)
                for times_of_kind in zip(*(arm.times for arm in outcome.arms), strict=True)
                for arm, times in zip(outcome.arms, times_of_kind, strict=True)
            ),
        )
        _show_rows(
            ("prompt tokens", ""),
            ("computed", "cached", "hits", "fewer", "of rounds", "busy"),
            (
                [
                    "",
                    each.arm,
                    f"{each.computed:,.0f}",
                    f"{each.cached:,.0f}",
                    f"{each.hit_rate:.1%}",
                    f"{each.ratio:.2f}x",
                    f"{each.least:.2f}-{each.largest:.2f}",
                    f"{each.busy:.0%}",
                ]
                for each in outcome.savings
            ),
        )
        _show_sameness(console, outcome, "in all arms: {}.")
        for arm, counted in outcome.linking.items():
            if counted["enabled"]:
                console.print(
                    f"{arm}: {counted['skipped']:,} of {counted['sent']:,} messages to the linking "
                    "process skipped.",
                    style="dim",
                    highlight=False,
                )
        console.print()
    console.print(
        "Times from a job's start until its client has what it reads, tools included, of the jobs "
        "of all rounds. Off: plain calls, no linking; linking: the same calls; declared: with "
        "semantic variables, or where tools run in between with a session for each agent; other "
        "names are one use of linking alone, or policies without linking. Faster, fewer: so many "
        "times less time in the mean, so many times fewer prompt tokens computed than off, the "
        "median of the rounds, and the smallest and the largest of a round; where 1 lies between "
        "them, it may be noise. Busy: "
        "share of the time that engines spent in steps. The first run of each arm, which is not "
        "timed, is what linking has seen of an application. "
        f"Load average of this machine: {load_average()}.",
        style="dim",
        highlight=False,
    )


def _time_cells(outcome: GainOutcome, arm: str, times: Times) -> list[str]:
    digits = 1 if times.unit == "ms/token" else 2
    ratio = ["", ""]
    for each in outcome.speed_ups:
        if (each.kind, each.against) == (times.kind, arm):
            ratio = [f"{each.mean:.2f}x", f"{each.least:.2f}-{each.largest:.2f}"]
    return [
        f"{times.kind} {times.unit}",
        arm,
        *(f"{value:.{digits}f}" for value in (times.mean, times.p50, times.p99)),
        *(ratio if arm != outcome.arms[0].policy else ["", ""]),
    ]


def _show_table(
    console: Console,
    outcome: AppOutcome,
    left: Sequence[str],
    right: Sequence[str],
    rows: Iterable[Sequence[str]],
) -> None:
    """The application and its size, then the rows under their headings."""
    console.print(
        f"[bold]{outcome.app}[/]: {outcome.count} {RECIPES[outcome.app].what}, "
        f"{outcome.calls} calls, {outcome.tokens:,} tokens of output, the paper's lengths x "
        f"{outcome.scale:g}",
        highlight=False,
    )
    _show_rows(left, right, rows)


def _show_rows(left: Sequence[str], right: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    from rich.table import Table

    table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    print_table(table)


def _show_sameness(
    console: Console, outcome: AppOutcome | PoliciesOutcome | GainOutcome, form: str
) -> None:
    """Whether final texts agree; otherwise which do not, and what that may be."""
    same, style = "the same", "dim"
    if not outcome.same_texts:
        same, style = "DIFFERENT", "red"
        if not isinstance(outcome, AppOutcome):
            same += f" in {outcome.different} of {outcome.texts}"
    console.print("Final texts " + form.format(same), style=style, highlight=False)
    for difference in outcome.differences:
        console.print(difference, style="red", highlight=False, markup=False)
    if not outcome.same_texts:
        console.print(_ROUNDING, style="dim", highlight=False)


def _way_cells(each: Comparison) -> list[str]:
    colour = {None: "", True: "[green]", False: "[red]"}[each.met]
    goal = "" if each.at_least is None else f"{colour}≥ {each.at_least:g}"
    unit, digits = (" ms", 1) if each.unit == "ms/token" else (" s", 2)
    times = (each.client_p50, each.client_p99, each.semantic_p50, each.semantic_p99)
    return [
        f"{each.delay_ms:g} ms",
        each.client if each.kind == each.app else each.kind,
        *(f"{time:.{digits}f}{unit}" for time in times),
        f"{each.speedup:.2f}x",
        goal,
        f"{each.client_round_trips}→{each.semantic_round_trips}",
    ]


def _policy_cells(outcome: PoliciesOutcome, policy: PolicyOutcome, times: Times) -> list[str]:
    digits = 1 if times.unit == "ms/token" else 2
    found = ["", ""]
    for each in outcome.speed_ups:
        if (each.kind, each.against) == (times.kind, policy.policy):
            found = [f"{each.of_all:.2f}x", f"{each.least:.2f}-{each.largest:.2f}"]
    return [
        policy.policy,
        *(f"{value:.{digits}f}" for value in (times.mean, times.p50, times.p99)),
        f"{times.jobs}",
        *found,
        f"{policy.prefilled():,.0f}",
    ]
