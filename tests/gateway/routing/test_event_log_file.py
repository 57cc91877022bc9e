"""The recording of the scheduler's decisions: whole steps, up to a limit."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from parrot_scheduler.config import SchedulerConfig
from parrot_scheduler.event_log import replay
from parrot_scheduler.events import Tick

from parrot_gateway.routing.event_log_file import EventLogFile

LIMIT = 5_000


def test_it_ends_at_its_limit_with_a_whole_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "events.jsonl"
    event_log = EventLogFile(path, SchedulerConfig(), LIMIT)
    with caplog.at_level(logging.WARNING):
        for number in range(200):
            event_log.record(float(number), [Tick()], [])
    event_log.close()
    written = path.read_bytes()
    assert LIMIT - 200 < len(written) <= LIMIT
    steps = list(replay(written.decode().splitlines()))
    assert 10 < len(steps) < 200
    assert [record.message for record in caplog.records] == [
        f"the recording {path} has reached its limit and ends"
    ]
