"""`parrot-gateway doctor` ends with an error where something is broken, and only there."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from parrot_gateway.cli import doctor
from parrot_gateway.cli.doctor import Finding, State
from parrot_gateway.cli.main import app


@pytest.mark.parametrize(
    ("state", "status"), [("ok", 0), ("note", 0), ("missing", 0), ("broken", 1)]
)
def test_the_exit_status(monkeypatch: pytest.MonkeyPatch, state: State, status: int) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: [Finding("gpu", state, "found", "do [this]")])
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == status
    assert state in result.stdout
    assert "do [this]" in result.stdout
