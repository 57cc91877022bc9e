"""Commands that are imported when they are called."""

from __future__ import annotations

from typing import Any

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from parrot_gateway.cli.main import app


def commands_of(group: Any) -> dict[str, Any]:
    context = typer.Context(group)
    return {name: group.get_command(context, name) for name in group.list_commands(context)}


def test_every_command_that_is_listed_is_there_and_says_what_it_does() -> None:
    commands = commands_of(get_command(app))
    assert list(commands) == [
        "serve", "engine", "doctor", "graph", "explain", "bench", "models", "engines",
        "top", "import", "replay", "simulate",
    ]  # fmt: skip
    benchmarks = commands_of(commands["bench"])
    assert {"overhead", "apps", "scheduler", "linking", "serving"} < set(benchmarks)
    for name, command in {**commands, **benchmarks}.items():
        assert command.name == name
        assert command.get_short_help_str()


def test_the_help_of_a_group_has_all_of_its_commands() -> None:
    shown = CliRunner().invoke(app, ["bench", "--help"], terminal_width=200)
    assert shown.exit_code == 0
    for name, command in commands_of(commands_of(get_command(app))["bench"]).items():
        assert f"{name} " in shown.output
        assert command.get_short_help_str(40).removesuffix("...") in shown.output


@pytest.mark.parametrize(
    ("arguments", "meant"), [(["bnech"], "bench"), (["bench", "overhaed"], "overhead")]
)
def test_a_command_that_is_meant_is_suggested(arguments: list[str], meant: str) -> None:
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code == 2
    assert f"Did you mean '{meant}'?" in refused.output
