"""The admission queue: of the applications that are held, who is admitted next."""

from __future__ import annotations

from itertools import count

from parrot_scheduler.actions import Action, Place, Release
from parrot_scheduler.config import SchedulerConfig
from parrot_scheduler.events import EngineJoined, TaskFinished, TaskSubmitted, Tick
from parrot_scheduler.scheduler import Scheduler
from parrot_scheduler.task import EngineDescription, StepModel, Task

_ids = count(1)
#: Any context takes long to compute anew, beside decoding.
DEAR = StepModel(weights_s=1e-8, context_token_s=0.0, prefill_token_s=3e-5)


def started(order: str = "fair", capacity: int = 1000) -> Scheduler:
    config = SchedulerConfig(
        admission="working-set",
        order=order,
        keep="none",
        predict_lengths=False,
        max_hold_s=100.0,
        starvation_s=30.0,
        working_set_target=0.8,
    )
    scheduler = Scheduler(config)
    engine = EngineDescription("e", "m", capacity, 64, 512, block_tokens=10, step_model=DEAR)
    scheduler.step(0.0, [EngineJoined(engine)])
    return scheduler


def task(tenant: str, application: str, prompt: int, output: int = 20, priority: int = 0) -> Task:
    """Make a task of an agent: others are likely to follow."""
    return Task(
        next(_ids), "m", tenant, application, prompt, output, priority=priority, returns=0.9
    )


def released(actions: list[Action]) -> list[str]:
    return [action.application for action in actions if isinstance(action, Release)]


def test_a_flood_in_the_queue_does_not_keep_others_out() -> None:
    scheduler = started()
    running = task("flood", "running", 700)
    scheduler.step(0.0, [TaskSubmitted(running)])
    flood = [task("flood", f"flood-{i}", 300) for i in range(100)]
    scheduler.step(1.0, [TaskSubmitted(call) for call in flood])
    scheduler.step(2.0, [TaskSubmitted(task("small", "late", 300))])
    actions = scheduler.step(3.0, [TaskFinished(running.id, 0, 20)])
    assert released(actions) == ["late", "flood-0"]


def test_an_order_that_knows_no_tenants_lets_in_by_arrival() -> None:
    scheduler = started(order="fcfs")
    running = task("flood", "running", 700)
    scheduler.step(0.0, [TaskSubmitted(running)])
    scheduler.step(1.0, [TaskSubmitted(task("flood", f"flood-{i}", 300)) for i in range(3)])
    scheduler.step(2.0, [TaskSubmitted(task("small", "late", 300))])
    actions = scheduler.step(3.0, [TaskFinished(running.id, 0, 20)])
    assert released(actions) == ["flood-0", "flood-1"]


def test_what_has_been_let_in_counts_before_it_is_placed() -> None:
    """Two tenants share what comes free at one moment; it does not all go to one of them."""
    scheduler = started()
    running = task("third", "running", 780)
    scheduler.step(0.0, [TaskSubmitted(running)])
    for tenant in ("a", "b"):
        calls = [task(tenant, f"{tenant}-{i}", 80) for i in range(8)]
        scheduler.step(1.0, [TaskSubmitted(call) for call in calls])
    actions = scheduler.step(2.0, [TaskFinished(running.id, 0, 20)])
    assert sorted(released(actions)) == [f"{t}-{i}" for t in "ab" for i in range(4)]


def test_service_that_changes_while_applications_are_held_changes_whose_turn_it_is() -> None:
    scheduler = started()
    of_a, of_b = task("a", "a-0", 350), task("b", "b-0", 380)
    scheduler.step(0.0, [TaskSubmitted(of_a), TaskSubmitted(of_b)])
    held = [task("a", "a-1", 360), task("b", "b-1", 360)]
    scheduler.step(1.0, [TaskSubmitted(call) for call in held])
    # Neither fits; tenant a, which has had less service, is the first in turn.
    assert released(scheduler.step(2.0, [Tick()])) == []
    # Most of tenant b's prompt was cached: its charge is corrected as its task ends.
    assert released(scheduler.step(3.0, [TaskFinished(of_b.id, 370, 0)])) == ["b-1"]


def test_within_a_tenant_the_least_work_enters_first_and_priority_before_that() -> None:
    scheduler = started()
    running = task("t", "running", 700)
    scheduler.step(0.0, [TaskSubmitted(running)])
    waiting = [
        task("t", "long", 300, 200),
        task("t", "short", 300, 20),
        task("t", "urgent", 300, 200, priority=-1),
    ]
    scheduler.step(1.0, [TaskSubmitted(call) for call in waiting])
    actions = scheduler.step(2.0, [TaskFinished(running.id, 0, 20)])
    assert released(actions) == ["urgent"]
    actions = scheduler.step(3.0, [TaskFinished(waiting[2].id, 0, 200)])
    assert released(actions) == ["short"]


def test_one_that_does_not_fit_is_passed_by_but_not_for_long() -> None:
    scheduler = started()
    first, second = task("t", "first", 330), task("t", "second", 330)
    scheduler.step(0.0, [TaskSubmitted(first), TaskSubmitted(second)])
    # Larger than what comes free, and the first in turn.
    large = task("u", "large", 700)
    scheduler.step(1.0, [TaskSubmitted(large)])
    scheduler.step(2.0, [TaskSubmitted(task("t", f"small-{i}", 320, 40)) for i in range(3)])
    actions = scheduler.step(3.0, [TaskFinished(first.id, 0, 20)])
    assert released(actions) == ["small-0"]
    # Held for `starvation_s`: what comes free is left to it now.
    assert released(scheduler.step(31.0, [TaskFinished(second.id, 0, 20)])) == []
    small = next(a for a in actions if isinstance(a, Place))
    actions = scheduler.step(32.0, [TaskFinished(small.task_id, 0, 40)])
    assert released(actions) == ["large"]
    assert large.id in {a.task_id for a in actions if isinstance(a, Place)}


def test_many_held_tenants_take_turns() -> None:
    """More tenants than are looked at in one decision: all get in, one after the other."""
    scheduler = started()
    running = task("first", "running", 700)
    scheduler.step(0.0, [TaskSubmitted(running)])
    calls = {f"a-{i}": task(f"tenant-{i}", f"a-{i}", 700) for i in range(40)}
    more = [task("tenant-0", f"more-{i}", 700) for i in range(40)]
    scheduler.step(1.0, [TaskSubmitted(call) for call in (*more, *calls.values())])
    names = {call.id: call.application for call in (*more, *calls.values())}
    placed, ended = [], running.id
    for step in range(40):
        actions = scheduler.step(2.0 + step / 10, [TaskFinished(ended, 0, 20)])
        (place,) = (a for a in actions if isinstance(a, Place))
        ended = place.task_id
        placed.append(names[ended])
    assert sum(name.startswith("more") for name in placed) <= 1
