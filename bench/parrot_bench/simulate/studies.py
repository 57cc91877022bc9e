"""`simulate paper`, `knowledge`, `policies`: prepared experiments and their tables."""

from __future__ import annotations

import json as json_module
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from parrot_bench.simulate.output import Json, fail, named, report

if TYPE_CHECKING:
    from parrot_bench.simulator.experiments.definitions import Arm, Experiment

Cases: TypeAlias = Annotated[
    list[str] | None, typer.Option(help="One of the cases; repeatable.", show_default="all")
]
Seeds: TypeAlias = Annotated[int, typer.Option(min=1, help="Repetitions.")]
Engines: TypeAlias = Annotated[int, typer.Option(min=1, help="Engines to simulate.")]
Profile: TypeAlias = Annotated[
    str, typer.Option(help="Kind of engine; an unknown name lists them.")
]
Applications: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--app", help="One of the five applications, or `all`; repeatable."),
]
Load: TypeAlias = Annotated[
    list[int] | None,
    typer.Option(min=1, max=3, help="Which of the loads; repeatable.", show_default="all"),
]
Ordinary: TypeAlias = Annotated[
    bool, typer.Option("--ordinary", help="Engines without shared attention and background chunks.")
]


def paper_command(
    figure: Annotated[
        list[str] | None,
        typer.Option(
            help="Figure of the paper (10 to 18), `fleet …`, or `paper`, `fleet` for all of a "
            "kind; repeatable.",
            show_default="all",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="First and last point of each, one seed.")
    ] = False,
    seeds: Annotated[int | None, typer.Option(min=1, help="Repetitions.", show_default="3")] = None,
    json: Json = None,
    plots: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Draw a picture of each.")
    ] = None,
) -> None:
    """Run the experiments of the Parrot paper, and a fleet of today's engines."""
    from parrot_bench.simulator.experiments import runner
    from parrot_bench.simulator.reports.plots import PlotsUnavailableError, require_matplotlib

    try:
        experiments = runner.select(figure or ())
        if plots is not None:
            require_matplotlib()
        if quick:
            experiments = [runner.quick(experiment) for experiment in experiments]
        data = _run_experiments(experiments, seeds or (1 if quick else runner.DEFAULT_SEEDS), plots)
        _write(data, json)
    except (ValueError, OSError, PlotsUnavailableError) as error:
        fail(str(error))


def knowledge_command(
    workload: Cases = None,
    app: Applications = None,
    load: Load = None,
    profile: Profile = "H200-8B",
    seeds: Seeds = 1,
    json: Json = None,
) -> None:
    """What each piece of knowledge is worth: none, inferred from plain calls, or declared."""
    from parrot_bench.simulator.experiments import runner
    from parrot_bench.simulator.experiments.knowledge import PIECES

    _cases(runner.select_knowledge, PIECES, workload, app, load, profile, seeds, json)


def _cases(
    select: Callable[[Iterable[str]], list[Experiment]],
    arms: Sequence[Arm],
    workload: list[str] | None,
    app: list[str] | None,
    load: list[int] | None,
    profile: str,
    seeds: int,
    json: Path | None,
) -> None:
    """Prepared cases or, with `app`, applications of `simulate policies` at their loads."""
    from parrot_bench.simulator.experiments import applications, policies
    from parrot_bench.simulator.profiles import PROFILES
    from parrot_bench.simulator.reports.policies import arms_table

    try:
        if not app:
            _write(_run_experiments(select(workload or ()), seeds, None), json)
            return
        named(profile, PROFILES, "profile")
        figures = list(
            policies.run(
                applications.select(app),
                profile=profile,
                arms=arms,
                seeds=seeds,
                loads=[number - 1 for number in load or (1, 2, 3)],
                # Otherwise there would be nothing to predict.
                asked=2048,
                progress=report,
            )
        )
        typer.echo(arms_table(figures))
        _write([figure.to_dict() for figure in figures], json)
    except (ValueError, OSError) as error:
        fail(str(error))


def policies_command(
    app: Applications = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Scheduler set-ups; repeatable. The first is compared with the others.",
            show_default="parrot and five others",
        ),
    ] = None,
    load: Load = None,
    engines: Engines = 4,
    profile: Profile = "H200-8B",
    ordinary: Ordinary = False,
    seeds: Seeds = 3,
    json: Json = None,
) -> None:
    """Compare policies on five applications at three loads, with the same calls for all."""
    from parrot_scheduler.config import PRESETS

    from parrot_bench.report import machine
    from parrot_bench.simulator.experiments import applications, policies
    from parrot_bench.simulator.profiles import PROFILES
    from parrot_bench.simulator.reports.policies import policies_table

    try:
        names = policy or list(policies.POLICIES)
        for name in names:
            named(name, PRESETS, "policy")
        if len(set(names)) < 2:
            raise ValueError("--policy: name two set-ups at least")
        named(profile, PROFILES, "profile")
        figures = list(
            policies.run(
                applications.select(app or ()),
                profile=profile,
                arms=policies.arms_of(names),
                seeds=seeds,
                engines=engines,
                ordinary=ordinary,
                loads=[number - 1 for number in load or (1, 2, 3)],
                progress=report,
            )
        )
        typer.echo(policies_table(figures))
        settings = {"profile": profile, "engines": engines, "ordinary": ordinary, "seeds": seeds}
        found = [figure.to_dict() | {"ratio": figure.ratio} for figure in figures]
        _write({"settings": settings, "machine": machine(), "figures": found}, json)
    except (ValueError, OSError) as error:
        fail(str(error))


def _run_experiments(
    experiments: Sequence[Experiment], seeds: int, plots: Path | None
) -> list[dict[str, Any]]:
    """Run experiments, print them and where ours loses, and give them as plain data."""
    from parrot_bench.simulator.experiments import runner
    from parrot_bench.simulator.experiments.definitions import OURS
    from parrot_bench.simulator.reports.plots import draw_experiment
    from parrot_bench.simulator.reports.tables import experiment_table, losses

    found: list[runner.Comparison] = []
    data: list[dict[str, Any]] = []
    for experiment in experiments:
        outcomes = list(runner.run(experiment, seeds=seeds, progress=report))
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
            report(f"drew {draw_experiment(experiment, outcomes, plots)}")
    if found:
        typer.echo(losses(found))
    return data


def _write(data: Sequence[dict[str, Any]] | dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.write_text(json_module.dumps(data, indent=1) + "\n", encoding="utf-8")
