"""Commands that are imported on use, and commands that become programs of the engine."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any, ClassVar

import typer
from typer.core import TyperGroup


class LazyGroup(TyperGroup):
    """A group that imports some commands when they are called, or for `--help`.

    A gateway runs for weeks, so `serve` must not load what only benchmarks need.
    """

    #: Maps a command's name to `module:attribute`, a function or typer application.
    targets: ClassVar[dict[str, str]] = {}

    def list_commands(self, ctx: Any) -> list[str]:
        return list(dict.fromkeys([*super().list_commands(ctx), *self.targets]))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in self.targets:
            self._load(cmd_name)
        elif cmd_name not in self.commands:
            # All commands are loaded so that a typo gets a suggestion.
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


#: A command that becomes a program takes the program's options.
PASS_ON: dict[str, Any] = {
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
    "add_help_option": False,
}


def become(module: str, context: typer.Context) -> None:
    """Replace the process by a program of the engine: the gateway's process must never load
    torch.
    """
    os.execv(sys.executable, [sys.executable, "-m", module, *context.args])  # noqa: S606
