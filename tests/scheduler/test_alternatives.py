"""The engines that an explanation compares with the chosen one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from parrot_scheduler.actions import Alternative, Place
from parrot_scheduler.config import SchedulerConfig
from parrot_scheduler.events import BlocksStored, EngineJoined, TaskSubmitted
from parrot_scheduler.scheduler import Scheduler
from parrot_scheduler.task import EngineDescription, Task

CONFIG = SchedulerConfig(admission="open", keep="none", predict_lengths=False, explain=True)
#: The prompt of every call, in blocks.
PREFIX = tuple(range(50))
CALL = Task(0, "m", "t", "a", 500, 20, prefix=PREFIX)


def explained(engines: int, loads: dict[int, int], call: Task = CALL) -> list[Alternative]:
    """Return what a call is told, after others of 100 tokens on some engines."""
    scheduler = Scheduler(CONFIG)
    for number in range(engines):
        description = EngineDescription(f"e{number}", "m", 1000, 8, 512, 10, reports_blocks=True)
        scheduler.step(0.0, [EngineJoined(description)])
    numbers = iter(range(1, 100))
    for row, count in loads.items():
        for number, _ in zip(numbers, range(count), strict=False):
            other = Task(number, "m", "t", f"o{number}", 80, 20, bound_to=f"e{row}")
            scheduler.step(0.0, [TaskSubmitted(other)])
    scheduler.step(0.0, [BlocksStored("e1", PREFIX[:40])])
    (place,) = (a for a in scheduler.step(0.0, [TaskSubmitted(call)]) if isinstance(a, Place))
    assert place.reasons.alternatives[0].engine_id == place.engine_id
    return list(place.reasons.alternatives)


@pytest.mark.parametrize("engines", [4, 20])
def test_each_engine_is_told_once_the_soonest_first(engines: int) -> None:
    chosen, *others = explained(engines, {0: 4, 1: 1, 2: 2})
    assert (chosen.engine_id, chosen.cached_tokens) == ("e1", 400)
    assert others
    names = [each.engine_id for each in others]
    assert "e1" not in names
    assert len(set(names)) == len(names) <= 3
    assert [each.finish_s for each in others] == sorted(each.finish_s for each in others)


@pytest.mark.parametrize(("prompt", "has_room"), [(480, True), (481, False)])
def test_room_is_told_to_the_last_token(prompt: int, has_room: bool) -> None:
    """Five calls of 100 tokens leave 500 of 1,000 for a prompt and its 20."""
    call = replace(CALL, prompt_tokens=prompt, prefix=PREFIX[:48])
    _, *others = explained(2, {0: 5}, call)
    assert [(each.engine_id, each.has_room) for each in others] == [("e0", has_room)]
