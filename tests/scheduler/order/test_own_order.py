"""A policy of one's own: the example of the documentation runs as it stands there."""

from __future__ import annotations

import re
import sys
from itertools import count
from pathlib import Path

import pytest
from parrot_scheduler.actions import Place
from parrot_scheduler.config import SchedulerConfig
from parrot_scheduler.events import EngineJoined, TaskFinished, TaskSubmitted
from parrot_scheduler.policies import preset_of
from parrot_scheduler.scheduler import Scheduler
from parrot_scheduler.task import EngineDescription, Task

DOCUMENT = Path(__file__).parents[3] / "docs" / "scheduling.md"
STARVATION_S = 60.0


def example() -> str:
    section = DOCUMENT.read_text(encoding="utf-8").split("## A policy of your own")[1]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found is not None
    return found.group(1)


def placed(order: str, *, submitted_at: float, ended_at: float) -> list[int]:
    """Prompt lengths in the order in which tasks get the one place that there is."""
    config = SchedulerConfig(admission="open", order=order, starvation_s=STARVATION_S)
    scheduler = Scheduler(config)
    engine = EngineDescription("e", "m", 100_000, 1, 2048)
    scheduler.step(0.0, [EngineJoined(engine)])
    numbers = count()
    tasks = {
        number: Task(number, "m", "t", f"a{number}", prompt, 10)
        for number, prompt in zip(numbers, [10, 900, 300, 700, 100, 500, 200], strict=False)
    }
    actions = scheduler.step(submitted_at, [TaskSubmitted(task) for task in tasks.values()])
    prompts = []
    for step in range(len(tasks)):
        (place,) = (action for action in actions if isinstance(action, Place))
        prompts.append(tasks[place.task_id].prompt_tokens)
        actions = scheduler.step(ended_at + step, [TaskFinished(place.task_id, 0, 10)])
    return prompts


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The example as a module that can be imported: its name."""
    (tmp_path / "my_policies.py").write_text(example(), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_policies", raising=False)
    return "my_policies"


def test_the_documented_policy_orders_tasks(own: str) -> None:
    with pytest.raises(ValueError, match="order: no policy is called 'shortest-prompt'"):
        placed("shortest-prompt", submitted_at=0.0, ended_at=1.0)
    first_come = placed("fcfs", submitted_at=0.0, ended_at=1.0)
    assert first_come == [10, 900, 300, 700, 100, 500, 200]
    path = f"{own}:ShortestPrompt"
    assert placed(path, submitted_at=0.0, ended_at=1.0) == [10, 100, 200, 300, 500, 700, 900]
    # Past `starvation_s` every fourth placement goes to the oldest task.
    starved = placed(path, submitted_at=0.0, ended_at=STARVATION_S + 1.0)
    assert starved == [10, 100, 200, 900, 300, 500, 700]


def test_the_documented_policy_places_tasks(own: str) -> None:
    config = preset_of(f"{own}:FewestCalls")
    assert config == SchedulerConfig(place=f"{own}:FewestCalls")
    scheduler = Scheduler(config)
    engines = [EngineDescription(f"e{number}", "m", 100_000, 8, 2048) for number in range(3)]
    tasks = [TaskSubmitted(Task(number, "m", "t", "a", 100, 10)) for number in range(6)]
    actions = scheduler.step(0.0, [*map(EngineJoined, engines), *tasks])
    where = [action.engine_id for action in actions if isinstance(action, Place)]
    assert where == ["e0", "e1", "e2"] * 2
