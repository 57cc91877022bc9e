"""`parrot-gateway doctor` ends with an error where something is broken, and only there."""

from __future__ import annotations

import importlib.metadata

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


def test_a_narrow_terminal_leaves_words_and_commands_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    advice = "pip install 'parrot-gateway[engine]', or parrot-gateway serve --upstream NAME=URL"
    found = [
        Finding("model cache", "ok", "/home/somebody/.cache/huggingface: 74 GiB free"),
        Finding("torch", "missing", "not installed", advice),
    ]
    monkeypatch.setattr(doctor, "examine", lambda: found)
    result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "60"})
    assert result.stdout.splitlines() == [
        "ok       model cache  /home/somebody/.cache/huggingface: 74 GiB free",
        "missing  torch        not installed",
        f"         {advice}",
    ]


def test_this_machine_is_examined() -> None:
    found = {finding.topic: finding for finding in doctor.examine()}
    assert {"python", "machine", "torch", "gpu", "open files", "port 8000", "model cache"} <= set(
        found
    )
    assert found["uvicorn"].what == importlib.metadata.version("uvicorn")
