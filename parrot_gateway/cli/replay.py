"""`parrot-gateway replay LOG`: repeats the scheduler's decisions on a recorded event log."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def replay_command(
    log: Annotated[Path, typer.Argument(help="An event log, as `scheduler.record` writes it.")],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE:CLASS", help="A policy of your own that the log names and may load."
        ),
    ] = None,
) -> None:
    """Replay an event log and compare each decision with the recorded one.

    The exit status is 1 if a decision differs, and 2 if the file is no event log.
    """
    from parrot_scheduler.event_log import compare

    try:
        with log.open(encoding="utf-8") as lines:
            outcome = compare(lines, policy or ())
        if not outcome.compared:
            raise ValueError(f"{outcome.steps} steps, but no decisions to compare")
    except (OSError, ValueError) as error:
        message = str(error) if isinstance(error, OSError) else f"{log}: {error}"
        typer.secho(message, err=True, fg=typer.colors.RED)
        raise typer.Exit(2) from None
    if outcome.differs_at is not None:
        typer.echo(f"step {outcome.differs_at} is decided otherwise:")
        typer.echo(f"  recorded: {outcome.recorded[:2000]}")
        typer.echo(f"  replayed: {outcome.replayed[:2000]}")
        raise typer.Exit(1)
    typer.echo(f"{outcome.compared} of {outcome.steps} steps: the same decisions, byte for byte")
