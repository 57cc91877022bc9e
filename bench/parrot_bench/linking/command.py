"""`parrot-gateway bench linking`: options, tables and aims."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from parrot_bench.linking.adversarial import ADVERSARIAL, TOGETHER, UNDECIDABLE, adversarial
from parrot_bench.linking.applications import RECIPES, applications
from parrot_bench.linking.schedule import Start, schedule
from parrot_bench.linking.score import GatewayLinker, Score, run
from parrot_bench.linking.script import KINDS, Script
from parrot_bench.report import JsonFile, print_table, run_with_progress, write_json
from parrot_bench.tables import yes_or_no

if TYPE_CHECKING:
    from parrot_bench.linking.calibration import RoleCalibration
    from parrot_bench.linking.cost import Cost

#: Sets of workloads by the names of the command line.
SETS = ("applications", "adversarial")
COLUMNS = ("sessions", "calls", "edges", "precision", "or equal", "or ancestor", "recall",
           "session F1", "across tenants", "short", "CPU µs p50", "p99", "met")  # fmt: skip
#: Aims: at least; sessions' with 200 live, and where equal ones start in one moment.
PRECISION, RECALL, F1, F1_TOGETHER = 0.99, 0.97, 0.98, 0.95
#: At most: microseconds of a prompt of 4 kB, per further kB, megabytes.
FOUR_KB_US, SLOPE_US, MEGABYTES = 300.0, 20.0, 64.0


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    scripts: list[Script]
    start: Start


def linking_command(
    workload: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=f"{', '.join(SETS)}, or one: {', '.join([*RECIPES, *ADVERSARIAL])}; repeatable.",
            show_default="all",
        ),
    ] = None,
    instances: Annotated[int, typer.Option(min=1, help="Sessions of each workload.")] = 200,
    live: Annotated[int, typer.Option(min=1, help="Sessions live at once.")] = 200,
    show: Annotated[int, typer.Option(min=0, help="Show so many wrong and missed edges.")] = 0,
    seed: Annotated[int, typer.Option(help="Of texts and times.")] = 0,
    cost: Annotated[bool, typer.Option(help="Measure time and memory by size.")] = True,
    forecasts: Annotated[
        bool, typer.Option(help="Compare forecasts with what happens, of applications.")
    ] = True,
    json_file: JsonFile = None,
) -> None:
    """Rebuild the graphs of applications from calls without headers, and compare with the truth."""
    known = [*SETS, *RECIPES, *ADVERSARIAL]
    for name in workload or ():
        if name not in known:
            message = f"'{name}' is none of {', '.join(known)}"
            raise typer.BadParameter(message, param_hint="--workload")

    def measure_all(
        progress: Callable[[str], None],
    ) -> tuple[list[tuple[Workload, Score]], dict[str, list[RoleCalibration]], Cost | None]:
        scores = []
        calibrations = {}
        for item in _workloads(workload or SETS, instances, seed):
            progress(item.name)
            events = list(schedule(item.scripts, live=live, start=item.start, seed=seed))
            scores.append((item, run(events, item.scripts, GatewayLinker())))
            if forecasts and item.name in (*SETS, *RECIPES):
                from parrot_bench.linking.calibration import calibrate

                progress(f"{item.name}, forecasts")
                calibrations[item.name] = calibrate(events, item.scripts)
        if not cost:
            return scores, calibrations, None
        from parrot_bench.linking.cost import measure

        progress("time and memory")
        return scores, calibrations, measure(GatewayLinker)

    scores, calibrations, found = run_with_progress(measure_all)
    _show_scores(scores)
    for name, roles in calibrations.items():
        _show_calibration(name, roles)
    if found is not None:
        _show_cost(found)
    for item, score in scores if show else ():
        _show_faults(item.name, score, show)
    if json_file is not None:
        content = {
            "seed": seed,
            "instances": instances,
            "live": live,
            "rows": [
                {"workload": item.name, "start": item.start, **score.to_dict()}
                for item, score in scores
            ],
            "cost": None if found is None else found.to_dict(),
            "forecasts": {
                name: [each.to_dict() for each in roles] for name, roles in calibrations.items()
            },
        }
        write_json(json_file, "linking", content)


def _workloads(names: Sequence[str], instances: int, seed: int) -> Iterator[Workload]:
    for name in names:
        if name == "applications":
            yield Workload(name, applications(instances, seed), "spread")
        elif name in RECIPES:
            yield Workload(name, applications(instances, seed, name), "spread")
        else:
            for one in ADVERSARIAL if name == "adversarial" else [name]:
                start: Start = "tasks" if one in TOGETHER else "spread"
                yield Workload(one, adversarial(one, range(instances)), start)
        if name == "adversarial":
            share = range(-(-instances // len(ADVERSARIAL)))
            scripts = [script for number in share for one in ADVERSARIAL
                       for script in adversarial(one, [number])]  # fmt: skip
            yield Workload("all of these, interleaved", scripts, "spread")


def _show_scores(scores: Sequence[tuple[Workload, Score]]) -> None:
    rows = [
        (
            item.name,
            f"{len(item.scripts):,}",
            f"{score.calls:,}",
            f"{score.right + score.missed:,}",
            f"{score.precision:.4f}",
            f"{score.equal_precision:.4f}",
            f"{score.ancestor_precision:.4f}",
            f"{score.recall:.4f}",
            f"{score.f1:.4f}",
            str(score.across),
            f"{score.short_found}/{score.short}" if score.short else "",
            f"{score.microseconds(50):,.0f}",
            f"{score.microseconds(99):,.0f}",
            "" if item.name in UNDECIDABLE else yes_or_no(is_met(score, item.start)),
        )
        for item, score in scores
    ]
    notes = [
        f"Met: precision ≥ {PRECISION}, recall ≥ {RECALL}, session F1 ≥ {F1} (≥ {F1_TOGETHER} "
        "where equal sessions start in one moment), nothing across tenants.",
        "Or equal: edges from calls that were asked and have answered the very same count too; "
        "or ancestor: those from an ancestor of the call. Short: edges from answers of less "
        "than 20 characters that were found, of all; neither asked for nor wrong.",
    ]
    print_table(("workload", *COLUMNS), rows, title="Edges and sessions", notes=notes)
    by_kind = [
        (
            item.name,
            *(
                f"{kind['precision']:.3f} {kind['recall']:.3f}" if kind["asked"] else ""
                for kind in score.to_dict()["kinds"].values()
            ),
        )
        for item, score in scores
    ]
    print_table(("workload", *KINDS), by_kind, title="Precision and recall by kind")


def _show_calibration(name: str, roles: Sequence[RoleCalibration]) -> None:
    headings = ("role", "calls", "foretold", "template", "length p50", "p90", "successor", "fan-in",
                "± answers", "returns", "gap p50", "p90")  # fmt: skip
    rows = [
        (
            each.role,
            f"{each.calls:,}",
            f"{each.foretold:.2f}",
            _share(each.exact),
            _share(each.length_p50),
            _share(each.length_p90),
            _share(each.successor),
            f"{_share(each.fan_in)} {_share(each.fan_in_true)}",
            "" if each.size_error is None else f"{each.size_error:.1f}",
            f"{_share(each.returns)} {_share(each.returns_true)}",
            _share(each.gap_p50),
            _share(each.gap_p90),
        )
        for each in roles
    ]
    notes = [
        "Foretold: share of calls with a forecast when they arrive; all else is of these. "
        "Template: exactly its role's. Length, gap: share within what was foretold, at best 0.50 "
        "and 0.90. Successor: the likeliest one is one, or rightly none. Fan-in, returns: mean "
        "foretold share and the true one; ± answers: mean error of how many are read together."
    ]
    print_table(headings, rows, title=f"Forecasts of {name}", notes=notes)


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _show_cost(found: Cost) -> None:
    met = (
        found.microseconds[4] <= FOUR_KB_US
        and found.slope <= SLOPE_US
        and found.megabytes <= MEGABYTES
    )
    times = (f"{value:,.0f}" for value in found.microseconds.values())
    row = (*times, f"{found.slope:.1f}", f"{found.megabytes:.1f}", yes_or_no(met))
    head = (*(f"{size} kB" for size in found.microseconds), "per further kB", "MB", "met")
    title = f"CPU time of a request, {found.indexed:,} outputs indexed, µs (median)"
    aims = f"4 kB ≤ {FOUR_KB_US:.0f} µs, per further kB ≤ {SLOPE_US:.0f} µs, ≤ {MEGABYTES:.0f} MB"
    print_table(head, [row], texts=0, title=title, notes=[f"Met: {aims}."])


def is_met(score: Score, start: Start) -> bool:
    least = F1 if start == "spread" else F1_TOGETHER
    return (
        score.precision >= PRECISION
        and score.recall >= RECALL
        and score.f1 >= least
        and not score.across
    )


def _show_faults(title: str, score: Score, most: int) -> None:
    for what in ("wrong", "missed"):
        found = [fault for fault in score.faults if fault[0] == what]
        for _, call, source, kinds in found[:most]:
            answer = str(source.answer)[:160]
            typer.echo(f"{title}: {what} {source.id} -> {call.id} ({kinds}); answer: {answer}")
