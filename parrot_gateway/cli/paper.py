"""`parrot-gateway simulate paper` and `simulate ablation`: options, progress, tables."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated, Any

import typer


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
        int | None,
        typer.Option(min=1, help="Repetitions.", show_default="3; of goodput 1"),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all results.", show_default=False)
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Draw a picture of each.", show_default=False),
    ] = None,
) -> None:
    """Run the experiments of the Parrot paper, and a fleet of today's engines."""
    from parrot_simulator.experiments import goodput, paper
    from parrot_simulator.reports.paper_report import draw_experiment, experiment_table, losses
    from parrot_simulator.reports.plots import PlotsUnavailableError, require_matplotlib

    try:
        figures = set(figure or ())
        with_goodput = not figures or bool(figures & {goodput.FIGURE, "fleet"})
        others = figures - {goodput.FIGURE}
        experiments = [] if figures and not others else paper.select(others)
        if plots is not None:
            require_matplotlib()
        found: list[paper.Comparison] = []
        data: list[dict[str, Any]] = []
        for experiment in experiments:
            if quick:
                experiment = paper.quick(experiment)
            repetitions = seeds or (1 if quick else paper.DEFAULT_SEEDS)
            outcomes = list(paper.run(experiment, seeds=repetitions, progress=_say))
            comparisons = paper.compare(experiment, outcomes)
            found += comparisons
            typer.echo(experiment_table(experiment, outcomes, comparisons) + "\n")
            data.append(
                {
                    "figure": experiment.figure,
                    "metric": experiment.metric,
                    "seeds": repetitions,
                    "outcomes": [outcome.to_dict() for outcome in outcomes],
                    "comparisons": [comparison.to_dict() for comparison in comparisons],
                }
            )
            if plots is not None:
                _say(f"drew {draw_experiment(experiment, outcomes, plots)}")
        if found:
            typer.echo(losses(found))
        if with_goodput:
            data.append(_goodput(seeds=seeds or 1, finest=goodput.STRIDE if quick else 1))
        if json is not None:
            json.write_text(json_module.dumps(data, indent=1) + "\n", encoding="utf-8")
    except (ValueError, OSError, PlotsUnavailableError) as error:
        _fail(str(error))


def _goodput(*, seeds: int, finest: int) -> dict[str, Any]:
    """Search the goodput of every case, print it, and give it as plain data."""
    from parrot_simulator.experiments import goodput
    from parrot_simulator.reports.paper_report import goodput_table, objectives_table

    results: list[goodput.Found] = []
    for case in goodput.CASES:
        found = list(goodput.run(case, seeds=seeds, finest=finest, progress=_say))
        results += found
        typer.echo(goodput_table(case, found) + "\n")
    typer.echo(objectives_table())
    return {
        "figure": goodput.FIGURE,
        "seeds": seeds,
        "found": [result.to_dict() for result in results],
    }


def ablation_command(
    workload: Annotated[
        list[str] | None,
        typer.Option(help="One of the cases; repeatable.", show_default="all"),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Repetitions.")] = 1,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all results.", show_default=False)
    ] = None,
) -> None:
    """Switch off each policy of the scheduler in turn."""
    from parrot_simulator.experiments import ablation
    from parrot_simulator.reports.paper_report import ablation_table

    try:
        rows = [
            row
            for case in ablation.select(workload or ())
            for row in ablation.run(case, seeds=seeds, progress=_say)
        ]
        typer.echo(ablation_table(rows))
        if json is not None:
            text = json_module.dumps([row.to_dict() for row in rows], indent=1)
            json.write_text(text + "\n", encoding="utf-8")
    except (ValueError, OSError) as error:
        _fail(str(error))


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _fail(message: str) -> None:
    typer.secho(message, err=True, fg=typer.colors.RED)
    raise typer.Exit(2)
