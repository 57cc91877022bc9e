"""`parrot-gateway simulate paper` and `simulate ablation`: options, progress, tables."""

from __future__ import annotations

import json as json_module
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from parrot_simulator.experiments.definitions import Experiment

Json = Annotated[Path | None, typer.Option(metavar="FILE", help="Write all results.")]


def paper_command(
    figure: Annotated[
        list[str] | None,
        typer.Option(
            help="Figure of the paper (10 to 18), `fleet …`, or `paper`, `fleet` for all of a "
            "kind; repeatable. `fleet goodput` looks for the highest load that each arm bears.",
            show_default="all",
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="First and last point of each, one seed; goodput coarsely."),
    ] = False,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Repetitions.", show_default="3; of goodput 1")
    ] = None,
    json: Json = None,
    plots: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Draw a picture of each.")
    ] = None,
) -> None:
    """Run the experiments of the Parrot paper, and a fleet of today's engines."""
    from parrot_simulator.experiments import runner
    from parrot_simulator.experiments.definitions import GOODPUT
    from parrot_simulator.experiments.goodput import STRIDE
    from parrot_simulator.reports.plots import PlotsUnavailableError, require_matplotlib

    try:
        figures = figure or []
        others = [name for name in figures if name != GOODPUT]
        experiments = [] if figures and not others else runner.select(others)
        if plots is not None:
            require_matplotlib()
        if quick:
            experiments = [runner.quick(experiment) for experiment in experiments]
        data = _run(experiments, seeds or (1 if quick else runner.DEFAULT_SEEDS), plots)
        if not figures or {GOODPUT, "fleet"} & {*figures}:
            data.append(_goodput(seeds=seeds or 1, finest=STRIDE if quick else 1))
        _write(data, json)
    except (ValueError, OSError, PlotsUnavailableError) as error:
        _fail(str(error))


def ablation_command(
    workload: Annotated[
        list[str] | None, typer.Option(help="One of the cases; repeatable.", show_default="all")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Repetitions.")] = 1,
    json: Json = None,
) -> None:
    """Switch off each policy of the scheduler in turn."""
    from parrot_simulator.experiments import runner

    try:
        _write(_run(runner.select_ablation(workload or ()), seeds, None), json)
    except (ValueError, OSError) as error:
        _fail(str(error))


def _run(experiments: Sequence[Experiment], seeds: int, plots: Path | None) -> list[dict[str, Any]]:
    """Run experiments, print them and where ours loses, and give them as plain data."""
    from parrot_simulator.experiments import runner
    from parrot_simulator.experiments.definitions import OURS
    from parrot_simulator.reports.plots import draw_experiment
    from parrot_simulator.reports.tables import experiment_table, losses

    found: list[runner.Comparison] = []
    data: list[dict[str, Any]] = []
    for experiment in experiments:
        outcomes = list(runner.run(experiment, seeds=seeds, progress=_say))
        comparisons = runner.compare(experiment, outcomes)
        if experiment.base == OURS.name:
            found += comparisons
        typer.echo(experiment_table(experiment, outcomes, comparisons) + "\n")
        data.append(
            {
                "figure": experiment.figure,
                "metric": experiment.metric,
                "seeds": seeds,
                "outcomes": [outcome.to_dict() for outcome in outcomes],
                "comparisons": [comparison.to_dict() for comparison in comparisons],
            }
        )
        if plots is not None:
            _say(f"drew {draw_experiment(experiment, outcomes, plots)}")
    if found:
        typer.echo(losses(found))
    return data


def _goodput(*, seeds: int, finest: int) -> dict[str, Any]:
    """Search the goodput of every case, print it, and give it as plain data."""
    from parrot_simulator.experiments import goodput
    from parrot_simulator.experiments.definitions import GOODPUT
    from parrot_simulator.reports.tables import goodput_table, objectives_table

    results: list[goodput.GoodputResult] = []
    for case in goodput.CASES:
        found = list(goodput.run(case, seeds=seeds, finest=finest, progress=_say))
        results += found
        typer.echo(goodput_table(case, found) + "\n")
    typer.echo(objectives_table())
    return {"figure": GOODPUT, "seeds": seeds, "found": [result.to_dict() for result in results]}


def _write(data: Sequence[dict[str, Any]], path: Path | None) -> None:
    if path is not None:
        path.write_text(json_module.dumps(data, indent=1) + "\n", encoding="utf-8")


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _fail(message: str) -> None:
    typer.secho(message, err=True, fg=typer.colors.RED)
    raise typer.Exit(2)
