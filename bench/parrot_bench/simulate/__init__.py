"""`parrot-gateway simulate`: the scheduler on a virtual clock; options, progress, tables.

`parrot_bench.simulator` holds the simulation; this package parses and prints. An argument
that is no subcommand (`paper`, `policies`, …) names a workload to simulate.
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from parrot_bench.simulate.fit import fit_command
from parrot_bench.simulate.studies import knowledge_command, paper_command, policies_command
from parrot_bench.simulate.workload import workload_command


class _WorkloadFirst(TyperGroup):
    """Takes anything that is no subcommand for arguments of `workload`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] != "--help"):
            args = ["workload", *args]
        return super().parse_args(ctx, args)


simulate = typer.Typer(
    cls=_WorkloadFirst,
    help="Run the scheduler on a virtual clock. `simulate WORKLOAD …` is short for `simulate "
    "workload WORKLOAD …`.",
)
simulate.command("workload")(workload_command)
simulate.command("paper")(paper_command)
simulate.command("knowledge")(knowledge_command)
simulate.command("policies")(policies_command)
simulate.command("fit")(fit_command)
