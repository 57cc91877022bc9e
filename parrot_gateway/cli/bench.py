"""`parrot-gateway bench` and `simulate`: the commands of the distribution `parrot-bench`.

The gateway's own distribution leaves them out. Without `parrot-bench` they say how to install it.
"""

from __future__ import annotations

from importlib import import_module

import typer

from parrot_gateway.cli.commands import PASS_ON

INSTALL = "pip install ./bench, in a clone of the repository"


def _load(module: str, name: str) -> typer.Typer:
    """Return the application `name` of a module, or one that says how to install it."""
    try:
        found: typer.Typer = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name != "parrot_bench":
            raise
        return _missing(name)
    return found


def _missing(name: str) -> typer.Typer:
    settings = PASS_ON["context_settings"]
    app = typer.Typer(
        help=f"Needs parrot-bench: {INSTALL}.",
        invoke_without_command=True,
        context_settings=settings,
    )

    @app.callback()
    def command() -> None:
        typer.secho(
            f"`parrot-gateway {name}` needs parrot-bench, which is not installed: {INSTALL}.",
            err=True,
            fg=typer.colors.RED,
        )
        raise typer.Exit(2)

    return app


bench = _load("parrot_bench.cli", "bench")
simulate = _load("parrot_bench.simulate", "simulate")
