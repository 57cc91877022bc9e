"""`parrot-gateway bench linking`: options, tables and aims."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from parrot_bench.linking.adversarial import ADVERSARIAL, TOGETHER, UNDECIDABLE, adversarial
from parrot_bench.linking.applications import RECIPES, applications
from parrot_bench.linking.linkers import LINKERS
from parrot_bench.linking.recordings import Changes, Ids, read, sessions
from parrot_bench.linking.schedule import STARTS, Start, schedule
from parrot_bench.linking.score import CONNECTIONS, Connections, Score, run
from parrot_bench.linking.script import KINDS, Script
from parrot_bench.report import JsonFile, print_table, run_with_progress, write_json
from parrot_bench.tables import yes_or_no

if TYPE_CHECKING:
    from parrot_bench.linking.calibration import RoleCalibration

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
            show_default="all, or none with --recordings",
        ),
    ] = None,
    recordings: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            help="A file or folder of recorded agents (JSON, JSON lines, .traj); repeatable.",
        ),
    ] = None,
    linker: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=f"What is judged: {', '.join(LINKERS)}; repeatable.",
            show_default="all",
        ),
    ] = None,
    instances: Annotated[int, typer.Option(min=1, help="Sessions of each workload.")] = 200,
    live: Annotated[int, typer.Option(min=1, help="Sessions live at once.")] = 200,
    start: Annotated[
        str | None,
        typer.Option(
            metavar="WHEN",
            help="When sessions begin: 'spread' over time, those of equal 'tasks' in the same "
            "moment, or all 'together'.",
            show_default="spread, but tasks where a workload is about equal ones",
        ),
    ] = None,
    window: Annotated[
        int | None, typer.Option(min=1, help="Recordings: send only so many last messages.")
    ] = None,
    elide: Annotated[
        int | None,
        typer.Option(min=0, help="Recordings: replace all but so many outputs of tools by a line."),
    ] = None,
    simulated_users: Annotated[
        bool, typer.Option("--simulated-users", help="Recordings: the user is a model too.")
    ] = False,
    ids: Annotated[
        str,
        typer.Option(
            metavar="WHICH",
            help="Recordings: tool-call ids as 'recorded', 'counted' in each session, or 'none'.",
        ),
    ] = "recorded",
    as_text: Annotated[
        bool, typer.Option("--as-text", help="Recordings: the history as one user's message.")
    ] = False,
    connections: Annotated[
        str,
        typer.Option(
            metavar="WHICH",
            help="What linkers are told of connections: 'none', each session its 'own', or a "
            "'pool' that all share.",
        ),
    ] = "none",
    confidence: Annotated[
        float, typer.Option(min=0, max=1, help="Count edges of at least so much.")
    ] = 0.0,
    show: Annotated[int, typer.Option(min=0, help="Show so many wrong and missed edges.")] = 0,
    seed: Annotated[int, typer.Option(help="Of texts and times.")] = 0,
    cost: Annotated[bool, typer.Option(help="Measure time and memory by size.")] = True,
    forecasts: Annotated[
        bool,
        typer.Option(help="Compare forecasts with what happens, of applications and recordings."),
    ] = True,
    json_file: JsonFile = None,
) -> None:
    """Rebuild the graphs of applications from calls without headers, and compare with the truth."""
    _check("--start", start, STARTS)
    _check("--connections", connections, CONNECTIONS)
    _check("--ids", ids, ("recorded", "counted", "none"))
    for name in linker or ():
        _check("--linker", name, LINKERS)
    for name in workload or ():
        _check("--workload", name, [*SETS, *RECIPES, *ADVERSARIAL])
    named = workload or ([] if recordings else list(SETS))
    changes = Changes(window, elide, simulated_users, _ids(ids), as_text)

    def measure_all(
        progress: Callable[[str], None],
    ) -> tuple[list[Any], list[tuple[Workload, list[RoleCalibration]]], dict[str, Any]]:
        scores = []
        calibrations = []
        for item in _workloads(named, recordings or [], changes, instances, seed, start):
            for name in linker or LINKERS:
                progress(f"{item.name}, {name}")
                events = schedule(item.scripts, live=live, start=item.start, seed=seed)
                peers = _connections(connections)
                score = run(events, item.scripts, LINKERS[name](), confidence, peers)
                scores.append((item, name, score))
            if forecasts and item.name not in ADVERSARIAL and "gateway" in (linker or LINKERS):
                from parrot_bench.linking.calibration import calibrate

                progress(f"{item.name}, forecasts")
                events = schedule(item.scripts, live=live, start=item.start, seed=seed)
                calibrations.append((item, calibrate(events, item.scripts)))
        costs = {}
        for name in (linker or LINKERS) if cost else ():
            from parrot_bench.linking.cost import measure

            progress(f"time and memory, {name}")
            costs[name] = measure(LINKERS[name])
        return scores, calibrations, costs

    scores, calibrations, costs = run_with_progress(measure_all)
    _show_scores(scores, connections)
    for item, roles in calibrations:
        _show_calibration(item.name, roles)
    if costs:
        _show_costs(costs)
    for item, name, score in scores if show else ():
        _show_faults(f"{item.name}, {name}", score, show)
    if json_file is not None:
        rows = [
            {"workload": item.name, "start": item.start, "linker": name, **score.to_dict()}
            for item, name, score in scores
        ]
        plain = {name: value.to_dict() for name, value in costs.items()}
        content = {
            "seed": seed,
            "instances": instances,
            "live": live,
            "connections": connections,
            "rows": rows,
            "cost": plain,
            "forecasts": {
                item.name: [each.to_dict() for each in roles] for item, roles in calibrations
            },
        }
        write_json(json_file, "linking", content)


def _workloads(
    names: Sequence[str],
    paths: Sequence[Path],
    changes: Changes,
    instances: int,
    seed: int,
    start: str | None,
) -> Iterator[Workload]:
    def begins(name: str) -> Start:
        usual: Start = "tasks" if name in TOGETHER else "spread"
        return next((known for known in STARTS if known == start), usual)

    for name in names:
        if name == "applications":
            yield Workload(name, applications(instances, seed), begins(name))
        elif name in RECIPES:
            yield Workload(name, applications(instances, seed, name), begins(name))
        else:
            for one in ADVERSARIAL if name == "adversarial" else [name]:
                yield Workload(one, adversarial(one, range(instances)), begins(one))
        if name == "adversarial":
            share = range(-(-instances // len(ADVERSARIAL)))
            scripts = [script for number in share for one in ADVERSARIAL
                       for script in adversarial(one, [number])]  # fmt: skip
            yield Workload("all of these, interleaved", scripts, begins(name))
    for path in paths:
        scripts = sessions(read([path]), changes)
        yield Workload(path.name, scripts, begins(path.name))


def _show_scores(scores: Sequence[tuple[Workload, str, Score]], connections: str) -> None:
    rows = [
        (
            item.name,
            name,
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
        for item, name, score in scores
    ]
    notes = [
        f"Met: precision ≥ {PRECISION}, recall ≥ {RECALL}, session F1 ≥ {F1} (≥ {F1_TOGETHER} "
        "where equal sessions start in one moment), nothing across tenants.",
        "Or equal: edges from calls that were asked and have answered the very same count too; "
        "or ancestor: those from an ancestor of the call. Short: edges from answers of less "
        "than 20 characters that were found, of all; neither asked for nor wrong.",
        f"Connections that linkers are told of: {connections}.",
    ]
    head = ("workload", "linker", *COLUMNS)
    print_table(head, rows, texts=2, title="Edges and sessions", notes=notes)
    by_kind = [
        [
            f"{kind['precision']:.3f} {kind['recall']:.3f}" if kind["asked"] else ""
            for kind in score.to_dict()["kinds"].values()
        ]
        for _, _, score in scores
    ]
    lines = [
        (item.name, name, *cells) for (item, name, _), cells in zip(scores, by_kind, strict=True)
    ]
    print_table(
        ("workload", "linker", *KINDS), lines, texts=2, title="Precision and recall by kind"
    )


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


def _show_costs(costs: dict[str, Any]) -> None:
    first = next(iter(costs.values()))
    sizes = [f"{size} kB" for size in first.microseconds]
    title = f"CPU time of a request, {first.indexed:,} outputs indexed, µs (median)"
    rows = []
    for name, found in costs.items():
        met = (
            found.microseconds[4] <= FOUR_KB_US
            and found.slope <= SLOPE_US
            and found.megabytes <= MEGABYTES
        )
        times = (f"{value:,.0f}" for value in found.microseconds.values())
        slope, memory = f"{found.slope:.1f}", f"{found.megabytes:.1f}"
        rows.append((name, *times, slope, memory, yes_or_no(met)))
    aims = f"4 kB ≤ {FOUR_KB_US:.0f} µs, per further kB ≤ {SLOPE_US:.0f} µs, ≤ {MEGABYTES:.0f} MB"
    head = ("linker", *sizes, "per further kB", "MB", "met")
    print_table(head, rows, title=title, notes=[f"Met: {aims}."])


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


def _check(option: str, value: str | None, known: Sequence[str] | dict[str, Any]) -> None:
    if value is not None and value not in known:
        raise typer.BadParameter(f"'{value}' is none of {', '.join(known)}", param_hint=option)


def _connections(name: str) -> Connections:
    return next((known for known in CONNECTIONS if known == name), "none")


def _ids(name: str) -> Ids:
    return "counted" if name == "counted" else "none" if name == "none" else "recorded"
