"""`parrot-gateway bench`: each benchmark is imported when it is run."""

from __future__ import annotations

from typing import ClassVar

import typer

from parrot_gateway.cli.commands import PASS_ON, LazyGroup, become


class _Benchmarks(LazyGroup):
    targets: ClassVar = {
        "overhead": "parrot_bench.overhead:overhead_command",
        "chaos": "parrot_bench.chaos.command:chaos_command",
        "apps": "parrot_bench.apps.command:apps_command",
        "scheduler": "parrot_bench.scheduler:scheduler_command",
        "linking": "parrot_bench.linking.command:linking_command",
        "serving": "parrot_bench.serving:serving_command",
    }


bench = typer.Typer(
    cls=_Benchmarks, help="Measure this installation on this machine.", no_args_is_help=True
)


@bench.command("engine", **PASS_ON)
def bench_engine(context: typer.Context) -> None:
    """Measure the builtin engine: steps, prefill, shared prompts, load (see --help)."""
    become("parrot_bench.engine.engine", context)


@bench.command("studies", **PASS_ON)
def bench_studies(context: typer.Context) -> None:
    """Measure kernels and steps of the engine on a device, one study at a time (see --help)."""
    become("parrot_bench.engine.studies", context)
