"""Expected cost of tasks and applications, from those that have ended."""

from __future__ import annotations

import pytest
from parrot_scheduler.order.demand import DemandPredictor, work_of
from parrot_scheduler.task import THROUGHPUT, Task
from parrot_scheduler.task_state import Application, TaskState


def application(*templates: str, tenant: str = "t") -> Application:
    return Application("a", tenant, 0.0, templates=[*templates])


def state(output: int, *, prompt: int = 100, sequences: int = 1, successors: int = 0) -> TaskState:
    task = Task(1, "m", "t", "a", prompt, output, num_sequences=sequences)
    return TaskState(task, 1, 0.0, output, THROUGHPUT, (), 0, successors)


def test_the_work_of_a_kind_is_the_mean_of_the_first_and_then_follows_the_newest() -> None:
    demand = DemandPredictor(2)
    kind = application("x", "later")
    told = []
    for work in (30.0, 0.0, -5.0, 60.0, 90.0, *(100.0,) * 40):
        demand.ended(kind, work)
        told.append(demand.work(application("x", "other")))
    # Two are too few; what took nothing is not counted.
    assert told[:5] == [None, None, None, None, pytest.approx(60.0)]
    assert told[5:] == sorted(value for value in told[5:] if value is not None)
    assert told[-1] == pytest.approx(100.0, abs=1.0)
    demand.ended(kind, 0.1)
    last = demand.work(kind)
    assert last is not None
    assert 80.0 < last < 99.0
    # A kind is one of a tenant and of the first template; those seen longest ago are forgotten.
    others = (application(), application("later"), application("x", tenant="u"))
    assert [demand.work(each) for each in others] == [None, None, None]
    demand.ended(application(), 5.0)
    demand.ended(application("y"), 5.0)
    assert demand.work(kind) == last
    demand.ended(kind, last)
    demand.ended(application("z"), 5.0)
    assert demand.work(kind) == pytest.approx(last)
    for name in ("y", "z"):
        demand.ended(application(name), 5.0)
    assert demand.work(kind) is None


def test_a_path_takes_as_long_as_its_tokens_have_taken() -> None:
    demand = DemandPredictor(2)
    assert demand.path_s(state(50)) == pytest.approx(1.0)
    assert demand.path_s(state(50, successors=2)) == pytest.approx(3.0)
    assert demand.path_s(state(50, sequences=5, successors=2)) == pytest.approx(0.6)
    assert demand.path_s(state(1)) == demand.path_s(state(0)) == pytest.approx(0.02)
    for generated, placed_at in ((0, 0.0), (10, 100.0), (10, 101.0)):
        ended = state(50)
        ended.generated_tokens, ended.placed_at = generated, placed_at
        demand.observe(ended, 100.0)
    # None of these tells anything: nothing was generated, or no time has passed.
    assert demand.path_s(state(50)) == pytest.approx(1.0)
    for _ in range(500):
        ended = state(60, sequences=3)
        ended.generated_tokens, ended.placed_at = 60, 80.0
        demand.observe(ended, 100.0)
    assert demand.path_s(state(50)) == pytest.approx(50.0, rel=0.01)


def test_work_is_memory_over_time() -> None:
    assert work_of(state(10), 10) == 100 * 10 + 50
    assert work_of(state(10, sequences=2), 10) == 2 * (100 * 5 + 12.5)
    assert work_of(state(10, prompt=0), 0) == 0
