"""`parrot-gateway bench`: each benchmark is imported when it is run."""

from __future__ import annotations

from typing import ClassVar

import typer

from parrot_gateway.cli.commands import PASS_ON, LazyGroup, become


class _Benchmarks(LazyGroup):
    targets: ClassVar = {
        "overhead": "parrot_gateway.bench.overhead:overhead_command",
        "apps": "parrot_gateway.bench.apps.command:apps_command",
        "scheduler": "parrot_gateway.bench.scheduler:scheduler_command",
        "linking": "parrot_gateway.bench.linking.command:linking_command",
        "metrics": "parrot_gateway.bench.metrics:metrics_command",
        "serving": "parrot_gateway.bench.serving:serving_command",
        "upstreams": "parrot_gateway.bench.upstreams:upstreams_command",
    }


bench = typer.Typer(
    cls=_Benchmarks, help="Measure this installation on this machine.", no_args_is_help=True
)


@bench.command("engine", **PASS_ON)
def bench_engine(context: typer.Context) -> None:
    """Measure the builtin engine: steps, prefill, shared prompts, load (see --help)."""
    become("parrot_engine.bench.engine", context)


@bench.command("embeddings", **PASS_ON)
def bench_embeddings(context: typer.Context) -> None:
    """Measure the engine of vectors and scores on random texts (see --help)."""
    become("parrot_engine.bench.embeddings", context)
