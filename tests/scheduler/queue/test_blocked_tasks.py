"""Tasks that found no place are looked at again when what they wait for comes, and not before."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from harness.engine_pools import BLOCK, CONFIG, Engines, chain
from hypothesis import given
from hypothesis import strategies as st
from parrot_scheduler.actions import Place
from parrot_scheduler.config import SchedulerConfig
from parrot_scheduler.engines.pool import EnginePool
from parrot_scheduler.events import EngineJoined, TaskFinished, TaskProgress, TaskSubmitted
from parrot_scheduler.placement.parrot import Parrot
from parrot_scheduler.placement.prediction import predict_row
from parrot_scheduler.policy import EngineChoice, EngineWait, PlacementPolicy, Policies
from parrot_scheduler.queue.blocked_tasks import BlockedTasks
from parrot_scheduler.scheduler import Scheduler, policies_of
from parrot_scheduler.task import LATENCY, THROUGHPUT, EngineDescription, Objective, StepModel, Task
from parrot_scheduler.task_state import Application, TaskState

LONG = 400


def wait(rows: int, *, until: float = 1e9, total_cost_s: float = 0.0) -> EngineWait:
    return EngineWait(rows, until, total_cost_s, new_tokens=1000.0, tokens=1100.0, steps=100.0)


def awaited(blocked: BlockedTasks, *rows: int, now: float = 0.0) -> list[TaskState]:
    return list(blocked.awaited(sum(1 << row for row in rows), now))


def test_a_task_is_woken_by_its_engines_and_by_its_time() -> None:
    engines = Engines("parrot", 8, max_batch=4)
    for row in engines.rows:
        engines.load(row, 2)
    blocked, state = BlockedTasks(engines.pool), engines.state(1000, 100)
    blocked.add(state, wait(0b110, until=5.0))
    assert awaited(blocked, 3) == []
    assert awaited(blocked, 2) == [state]
    assert awaited(blocked, 3, now=5.0) == [state]
    assert awaited(blocked, now=5.0) == []
    blocked.discard(state)
    assert awaited(blocked, 2) == []
    assert len(blocked) == 0


def test_a_task_waits_for_one_thing_at_a_time() -> None:
    engines = Engines("parrot", 2, max_batch=4)
    for row in engines.rows:
        engines.load(row, 2)
    blocked, state = BlockedTasks(engines.pool), engines.state(1000, 100)
    blocked.add(state, wait(0b10))
    blocked.add(state, None)
    assert (len(blocked), blocked.num_without_room) == (1, 1)
    assert awaited(blocked, 1) == []
    blocked.add(state, wait(0b10))
    assert (len(blocked), blocked.num_without_room) == (1, 0)
    assert awaited(blocked, 1) == [state]


def test_a_task_without_room_is_woken_by_as_much_as_it_needs_at_least() -> None:
    engines = Engines("parrot", 2, capacity=2000, max_batch=4)
    running = engines.load(0, 2, prompt=600, output=200)
    engines.load(1, 1, prompt=100, output=100)
    blocked = BlockedTasks(engines.pool)
    large, shared = engines.state(1100, 100), engines.state(1100, 100, chain(1, 60))
    for state in (large, shared):
        blocked.add(state, None)
    # 400 tokens are free on the first engine, 1,200 at least are needed, or 240 with all shared.
    assert blocked.fitting(0b01, -1.0) == [shared]
    engines.end(running[0])
    assert blocked.fitting(0b01, -1.0) == [large, shared]
    assert blocked.fitting(0, -1.0) == []
    # Those that starve are always looked at, so that an engine is drained for them.
    engines.load(0, 1, prompt=900, output=200)
    assert blocked.fitting(0b01, 0.0) == [large, shared]


@given(
    st.integers(100, 20_000),
    st.integers(1, 2000),
    st.integers(0, 20),
    st.floats(0.0, 1e5),
    st.sampled_from([0.999, 1.001]),
)
def test_room_elsewhere_is_good_enough_by_the_prediction_that_placement_makes(
    prompt: int, output: int, running: int, queued: float, factor: float
) -> None:
    engines = Engines("parrot", 2, capacity=10_000_000)
    pool = engines.pool
    pool.table.set_step_model(1, StepModel(5e-3, 4e-8, 3e-5, 2e-3))
    engines.load(1, running + 1)
    pool.table.scalars.pending_prefill[1] = queued
    state = engines.state(prompt, output)
    total_cost_s = predict_row(state, float(prompt), pool.table, 1).total_cost_s
    blocked = BlockedTasks(pool)
    blocked.add(
        state,
        EngineWait(
            1, 1e9, total_cost_s * factor, float(prompt), float(prompt + output), float(output)
        ),
    )
    assert bool(awaited(blocked, 1)) == (factor > 1.0)


def test_no_more_than_a_few_wait_for_holders_and_others_take_the_room() -> None:
    engines = Engines("parrot", 2, max_batch=32)
    engines.pool.prefixes.stored(0, chain(1, LONG))
    engines.load(0, 32)
    engines.load(1, 20)
    prompts = [
        engines.state(LONG * BLOCK + 50, 50, chain(1, LONG))
        for _ in range(CONFIG.max_passed_over + 1)
    ]
    answers = [engines.ask(state) for state in prompts]
    assert all(isinstance(answer, EngineWait) for answer in answers[:-1])
    assert isinstance(answers[-1], EngineChoice)
    assert answers[-1].row == 1


class Counting(PlacementPolicy):
    """Parrot's placement, which counts what it is asked."""

    name = "counting"
    late_binding = True
    asked = 0

    def __init__(self, config: SchedulerConfig) -> None:
        self._parrot = Parrot(config)

    def place(
        self, state: TaskState, application: Application, pool: EnginePool, now: float
    ) -> EngineChoice | EngineWait | None:
        """See `Parrot`."""
        Counting.asked += 1
        return self._parrot.place(state, application, pool, now)

    def placed(self, state: TaskState, choice: EngineChoice, pool: EnginePool, now: float) -> None:
        """See `Parrot`."""
        self._parrot.placed(state, choice, pool, now)

    def ended(self, state: TaskState, pool: EnginePool, now: float) -> None:
        """See `Parrot`."""
        self._parrot.ended(state, pool, now)


def test_what_waits_for_one_engine_is_not_asked_for_by_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ends on other engines, where the prompt would have to be computed, cost no search."""
    monkeypatch.setattr(Counting, "asked", 0)
    config = SchedulerConfig(admission="open", order="fcfs", predict_lengths=False)
    policies = policies_of(config)
    scheduler = Scheduler(
        config,
        policies=Policies(
            policies.admission,
            policies.order,
            lambda config, rng: Counting(config),
            policies.retention,
        ),
    )
    names = [f"e{i}" for i in range(3)]
    scheduler.step(
        0.0, [EngineJoined(EngineDescription(name, "m", 10**6, 8, 2048, BLOCK)) for name in names]
    )
    rng = random.Random(0)

    def task(number: int, output: int, prefix: tuple[int, ...], engine: str | None) -> Task:
        prompt = len(prefix) * BLOCK + 50
        return Task(number, "m", "t", f"a{number}", prompt, output, prefix, bound_to=engine)

    shared = chain(1, 2 * LONG)
    running = {name: [10 * i + j for j in range(8)] for i, name in enumerate(names)}
    for name, numbers in running.items():
        for number in numbers:
            prefix = shared if name == "e0" else ()
            scheduler.step(0.0, [TaskSubmitted(task(number, 2000, prefix, name))])
            scheduler.step(0.0, [TaskProgress(number, len(prefix) * BLOCK + 50, 0, 1)])
    assert scheduler.num_tasks == 24
    waiting = task(100, 50, shared, None)
    scheduler.step(0.001, [TaskSubmitted(waiting)])
    scheduler.step(0.002, [TaskFinished(running["e1"].pop(), 0, 2000)])
    assert Counting.asked == 1
    for step in range(6):
        name = rng.choice(["e1", "e2"])
        scheduler.step(0.003 + step / 1000, [TaskProgress(running[name][0], 50, 0, 2 + step)])
        scheduler.step(0.003 + step / 1000, [TaskFinished(running[name].pop(), 0, 2000)])
    asked = Counting.asked
    actions = scheduler.step(0.01, [TaskFinished(running["e0"].pop(), 0, 2000)])
    assert asked <= 2
    assert [action.engine_id for action in actions if hasattr(action, "engine_id")] == ["e0"]


class Patient(PlacementPolicy):
    """The first engine; a task of the application `patient` waits for it once."""

    name = "patient"
    late_binding = True

    def __init__(self) -> None:
        self._has_waited = False

    def place(
        self, state: TaskState, application: Application, pool: EnginePool, now: float
    ) -> EngineChoice | EngineWait | None:
        if application.id == "patient" and not self._has_waited:
            self._has_waited = True
            return wait(1)
        return EngineChoice(0, "load", 0, 1, 0.0)


@pytest.mark.parametrize(("objective", "order"), [(THROUGHPUT, [2, 3]), (LATENCY, [3, 2])])
def test_what_returns_goes_before_new_tasks_but_not_before_a_latency_task(
    objective: Objective, order: list[int]
) -> None:
    config = SchedulerConfig(admission="open", order="fcfs", predict_lengths=False)
    policies = replace(policies_of(config), placement=lambda config, rng: Patient())
    scheduler = Scheduler(config, policies=policies)

    def task(number: int, application: str, **more: Any) -> TaskSubmitted:
        return TaskSubmitted(Task(number, "m", "t", application, 100, 20, **more))

    engine = EngineDescription("e", "m", 10**6, 8, 2048, BLOCK)
    scheduler.step(0.0, [EngineJoined(engine), task(1, "running")])
    waiting = scheduler.step(1.0, [task(2, "patient")])
    assert not [action for action in waiting if isinstance(action, Place)]
    # The running task has its prompt: there is less to do on the engine that task 2 waits for.
    events = [TaskProgress(1, 100, 0, 1), task(3, "new", objective=objective)]
    actions = scheduler.step(2.0, events)
    assert [action.task_id for action in actions if isinstance(action, Place)] == order
