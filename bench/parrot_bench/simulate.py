"""`parrot-gateway simulate`: the scheduler on a virtual clock, under several policies."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from parrot_scheduler.config import SchedulerConfig

simulate = typer.Typer(
    help="Run the scheduler on a virtual clock, with simulated engines and clients.",
    no_args_is_help=True,
)


@simulate.callback()
def _group() -> None:
    """Keep the name of the only command."""


@simulate.command("policies")
def policies_command(
    app: Annotated[
        list[str] | None,
        typer.Option(help="One of the five applications; repeatable.", show_default="all"),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[,FIELD=VALUE…]",
            help="Scheduler set-ups, e.g. parrot,order=fcfs; repeatable. The first is compared "
            "with the others.",
            show_default="parrot and five others",
        ),
    ] = None,
    load: Annotated[
        list[int] | None,
        typer.Option(min=1, max=3, help="Which of the loads; repeatable.", show_default="all"),
    ] = None,
    engines: Annotated[int, typer.Option(min=1, help="Engines to simulate.")] = 4,
    profile: Annotated[
        str, typer.Option(help="Kind of engine; an unknown name lists them.")
    ] = "H200-8B",
    ordinary: Annotated[
        bool,
        typer.Option("--ordinary", help="Engines without shared attention and background chunks."),
    ] = False,
    seeds: Annotated[int, typer.Option(min=1, help="Repetitions.")] = 3,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all results.")] = None,
) -> None:
    """Compare policies on five applications at three loads, with the same calls for all."""
    from parrot_bench.report import write_json
    from parrot_bench.simulator import applications, policies
    from parrot_bench.simulator.profiles import PROFILES

    try:
        if profile not in PROFILES:
            raise ValueError(f"--profile {profile!r}: there are {', '.join(PROFILES)}")
        configs = {name: _config(name) for name in policy or policies.POLICIES}
        if len(configs) < 2:
            raise ValueError("--policy: name two set-ups at least")
        figures = list(
            policies.run(
                applications.select(app or ()),
                configs,
                profile=profile,
                seeds=seeds,
                engines=engines,
                ordinary=ordinary,
                loads=[number - 1 for number in load or (1, 2, 3)],
                progress=lambda text: typer.echo(text, err=True),
            )
        )
        typer.echo(policies.policies_table(figures))
        if json is not None:
            settings = {"profile": profile, "engines": engines, "ordinary": ordinary}
            found = [asdict(figure) | {"ratio": figure.ratio} for figure in figures]
            write_json(json, "policies", {"settings": settings, "seeds": seeds, "figures": found})
    except (ValueError, OSError) as error:
        typer.secho(str(error), err=True, fg=typer.colors.RED)
        raise typer.Exit(2) from None


def _config(text: str) -> SchedulerConfig:
    """Read a set-up: the name of a preset, and fields that differ from it."""
    from parrot_scheduler.policies import policies_of

    from parrot_bench.policies import preset_of

    name, *changes = text.split(",")
    try:
        preset = preset_of(name)
    except ValueError as error:
        raise ValueError(f"--policy {name!r}: {error}") from None
    fields = dict(change.partition("=")[::2] for change in changes)
    known = ("admission", "order", "place", "keep")
    for field in fields:
        if field not in known:
            raise ValueError(f"--policy {text!r}: {field!r} is none of {', '.join(known)}")
    config = replace(preset, **fields)  # type: ignore[arg-type]
    policies_of(config)
    return config
