"""Chats and jobs together and apart, and the commands that print what pieces are worth."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from parrot_simulator.experiments import applications, mixing
from parrot_simulator.experiments.ablation import PIECES, SWITCHED
from parrot_simulator.experiments.applications import Loads
from parrot_simulator.profiles import DEFAULT_PROFILE
from typer.testing import CliRunner

from parrot_gateway.cli.main import app


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """All applications have one second of arrivals, of short texts."""
    cut = [
        replace(each, loads={DEFAULT_PROFILE: Loads((3, 6, 9), 1.0, 0.2)})
        for each in applications.APPLICATIONS
    ]
    monkeypatch.setattr(applications, "APPLICATIONS", tuple(cut))


@pytest.mark.parametrize("profile", [DEFAULT_PROFILE])
def test_a_step_grows_with_what_is_in_it(profile: str) -> None:
    steps = mixing.step_costs(profile)
    by_size = {(step.decodes, step.filled): step.seconds for step in steps}
    for (decodes, filled), seconds in by_size.items():
        assert all(
            seconds <= other
            for (more_decodes, more_filled), other in by_size.items()
            if more_decodes >= decodes and more_filled >= filled
        )


def test_engines_of_their_own_for_jobs_spare_chats(tmp_path: Path) -> None:
    path = tmp_path / "mixing.json"
    arguments = ["--engines", "3", "--seeds", "1", "--json", str(path)]
    result = CliRunner().invoke(app, ["simulate", "mixing", *arguments])
    assert result.exit_code == 0, result.output
    assert "| decodes, ms a step | 0 filled |" in result.stdout
    figures = json.loads(path.read_text(encoding="utf-8"))["figures"]
    assert [(f["load"], f["jobs_share"]) for f in figures] == [
        (load, times) for load in (3, 6, 9) for times in mixing.JOBS
    ]
    for found in figures:
        assert list(found["chats"]) == ["together", "jobs on 1 of 3", "jobs on 2 of 3"]
        assert found["chats"]["jobs on 1 of 3"] <= found["chats"]["together"] * 1.02
        assert found["jobs"]["jobs on 1 of 3"] >= found["jobs"]["jobs on 2 of 3"]


@pytest.mark.parametrize(
    ("command", "arms"), [("knowledge", PIECES), ("ablation", SWITCHED)], ids=["pieces", "switches"]
)
def test_what_pieces_are_worth_on_the_applications(
    command: str, arms: tuple[object, ...], tmp_path: Path
) -> None:
    path = tmp_path / "pieces.json"
    arguments = ["--app", "mixed", "--app", "gpts", "--load", "2", "--json", str(path)]
    result = CliRunner().invoke(app, ["simulate", command, *arguments])
    assert result.exit_code == 0, result.output
    figures = json.loads(path.read_text(encoding="utf-8"))
    assert [f["application"] for f in figures] == ["mixed", "mixed", "gpts", "gpts"]
    assert all(len(f["values"]) == len(arms) for f in figures)
    assert result.stdout.count("| gpts | 6 calls/s |") == 2
    refused = CliRunner().invoke(app, ["simulate", command, "--app", "all", "--profile", "abacus"])
    assert refused.exit_code == 2
    assert "--profile 'abacus'" in refused.stderr
