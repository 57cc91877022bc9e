"""`parrot-gateway replay`, as a user runs it on a recorded log."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.own_policies import TURNS
from parrot_scheduler.config import SchedulerConfig
from parrot_scheduler.event_log import write_actions, write_config, write_step
from parrot_scheduler.events import EngineJoined, TaskSubmitted, Tick
from parrot_scheduler.scheduler import Scheduler
from parrot_scheduler.task import EngineDescription, Task
from typer.testing import CliRunner, Result

from parrot_gateway.cli.main import app


def replay(log: Path) -> Result:
    return CliRunner().invoke(app, ["replay", str(log)])


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log in which the second step places three tasks."""
    config = SchedulerConfig()
    scheduler = Scheduler(config)
    engine = EngineDescription(
        "engine-0", "m", capacity_tokens=4096, max_batch=8, max_batch_tokens=512
    )
    tasks = [TaskSubmitted(Task(number, "m", "t", "a", 100, 10)) for number in range(3)]
    lines = [write_config(config)]
    for now, events in ((0.0, [EngineJoined(engine)]), (0.1, tasks), (0.2, [Tick()])):
        lines += [write_step(now, events), write_actions(scheduler.step(now, events))]
    path = tmp_path / "events.log"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_same_decisions(log: Path) -> None:
    result = replay(log)
    assert result.exit_code == 0, result.output
    assert result.stdout == "3 of 3 steps: the same decisions, byte for byte\n"


def test_another_decision_is_shown(log: Path) -> None:
    assert '"engine_id":"engine-0"' in log.read_text().splitlines()[4]
    log.write_text(log.read_text().replace('"kind":"Place"', '"kind":"Reject"', 1))
    result = replay(log)
    assert result.exit_code == 1
    assert "step 2 is decided otherwise" in result.stdout
    assert "recorded" in result.stdout
    assert "replayed" in result.stdout


def test_a_log_without_decisions_is_refused(log: Path) -> None:
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(line for line in lines if not line.startswith('{"actions"')))
    result = replay(log)
    assert result.exit_code == 2
    assert "3 steps, but no decisions to compare" in result.stderr


def test_a_broken_line_is_named(log: Path) -> None:
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:3]) + "what?\n")
    result = replay(log)
    assert result.exit_code == 2
    assert f"{log}: line 4" in result.stderr


def test_a_log_alone_loads_no_policy(log: Path) -> None:
    log.write_text(log.read_text().replace('"place":"parrot"', f'"place":"{TURNS}"'))
    result = replay(log)
    assert result.exit_code == 2
    assert f"line 1: it was decided by {TURNS}; name that with --policy" in result.stderr
    result = CliRunner().invoke(app, ["replay", str(log), "--policy", TURNS])
    assert "step 2 is decided otherwise" in result.stdout


def test_a_missing_file_is_named() -> None:
    result = replay(Path("/nowhere/at/all"))
    assert result.exit_code == 2
    assert "/nowhere/at/all" in result.stderr
