"""`simulate paper`, `ablation`, `knowledge`, `policies`: prepared experiments and their tables."""

from __future__ import annotations

import json as json_module
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from parrot_gateway.cli.simulate.output import Json, fail, named, report

if TYPE_CHECKING:
    from parrot_simulator.experiments.definitions import Arm, Experiment

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
    from parrot_simulator.experiments.fleet import GOODPUT
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
        data = _run_experiments(experiments, seeds or (1 if quick else runner.DEFAULT_SEEDS), plots)
        if not figures or {GOODPUT, "fleet"} & {*figures}:
            data.append(_goodput(seeds=seeds or 1, finest=STRIDE if quick else 1))
        _write(data, json)
    except (ValueError, OSError, PlotsUnavailableError) as error:
        fail(str(error))


def ablation_command(
    workload: Cases = None,
    app: Applications = None,
    load: Load = None,
    profile: Profile = "H200-8B",
    seeds: Seeds = 1,
    json: Json = None,
) -> None:
    """Switch off each policy of the scheduler in turn."""
    from parrot_simulator.experiments import runner
    from parrot_simulator.experiments.ablation import SWITCHED

    _cases(runner.select_ablation, SWITCHED, workload, app, load, profile, seeds, json)


def knowledge_command(
    workload: Cases = None,
    app: Applications = None,
    load: Load = None,
    profile: Profile = "H200-8B",
    seeds: Seeds = 1,
    json: Json = None,
) -> None:
    """What each piece of knowledge is worth: none, inferred from plain calls, or declared."""
    from parrot_simulator.experiments import runner
    from parrot_simulator.experiments.ablation import PIECES

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
    from parrot_simulator.experiments import applications, policies
    from parrot_simulator.profiles import PROFILES
    from parrot_simulator.reports.policies import arms_table

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
    from parrot_simulator.experiments import applications, policies
    from parrot_simulator.profiles import PROFILES
    from parrot_simulator.reports.policies import policies_table

    from parrot_gateway.bench.report import machine

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


def oracle_command(
    app: Applications = None,
    load: Load = None,
    engines: Engines = 4,
    profile: Profile = "H200-8B",
    ordinary: Ordinary = False,
    iterations: Annotated[
        int, typer.Option(min=0, help="Changes of schedules to try, for each load.")
    ] = 300,
    share: Annotated[
        float, typer.Option(min=0.01, max=1, help="Of the applications of `simulate policies`.")
    ] = 0.4,
    seed: Annotated[int, typer.Option(min=0, help="Of workloads and search.")] = 0,
    json: Json = None,
) -> None:
    """How far policies are from the best schedule that a search with foresight finds."""
    from parrot_simulator.experiments import applications, oracle
    from parrot_simulator.profiles import PROFILES
    from parrot_simulator.reports.oracle import oracle_table

    from parrot_gateway.bench.report import machine

    try:
        named(profile, PROFILES, "profile")
        settings = {
            "profile": profile, "engines": engines, "ordinary": ordinary, "seed": seed,
            "iterations": iterations, "share": share,
        }  # fmt: skip
        figures: list[oracle.OracleFigure] = []
        for figure in oracle.run(
            applications.select(app or ()),
            profile=profile,
            engines=engines,
            ordinary=ordinary,
            loads=[number - 1 for number in load or (1, 2, 3)],
            iterations=iterations,
            share=share,
            seed=seed,
            progress=report,
        ):
            figures.append(figure)
            # A search takes long: what is found by then is kept.
            found = [each.to_dict() for each in figures]
            _write({"settings": settings, "machine": machine(), "figures": found}, json)
        typer.echo(oracle_table(figures))
    except (ValueError, OSError) as error:
        fail(str(error))


def robustness_command(
    case: Annotated[
        list[str] | None,
        typer.Option(help="Cases whose names begin so; repeatable.", show_default="all"),
    ] = None,
    policy: Annotated[str, typer.Option(help="A scheduler set-up.")] = "parrot",
    seeds: Seeds = 3,
    share: Annotated[float, typer.Option(min=0.01, max=1, help="Of the applications.")] = 1.0,
    json: Json = None,
) -> None:
    """Compare a policy with LMetric where what it is told is wrong, or load is not as usual."""
    from parrot_scheduler.config import PRESETS
    from parrot_simulator.experiments import robustness
    from parrot_simulator.reports.policies import robustness_table

    from parrot_gateway.bench.report import machine

    try:
        named(policy, PRESETS, "policy")
        cases = robustness.select_cases(case or ())
        figures = list(
            robustness.run(cases, policy=policy, seeds=seeds, share=share, progress=report)
        )
        typer.echo(robustness_table(policy, figures))
        settings = {"policy": policy, "seeds": seeds, "share": share}
        found = [figure.to_dict() | {"ratio": figure.ratio} for figure in figures]
        _write({"settings": settings, "machine": machine(), "figures": found}, json)
    except (ValueError, OSError) as error:
        fail(str(error))


def mixing_command(
    engines: Engines = 4,
    profile: Profile = "H200-8B",
    ordinary: Ordinary = False,
    seeds: Seeds = 3,
    json: Json = None,
) -> None:
    """What chats and jobs on the same engines cost each other, and what keeping them apart does."""
    from parrot_simulator.experiments import mixing
    from parrot_simulator.profiles import PROFILES
    from parrot_simulator.reports.policies import apart_table, steps_table

    from parrot_gateway.bench.report import machine

    try:
        named(profile, PROFILES, "profile")
        steps = mixing.step_costs(profile, ordinary=ordinary)
        typer.echo(steps_table(steps) + "\n")
        figures = list(
            mixing.run(profile, engines=engines, ordinary=ordinary, seeds=seeds, progress=report)
        )
        typer.echo(apart_table(figures))
        settings = {"profile": profile, "engines": engines, "ordinary": ordinary, "seeds": seeds}
        data = {
            "settings": settings,
            "machine": machine(),
            "steps": [step.to_dict() for step in steps],
            "figures": [figure.to_dict() for figure in figures],
        }
        _write(data, json)
    except (ValueError, OSError) as error:
        fail(str(error))


def _run_experiments(
    experiments: Sequence[Experiment], seeds: int, plots: Path | None
) -> list[dict[str, Any]]:
    """Run experiments, print them and where ours loses, and give them as plain data."""
    from parrot_simulator.experiments import runner
    from parrot_simulator.experiments.definitions import OURS
    from parrot_simulator.reports.plots import draw_experiment
    from parrot_simulator.reports.tables import experiment_table, losses

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


def _goodput(*, seeds: int, finest: int) -> dict[str, Any]:
    """Search the goodput of every case, print it, and give it as plain data."""
    from parrot_simulator.experiments import goodput
    from parrot_simulator.experiments.fleet import GOODPUT
    from parrot_simulator.reports.tables import goodput_table, objectives_table

    results: list[goodput.GoodputResult] = []
    for case in goodput.CASES:
        found = list(goodput.run(case, seeds=seeds, finest=finest, progress=report))
        results += found
        typer.echo(goodput_table(case, found) + "\n")
    typer.echo(objectives_table())
    return {"figure": GOODPUT, "seeds": seeds, "found": [result.to_dict() for result in results]}


def _write(data: Sequence[dict[str, Any]] | dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.write_text(json_module.dumps(data, indent=1) + "\n", encoding="utf-8")
