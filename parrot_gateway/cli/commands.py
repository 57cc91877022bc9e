"""Commands that are found when they are called, and those that are programs of the engine."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any, ClassVar

import typer
from typer.core import TyperGroup


class LazyGroup(TyperGroup):
    """A group of which some commands are imported when they are called, or for `--help`.

    A gateway stays up for weeks: `serve` must not hold what only benchmarks need.
    """

    #: Name of a command to `module:attribute`, which is a function or an application of typer.
    targets: ClassVar[dict[str, str]] = {}

    def list_commands(self, ctx: Any) -> list[str]:
        return list(dict.fromkeys([*super().list_commands(ctx), *self.targets]))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in self.targets:
            self._load(cmd_name)
        elif cmd_name not in self.commands:
            # What is meant is suggested from those that are there.
            for name in self.targets:
                self._load(name)
        return super().get_command(ctx, cmd_name)

    def _load(self, name: str) -> None:
        if name in self.commands:
            return
        module, _, attribute = self.targets[name].partition(":")
        found = getattr(import_module(module), attribute)
        parent = typer.Typer()
        if isinstance(found, typer.Typer):
            parent.add_typer(found, name=name)
        else:
            parent.command(name)(found)
        self.add_command(typer.main.get_group(parent).commands[name])


#: The options of a command that becomes a program are those of the program.
PASS_ON: dict[str, Any] = {
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
    "add_help_option": False,
}


def become(module: str, context: typer.Context) -> None:
    """Become a program of the engine: the gateway's process must never load torch."""
    os.execv(sys.executable, [sys.executable, "-m", module, *context.args])  # noqa: S606
