"""`simulate fit`: a profile of the engines that an event log is of."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from parrot_bench.simulate.output import fail, report


def fit_command(
    log: Annotated[Path, typer.Argument(help="An event log of a gateway, or of --log.")],
    json: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the profile, for `simulate … --profile FILE`."),
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the profile.")] = "fitted",
    model: Annotated[
        str, typer.Option(help="Model whose engines to fit.", show_default="the first in the log")
    ] = "",
) -> None:
    """Fit a profile of your engines to a recorded event log (`scheduler.record`)."""
    from parrot_bench.simulator.fitting import fit_log
    from parrot_bench.simulator.reports.tables import fit_table

    try:
        with log.open(encoding="utf-8") as lines:
            fit = fit_log(lines, name, model)
        if json is not None:
            text = json_module.dumps(fit.to_dict(), indent=1)
            json.write_text(text + "\n", encoding="utf-8")
    except (OSError, ValueError) as error:
        fail(f"{log}: {error}" if isinstance(error, ValueError) else str(error))
    typer.echo(fit_table(fit))
    report(
        f"{fit.observations} observations of {fit.calls} calls on {fit.engines} engines of "
        f"{fit.profile.model}: half are off by less than {fit.median_error:.1%}, 90 % by less "
        f"than {fit.p90_error:.1%}"
    )
