"""`parrot-gateway bench` and `simulate`: the commands of the distribution `parrot-bench`.

They are outside the gateway's own distribution. Without `parrot-bench` they say how to install it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

INSTALL = "pip install ./bench, in a clone of the repository"


def _load(module: str, name: str) -> typer.Typer:
    """Return a module's application `name`, or one that says how to install it."""
    try:
        found: typer.Typer = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "parrot_bench":
            raise
        return _missing(name)
    return found


class _Missing(TyperGroup):
    """A group that refuses every argument except `--help`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args[:1] == ["--help"]:
            return super().parse_args(ctx, args)
        message = f"`parrot-gateway {ctx.info_name}` needs parrot-bench, which is not installed"
        typer.secho(f"{message}: {INSTALL}.", err=True, fg=typer.colors.RED)
        raise typer.Exit(2)


def _missing(name: str) -> typer.Typer:
    app = typer.Typer(name=name, cls=_Missing, help=f"Needs parrot-bench: {INSTALL}.")
    app.callback()(lambda: None)
    return app


bench = _load("parrot_bench.cli", "bench")
simulate = _load("parrot_bench.simulate", "simulate")
