"""`parrot-gateway simulate`: the scheduler on a virtual clock; options, progress, tables.

All that is simulated is in `parrot_simulator`; nothing here decides anything. What does not begin
with the name of a subcommand (`paper`, `policies`, …) is a workload to simulate.
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from parrot_gateway.cli.simulate.fit import fit_command
from parrot_gateway.cli.simulate.studies import (
    ablation_command,
    knowledge_command,
    mixing_command,
    oracle_command,
    paper_command,
    policies_command,
    robustness_command,
)
from parrot_gateway.cli.simulate.workload import workload_command


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
simulate.command("ablation")(ablation_command)
simulate.command("knowledge")(knowledge_command)
simulate.command("policies")(policies_command)
simulate.command("fit")(fit_command)
simulate.command("oracle")(oracle_command)
simulate.command("robustness")(robustness_command)
simulate.command("mixing")(mixing_command)
