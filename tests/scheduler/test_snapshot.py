"""Common prefixes of the tasks on one engine."""

from __future__ import annotations

from dataclasses import replace

from parrot_scheduler.config import SchedulerConfig
from parrot_scheduler.events import EngineJoined, TaskSubmitted
from parrot_scheduler.scheduler import Scheduler
from parrot_scheduler.snapshot import shared_prefixes
from parrot_scheduler.task import EngineDescription, Task


def test_shared_prefixes_go_as_far_as_all_tasks_agree() -> None:
    scheduler = Scheduler(SchedulerConfig(admission="open"))
    engine = EngineDescription(
        id="e", model="m", capacity_tokens=10_000, max_batch=16, max_batch_tokens=512,
        block_tokens=16,
    )  # fmt: skip
    scheduler.step(0.0, [EngineJoined(engine)])
    (row,) = scheduler.models["m"].pool.placed
    assert shared_prefixes(scheduler.models["m"], row) == []
    task = Task(
        id=1, model="m", tenant="t", application="a", prompt_tokens=100, max_tokens=20,
        bound_to="e",
    )  # fmt: skip
    prefixes = [(1, 2, 3), (1, 2, 9, 9), (1, 2), (7, 8), (7, 8, 5), (6,), ()]
    scheduler.step(
        1.0,
        [
            TaskSubmitted(replace(task, id=number, prefix=prefix))
            for number, prefix in enumerate(prefixes, 1)
        ],
    )
    assert shared_prefixes(scheduler.models["m"], row) == [(32, 3), (32, 2)]
    assert shared_prefixes(scheduler.models["m"], row, limit=1) == [(32, 3)]
