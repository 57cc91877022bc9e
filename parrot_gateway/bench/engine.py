"""`parrot-gateway bench engine`: the engine's own benchmark, in a process of its own."""

from __future__ import annotations

import os
import sys

import typer

#: Settings of the typer command: its options are those of the program that it starts.
ENGINE_COMMAND_SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}


def engine_command(context: typer.Context) -> None:
    """Measure the builtin engine: steps, prefill, shared prompts, load (see --help)."""
    # The gateway's process must never load torch.
    arguments = [sys.executable, "-m", "parrot_engine.bench.engine", *context.args]
    os.execv(sys.executable, arguments)  # noqa: S606
