"""The documentation knows every setting, command and route, and names nothing that is not there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel
from typer.main import get_command

from parrot_gateway.cli.main import app
from parrot_gateway.settings.model import (
    EngineLinkSettings,
    ModelSettings,
    ParrotV3Settings,
    ResponseSettings,
    ServerSettings,
    SessionSettings,
    UpstreamSettings,
)

ROOT = Path(__file__).parent.parent
OPERATIONS = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return OPERATIONS.split(f"\n### {title}\n")[1].split("\n### ")[0].split("\n## ")[0]


@pytest.mark.parametrize(
    ("title", "model"),
    [
        ("server", ServerSettings),
        ("models", ModelSettings),
        ("upstreams", UpstreamSettings),
        ("engines", EngineLinkSettings),
        ("sessions", SessionSettings),
        ("parrot_v3", ParrotV3Settings),
        ("responses", ResponseSettings),
    ],
)
def test_settings_tables_are_complete_and_true(title: str, model: type[BaseModel]) -> None:
    documented: set[str] = set()
    for line in section(title).splitlines():
        if line.startswith("| `"):
            documented |= set(re.findall(r"`(\w+)`", line.split("|")[1]))
    assert documented == set(model.model_fields)


def test_every_command_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in get_command(app).commands:  # type: ignore[attr-defined]
        assert f"parrot-gateway {name}" in readme


@pytest.mark.parametrize("file", sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]))
def test_links_between_documents_work(file: Path) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", file.read_text(encoding="utf-8")):
        assert (file.parent / target).exists(), target
