"""Event logs: every event reads back as it was, and a log replays to the same decisions."""

from __future__ import annotations

import json
import math
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parrot_scheduler import events as event_module
from parrot_scheduler.config import SchedulerConfig
from parrot_scheduler.event_log import (
    read_config,
    read_step,
    replay,
    write_actions,
    write_config,
    write_step,
)
from parrot_scheduler.events import EngineJoined, Event, TaskFinished, TaskSubmitted, Tick
from parrot_scheduler.scheduler import Scheduler
from parrot_scheduler.task import EngineDescription, GroupRef, Objective, StepModel, Task

numbers = st.integers(-(2**63), 2**64)
floats = st.floats(allow_nan=False)
for kind, strategy in {
    Objective: st.builds(Objective, st.sampled_from(["deadline", "tpot"]), st.none() | floats),
    GroupRef: st.builds(
        GroupRef, st.text(), numbers, st.builds(Objective, st.just("ttft"), floats)
    ),
    StepModel: st.builds(StepModel, floats, floats, floats, floats),
    float: floats,
    int: numbers,
}.items():
    st.register_type_strategy(kind, strategy)  # type: ignore[arg-type]

every_event = st.one_of([st.from_type(kind) for kind in typing.get_args(event_module.Event)])


@given(floats, st.lists(every_event, max_size=3))
def test_events_read_back_as_they_were(now: float, events: list[Event]) -> None:
    line = write_step(now, events)
    assert "\n" not in line
    step = read_step(line)
    assert step == (now, tuple(events))
    assert write_step(*step) == line


def test_numbers_that_are_none_read_back_too() -> None:
    assert math.isnan(read_step(write_step(math.nan, [])).now)


def test_a_log_replays_to_the_same_decisions() -> None:
    config = SchedulerConfig(seed=7, max_wait_s=0.1 + 0.2)
    scheduler = Scheduler(config)
    steps: list[tuple[float, list[Event]]] = [
        (0.1, [EngineJoined(EngineDescription("e", "m", 1000, 1, 512, 16))]),
        (0.1 + 0.2, [TaskSubmitted(Task(i, "m", "t", "a", 100, 10)) for i in range(3)]),
        (1 / 3, [TaskFinished(0, 0, 4)]),
        (2 / 3, [Tick()]),
    ]
    log = [write_config(config)]
    decisions = []
    for now, events in steps:
        log.append(write_step(now, events))
        decisions.append(write_actions(scheduler.step(now, events)))
    assert list(replay(log)) == decisions
    assert any("wait_too_long" in line for line in decisions)
    # One digit of one time changes what is decided, or when.
    log[2] = log[2].replace(repr(0.1 + 0.2), "0.3")
    assert list(replay(log)) != decisions


def test_the_configuration_reads_back() -> None:
    config = SchedulerConfig(order="plas", max_hold_s=1 / 3)
    assert read_config(write_config(config)) == config


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "line 2: "),
        ("{}", "line 2: .*`now` and `events`"),
        ('{"now": 1, "events": [{"kind": "Party"}]}', "line 2: .*'Party'"),
        ('{"now": 1, "events": [{"kind": "TaskFinished", "task_id": 1}]}', "line 2: .*cached"),
        ('{"now": 1, "events": [{"kind": "TaskSubmitted"}]}', "line 2: 'task'"),
    ],
)
def test_a_line_that_does_not_belong_is_named(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(replay([write_config(SchedulerConfig()), line]))


def test_unknown_settings_are_named() -> None:
    with pytest.raises(ValueError, match="line 1: unknown settings: colour"):
        list(replay([json.dumps({"config": {"colour": "green"}})]))
