"""What all `simulate` commands share: the option for results, choices, progress, errors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NoReturn, TypeAlias, TypeVar

import typer

V = TypeVar("V")

#: The option that names the file for all results.
Json: TypeAlias = Annotated[Path | None, typer.Option(metavar="FILE", help="Write all results.")]


def named(name: str, known: Mapping[str, V], option: str) -> V:
    """What an option names.

    Raises:
        ValueError: an unknown name; lists the known ones.
    """
    if name not in known:
        raise ValueError(f"--{option} {name!r}: there are {', '.join(known)}")
    return known[name]


def report(text: str) -> None:
    """Progress, on standard error: no part of the results."""
    typer.echo(text, err=True)


def fail(message: str) -> NoReturn:
    """End the command with a mistake of its user."""
    typer.secho(message, err=True, fg=typer.colors.RED)
    raise typer.Exit(2)
