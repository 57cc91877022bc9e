"""The scheduler's reaction to each thing that can happen to a task or an engine."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from itertools import count

import pytest
from harness.own_policies import TURNS
from parrot_scheduler.actions import Action, Cancel, Forget, Place, Reject, WakeAt
from parrot_scheduler.config import SchedulerConfig
from parrot_scheduler.events import (
    ApplicationFinished,
    BlocksEvicted,
    BlocksStored,
    EngineDraining,
    EngineJoined,
    EngineLeft,
    EngineReport,
    EngineResumed,
    Event,
    TaskCancelled,
    TaskFinished,
    TaskProgress,
    TaskSubmitted,
    TaskUpdated,
    Tick,
)
from parrot_scheduler.policies import preset_of
from parrot_scheduler.scheduler import Scheduler
from parrot_scheduler.task import EngineDescription, GroupRef, Objective, StepModel, Task

CONFIG = SchedulerConfig(
    admission="open",
    order="fcfs",
    place="parrot",
    keep="none",
    predict_lengths=False,
    max_wait_s=100.0,
    no_engine_wait_s=30.0,
    starvation_s=10.0,
    max_queued=50,
)
_ids = count(1)


def task(**changes: object) -> Task:
    """A task of 100 prompt and 20 output tokens."""
    number = next(_ids)
    fields = {
        "id": number,
        "model": "m",
        "tenant": "t",
        "application": f"a{number}",
        "prompt_tokens": 100,
        "max_tokens": 20,
    }
    return Task(**(fields | changes))  # type: ignore[arg-type]


def engine(engine_id: str = "e", **changes: object) -> EngineDescription:
    """An engine that holds eight such tasks, and runs four at once."""
    fields = {
        "id": engine_id,
        "model": "m",
        "capacity_tokens": 1000,
        "max_batch": 4,
        "max_batch_tokens": 512,
        "block_tokens": 16,
    }
    return EngineDescription(**(fields | changes))  # type: ignore[arg-type]


def placed(actions: list[Action]) -> list[int]:
    return [action.task_id for action in actions if isinstance(action, Place)]


def rejected(actions: list[Action]) -> list[tuple[int, str]]:
    return [(action.task_id, action.code) for action in actions if isinstance(action, Reject)]


def woken(actions: list[Action]) -> float | None:
    times = [action.time for action in actions if isinstance(action, WakeAt)]
    return times[-1] if times else None


def started(*engines: EngineDescription, **changes: object) -> Scheduler:
    scheduler = Scheduler(replace(CONFIG, **changes))  # type: ignore[arg-type]
    scheduler.step(0.0, [EngineJoined(each) for each in engines])
    return scheduler


# Bounds


def test_memory_is_needed_by_what_is_placed_on_engines() -> None:
    scheduler = Scheduler(CONFIG)
    scheduler.step(0.0, [EngineJoined(engine()), EngineJoined(engine("f"))])
    pool = scheduler.models["m"].pool
    assert pool.memory_needed == 0
    first = task()
    scheduler.step(1.0, [TaskSubmitted(each) for each in (first, task(), task())])
    assert 0.15 <= pool.memory_needed <= 0.2, "3 tasks of 100 to 120 tokens; room for 2,000"
    scheduler.step(2.0, [EngineLeft("f"), EngineLeft("e")])
    assert pool.memory_needed == 0


def test_without_an_engine_a_task_is_refused_after_the_bound() -> None:
    scheduler = started()
    only = task()
    assert woken(scheduler.step(1.0, [TaskSubmitted(only)])) == 31.0
    assert rejected(scheduler.step(30.9, [Tick()])) == []
    assert rejected(scheduler.step(31.0, [Tick()])) == [(only.id, "no_engine")]
    assert scheduler.num_tasks == 0
    assert scheduler.models == {}


def test_the_bound_counts_from_when_the_last_engine_went() -> None:
    scheduler = started(engine(max_batch=1))
    first, second = task(), task()
    scheduler.step(0.0, [TaskSubmitted(first), TaskSubmitted(second)])
    scheduler.step(50.0, [EngineLeft("e")])
    assert rejected(scheduler.step(79.0, [Tick()])) == []
    assert rejected(scheduler.step(80.0, [Tick()])) == [(second.id, "no_engine")]


def test_a_task_that_waited_too_long_is_refused() -> None:
    scheduler = started(engine(max_batch=1))
    stuck, second = task(), task()
    scheduler.step(0.0, [TaskSubmitted(stuck), TaskSubmitted(second)])
    # The first one never finishes: nothing waits for it beyond the bound.
    assert rejected(scheduler.step(99.0, [Tick()])) == []
    assert rejected(scheduler.step(100.0, [Tick()])) == [(second.id, "wait_too_long")]
    assert scheduler.num_tasks == 1


def test_more_tasks_than_may_wait_are_refused() -> None:
    scheduler = started(max_queued=2)
    tasks = [task() for _ in range(3)]
    actions = scheduler.step(0.0, [TaskSubmitted(each) for each in tasks])
    assert rejected(actions) == [(tasks[2].id, "queue_full")]


def test_what_no_engine_can_hold_is_refused_at_once_or_when_the_engine_comes() -> None:
    large = task(prompt_tokens=1000)
    scheduler = started(engine(), engine("f", capacity_tokens=900))
    assert rejected(scheduler.step(0.0, [TaskSubmitted(large)])) == [(large.id, "too_large")]
    scheduler = started()
    assert rejected(scheduler.step(0.0, [TaskSubmitted(large)])) == []
    assert rejected(scheduler.step(1.0, [EngineJoined(engine())])) == [(large.id, "too_large")]


def test_when_the_largest_engine_leaves_what_only_it_could_hold_is_refused() -> None:
    scheduler = started(engine(max_batch=1), engine("f", capacity_tokens=300))
    blocker, large = task(prompt_tokens=800), task(prompt_tokens=900)
    assert placed(scheduler.step(0.0, [TaskSubmitted(blocker), TaskSubmitted(large)])) == [
        blocker.id
    ]
    assert rejected(scheduler.step(1.0, [EngineLeft("e")])) == [(large.id, "too_large")]


def test_an_unbounded_output_counts_as_what_is_left_of_the_engine() -> None:
    scheduler = started(engine())
    endless = task(max_tokens=10**9)
    assert placed(scheduler.step(0.0, [TaskSubmitted(endless)])) == [endless.id]
    assert scheduler.snapshot()["models"]["m"]["engines"][0]["working_set_tokens"] == 1000


def test_more_sequences_than_a_batch_run_on_an_idle_engine() -> None:
    scheduler = started(engine())
    many = task(num_sequences=9, max_tokens=10)
    assert placed(scheduler.step(0.0, [TaskSubmitted(many)])) == [many.id]


# Engines


def test_tasks_end_with_their_engine_and_come_again_under_new_ids() -> None:
    scheduler = started(engine())
    lost = task()
    scheduler.step(0.0, [TaskSubmitted(lost)])
    scheduler.step(1.0, [EngineLeft("e")])
    assert scheduler.num_tasks == 0
    scheduler.step(2.0, [TaskFinished(lost.id, 0, 5)])
    assert scheduler.ignored == {"TaskFinished": 1}
    again = replace(lost, id=next(_ids))
    actions = scheduler.step(3.0, [EngineJoined(engine()), TaskSubmitted(again)])
    assert placed(actions) == [again.id]


def test_tasks_bound_to_an_engine_that_leaves_or_drains_are_refused() -> None:
    for gone in (EngineLeft("e"), EngineDraining("e"), EngineJoined(engine())):
        scheduler = started(engine(max_batch=1), engine("f"))
        first, waiting = task(bound_to="e"), task(bound_to="e")
        actions = scheduler.step(0.0, [TaskSubmitted(first), TaskSubmitted(waiting)])
        assert placed(actions) == [first.id]
        assert rejected(scheduler.step(1.0, [gone])) == [(waiting.id, "engine_left")]
    nowhere = task(bound_to="x")
    assert rejected(scheduler.step(2.0, [TaskSubmitted(nowhere)])) == [(nowhere.id, "engine_left")]
    scheduler.step(3.0, [EngineDraining("e")])
    late = task(bound_to="e")
    assert rejected(scheduler.step(4.0, [TaskSubmitted(late)])) == [(late.id, "engine_left")]


def test_new_tasks_are_tried_although_a_search_has_ended_before_them() -> None:
    scheduler = started(engine(), order="fair", max_passed_over=2)
    running = task(tenant="a", prompt_tokens=500)
    large = [task(tenant="a", prompt_tokens=800, bound_to="e") for _ in range(4)]
    scheduler.step(0.0, [TaskSubmitted(running)])
    assert placed(scheduler.step(1.0, [TaskSubmitted(each) for each in large])) == []
    # Of a tenant that had nothing so far: they go first.
    small = [task(tenant="b"), task(tenant="b")]
    actions = scheduler.step(2.0, [TaskSubmitted(each) for each in small])
    assert placed(actions) == [each.id for each in small]


def test_a_draining_engine_keeps_what_it_has_and_gets_nothing_new() -> None:
    scheduler = started(engine())
    first, second = task(), task()
    scheduler.step(0.0, [TaskSubmitted(first)])
    assert placed(scheduler.step(1.0, [EngineDraining("e"), TaskSubmitted(second)])) == []
    scheduler.step(2.0, [TaskProgress(first.id, 100, 0, 3), TaskFinished(first.id, 0, 3)])
    assert scheduler.ignored == {}
    assert scheduler.num_tasks == 1


def test_what_waits_for_a_drained_engine_is_placed_once_it_takes_work_again() -> None:
    scheduler = started(engine(), engine("f"))
    scheduler.step(0.0, [EngineDraining("e"), EngineDraining("f")])
    waiting = task()
    assert placed(scheduler.step(1.0, [TaskSubmitted(waiting)])) == []
    assert placed(scheduler.step(2.0, [EngineResumed("f")])) == [waiting.id]
    (place,) = [
        action.engine_id
        for action in scheduler.step(3.0, [TaskSubmitted(task())])
        if isinstance(action, Place)
    ]
    assert place == "f"
    scheduler.step(4.0, [EngineResumed("f"), EngineResumed("x")])
    assert scheduler.ignored == {"EngineResumed": 2}


def test_what_waits_for_drained_engines_is_told_so() -> None:
    scheduler = started(engine())
    scheduler.step(0.0, [EngineDraining("e"), TaskSubmitted(task())])
    (refusal,) = scheduler.step(CONFIG.no_engine_wait_s, [Tick()])
    assert isinstance(refusal, Reject)
    assert (refusal.code, "after its drain" in refusal.message) == ("no_engine", True)


def test_nonsense_reports_are_counted_and_change_nothing() -> None:
    scheduler = started(engine())
    bad = float("nan")
    reports: list[Event] = [
        EngineReport("e", -1, 0, 0),
        EngineReport("e", 0, 0, bad),  # type: ignore[arg-type]
        EngineReport("e", 0, 0, 0, StepModel(bad, 0, 0)),
        EngineReport("e", 0, 0, 0, StepModel(0, 0, 0)),
        EngineReport("nobody", 0, 0, 0),
    ]
    before = scheduler.models["m"].pool.table.weights_s.copy()
    scheduler.step(1.0, reports)
    assert scheduler.ignored == {"EngineReport": 5}
    assert (scheduler.models["m"].pool.table.weights_s == before).all()
    scheduler.step(2.0, [EngineReport("e", 1, 2, 3, StepModel(0.5, 0, 0))])
    assert scheduler.snapshot()["models"]["m"]["engines"][0]["reported"]["waiting"] == 2
    assert scheduler.models["m"].pool.table.weights_s[0] == 0.5


# Events that come late, twice or out of order


def test_the_clock_never_goes_backwards() -> None:
    scheduler = started(engine())
    for now, expected in ((5.0, 5.0), (3.0, 5.0), (float("nan"), 5.0), (float("inf"), 5.0)):
        scheduler.step(now, [Tick()])
        assert scheduler.now == expected
    assert scheduler.ignored == {"clock": 3}


def test_a_task_submitted_twice_runs_once() -> None:
    scheduler = started(engine())
    only = task()
    actions = scheduler.step(0.0, [TaskSubmitted(only), TaskSubmitted(only)])
    assert placed(actions) == [only.id]
    assert scheduler.ignored == {"TaskSubmitted": 1}
    other = task(id=only.id)
    assert rejected(scheduler.step(1.0, [TaskSubmitted(other)])) == [(only.id, "duplicate")]
    assert scheduler.num_tasks == 1


def test_progress_only_grows() -> None:
    scheduler = started(engine())
    only = task()
    scheduler.step(0.0, [TaskSubmitted(only)])
    scheduler.step(1.0, [TaskProgress(only.id, 80, 16, 0)])
    scheduler.step(1.0, [TaskProgress(only.id, 40, 16, 0)])
    scheduler.step(1.0, [TaskProgress(only.id, 80, 0, 0)])
    state = scheduler.snapshot()["models"]["m"]["engines"][0]
    assert state["pending_prefill_tokens"] == 20
    assert scheduler.ignored == {"TaskProgress": 2}


def test_all_sequences_of_a_task_may_be_as_long_as_one() -> None:
    scheduler = started(engine(), order="fair")
    several = task(num_sequences=3)
    scheduler.step(0.0, [TaskSubmitted(several)])
    scheduler.step(1.0, [TaskProgress(several.id, 100, 0, 59)])
    scheduler.step(2.0, [TaskFinished(several.id, 0, 60)])
    assert scheduler.ignored == {}
    # Uncached prompt tokens, and twice the output tokens.
    assert scheduler.snapshot()["models"]["m"]["tenants"] == {"t": 100 + 2 * 60}


def test_news_of_unknown_tasks_are_counted() -> None:
    scheduler = started(engine())
    waiting = task(model="other")
    scheduler.step(0.0, [TaskSubmitted(waiting)])
    scheduler.step(
        1.0,
        [
            TaskFinished(999, 0, 0),
            TaskFinished(waiting.id, 0, 0),
            TaskProgress(999, 0, 0, 0),
            TaskCancelled(999),
            TaskUpdated(999, priority=1),
            ApplicationFinished("nobody"),
        ],
    )
    assert scheduler.ignored == {
        "TaskFinished": 2,
        "TaskProgress": 1,
        "TaskCancelled": 1,
        "TaskUpdated": 1,
        "ApplicationFinished": 1,
    }


def test_a_cancelled_task_leaves_from_wherever_it_is() -> None:
    scheduler = started(engine(max_batch=1))
    running, waiting = task(), task()
    scheduler.step(0.0, [TaskSubmitted(running), TaskSubmitted(waiting)])
    assert placed(scheduler.step(1.0, [TaskCancelled(waiting.id)])) == []
    third = task()
    actions = scheduler.step(2.0, [TaskCancelled(running.id), TaskSubmitted(third)])
    assert placed(actions) == [third.id]
    assert scheduler.num_tasks == 1


# Fills, groups, large tasks


def test_fills_run_when_nothing_else_wants_to_and_make_room() -> None:
    scheduler = started(engine(max_batch=2))
    fill, call = task(max_tokens=0), task()
    actions = scheduler.step(0.0, [TaskSubmitted(fill), TaskSubmitted(call)])
    # The call first; the Fill waits until its prompt is filled.
    assert placed(actions) == [call.id]
    assert placed(scheduler.step(1.0, [TaskProgress(call.id, 100, 0, 1)])) == []
    assert placed(scheduler.step(2.0, [TaskFinished(call.id, 0, 5)])) == [fill.id]
    calls = [task(), task()]
    actions = scheduler.step(3.0, [TaskSubmitted(each) for each in calls])
    assert placed(actions) == [calls[0].id]
    assert [a.task_id for a in actions if isinstance(a, Cancel)] == [fill.id]
    # It is told once only, and its end makes the room.
    actions = scheduler.step(4.0, [Tick()])
    assert not [a for a in actions if isinstance(a, Cancel)]
    assert placed(scheduler.step(5.0, [TaskCancelled(fill.id)])) == [calls[1].id]


def test_members_of_a_group_are_placed_after_each_other() -> None:
    scheduler = started(engine(max_batch=3), group_tasks=True)
    group = (GroupRef("g", 3),)
    first, other, second, third = task(groups=group), task(), task(groups=group), task(groups=group)
    actions = scheduler.step(0.0, [TaskSubmitted(each) for each in (first, other, second, third)])
    assert placed(actions) == [first.id, second.id, third.id]


def test_a_member_that_was_cancelled_is_not_placed_with_its_group() -> None:
    scheduler = started(engine(), group_tasks=True)
    running = task(prompt_tokens=980)
    group = (GroupRef("g", 3),)
    members = [task(groups=group) for _ in range(3)]
    scheduler.step(0.0, [TaskSubmitted(each) for each in (running, *members)])
    scheduler.step(1.0, [TaskCancelled(members[1].id)])
    actions = scheduler.step(2.0, [TaskFinished(running.id, 0, 20)])
    assert placed(actions) == [members[0].id, members[2].id]


def test_a_group_larger_than_an_engine_is_split_and_all_of_it_runs() -> None:
    scheduler = started(engine(), engine("f"))
    group = (GroupRef("g", 20),)
    members = [task(groups=group, application="a") for _ in range(20)]
    running = placed(scheduler.step(0.0, [TaskSubmitted(each) for each in members]))
    assert len(running) == 8
    seen = list(running)
    for now in range(1, 40):
        if not running:
            break
        new = placed(scheduler.step(float(now), [TaskFinished(running.pop(0), 0, 20)]))
        seen += new
        running += new
    assert sorted(seen) == [member.id for member in members]


def test_a_large_task_does_not_starve_behind_small_ones() -> None:
    """Small tasks take every bit of room as it comes; the engine that the large one is bound to is
    drained for it.
    """
    scheduler = started(engine())
    large = task(prompt_tokens=900, bound_to="e")
    first = [task() for _ in range(4)]
    running = placed(scheduler.step(0.0, [TaskSubmitted(each) for each in first]))
    scheduler.step(0.0, [TaskSubmitted(large)])
    for tenth in range(1, 400):
        now = tenth / 10
        end = TaskFinished(running.pop(0), 0, 20)
        new = placed(scheduler.step(now, [end, TaskSubmitted(task())]))
        running += new
        if large.id in new:
            break
    assert large.id in running
    # Drained from `starvation_s` on: four tasks that end one after the other.
    assert 10.0 <= now <= 11.0


@pytest.mark.parametrize("allowed", [1, 2, 3, 4])
def test_only_so_many_are_passed_over_for_one_that_finds_room(allowed: int) -> None:
    """Three need more sequences than are left; the fourth would fit."""
    scheduler = started(engine(), max_passed_over=allowed)
    scheduler.step(0.0, [TaskSubmitted(task(num_sequences=2))])
    wide, small = [task(num_sequences=3, max_tokens=2) for _ in range(3)], task()
    events = [TaskSubmitted(each) for each in (*wide, small)]
    assert placed(scheduler.step(1.0, events)) == ([small.id] if allowed > 3 else [])


def test_a_large_task_begins_as_soon_as_an_engine_is_not_full() -> None:
    """It waits for its room in the engine, which takes none behind it before it."""
    scheduler = started(engine())
    first, large, small = [task() for _ in range(3)], task(prompt_tokens=900), task()
    events = [TaskSubmitted(each) for each in (*first, large)]
    assert placed(scheduler.step(0.0, events)) == [*(each.id for each in first), large.id]
    assert placed(scheduler.step(1.0, [TaskSubmitted(small)])) == []
    ends = [TaskFinished(each.id, 0, 20) for each in first]
    assert placed(scheduler.step(2.0, ends)) == [small.id]


def test_fewer_successors_than_none_are_none() -> None:
    scheduler = started(engine(max_batch=1), order="fair")
    running = task(application="a")
    first, second = task(application="a", successors=-5), task(application="a")
    scheduler.step(0.0, [TaskSubmitted(each) for each in (running, first, second)])
    assert placed(scheduler.step(1.0, [TaskFinished(running.id, 0, 20)])) == [first.id]


def test_the_rest_of_a_group_follows_the_largest_first() -> None:
    scheduler = started(engine(), group_tasks=True)
    group = (GroupRef("g", 3),)
    other = task()
    first, small, large = (task(groups=group, max_tokens=tokens) for tokens in (20, 10, 50))
    actions = scheduler.step(0.0, [TaskSubmitted(each) for each in (first, other, small, large)])
    assert placed(actions) == [first.id, large.id, small.id, other.id]


def test_a_policy_says_what_else_it_runs_with() -> None:
    rest = {"admission": "open", "order": "fcfs", "keep": "none"}
    assert preset_of(TURNS) == SchedulerConfig(place=TURNS, **rest)  # type: ignore[arg-type]


def test_an_engines_own_queue_runs_what_is_waited_for_first() -> None:
    scheduler = started(engine(max_batch=8, capacity_tokens=10_000))
    kinds = ["latency", "ttft=1s", "tpot=50ms", "deadline=9s", "throughput"]
    tasks = [task(objective=Objective.parse(kind)) for kind in kinds]
    actions = scheduler.step(0.0, [TaskSubmitted(each) for each in tasks])
    by_task = {each.task_id: each.priority for each in actions if isinstance(each, Place)}
    assert [by_task[each.id] for each in tasks] == [0, 0, 0, 1, 2]


def test_reasons_tell_why_and_how_long() -> None:
    scheduler = started(engine(max_batch=1))
    first, second = task(), task(objective=Objective("latency"))
    scheduler.step(0.0, [TaskSubmitted(first), TaskSubmitted(second)])
    (action,) = scheduler.step(2.5, [TaskFinished(first.id, 0, 5)])
    assert isinstance(action, Place)
    assert action.reasons.waited_s == 2.5
    assert action.reasons.policy == "parrot"
    assert action.priority < _place_of(scheduler, 3.0, second).priority


def _place_of(scheduler: Scheduler, now: float, before: Task) -> Place:
    batch = task()
    actions = scheduler.step(now, [TaskFinished(before.id, 0, 1), TaskSubmitted(batch)])
    (action,) = (a for a in actions if isinstance(a, Place))
    return action


def test_a_finished_application_lets_go_of_what_it_kept() -> None:
    scheduler = started(engine(), keep="hazard")
    turn = task(application="agent", successors=1)
    scheduler.step(0.0, [TaskSubmitted(turn)])
    scheduler.step(1.0, [TaskFinished(turn.id, 0, 20)])
    assert scheduler.snapshot()["models"]["m"]["engines"][0]["kept_tokens"] == 120
    actions = scheduler.step(2.0, [ApplicationFinished("agent")])
    assert actions == [Forget("agent", "e")]
    assert scheduler.snapshot()["models"]["m"]["engines"][0]["kept_tokens"] == 0


def test_an_application_that_finishes_before_its_last_task_is_forgotten_with_it() -> None:
    scheduler = started(engine(), keep="hazard")
    last = task(application="agent", successors=1)
    scheduler.step(0.0, [TaskSubmitted(last)])
    assert scheduler.step(1.0, [ApplicationFinished("agent")]) == []
    assert scheduler.snapshot()["models"]["m"]["applications"] == 1
    scheduler.step(2.0, [TaskFinished(last.id, 0, 20)])
    assert scheduler.snapshot()["models"]["m"]["applications"] == 0


def test_an_engine_does_not_inherit_the_report_of_one_that_left() -> None:
    scheduler = started(engine())
    scheduler.step(1.0, [EngineReport("e", 3, 2, 100)])
    (before,) = scheduler.snapshot()["models"]["m"]["engines"]
    assert before["reported"] == {"running": 3, "waiting": 2, "used_tokens": 100}
    scheduler.step(2.0, [EngineJoined(engine("f")), EngineLeft("e")])
    scheduler.step(3.0, [EngineLeft("f"), EngineJoined(engine("g")), EngineJoined(engine("h"))])
    engines = scheduler.snapshot()["models"]["m"]["engines"]
    assert [each["reported"] for each in engines] == [None, None]


def test_what_a_paused_application_keeps_expires_once() -> None:
    scheduler = started(engine(), keep="hazard")
    turn = task(application="agent", successors=1)
    scheduler.step(0.0, [TaskSubmitted(turn)])
    scheduler.step(1.0, [TaskFinished(turn.id, 0, 20)])
    forgotten = [
        (now, action)
        for now in (100.0, 700.0, 800.0)
        for action in scheduler.step(now, [Tick()])
        if isinstance(action, Forget)
    ]
    assert forgotten == [(700.0, Forget("agent", "e"))]
    assert scheduler.snapshot()["models"]["m"]["engines"][0]["kept_tokens"] == 0


def test_what_is_kept_is_looked_at_again_though_nothing_waits() -> None:
    scheduler = started(engine(), keep="hazard")
    turn = task(application="agent", successors=1)
    scheduler.step(0.0, [TaskSubmitted(turn)])
    assert WakeAt(2.0) in scheduler.step(1.0, [TaskFinished(turn.id, 0, 20)])


def test_no_more_is_kept_than_an_engine_holds() -> None:
    """An output may outgrow what was expected to fit."""
    scheduler = started(engine(), keep="hazard")
    turn = task(application="agent", successors=1, prompt_tokens=900, max_tokens=200)
    scheduler.step(0.0, [TaskSubmitted(turn)])
    scheduler.step(1.0, [TaskProgress(turn.id, 900, 0, 150)])
    scheduler.step(2.0, [TaskFinished(turn.id, 0, 150)])
    assert scheduler.snapshot()["models"]["m"]["engines"][0]["kept_tokens"] == 1000


def test_sessions_that_share_a_prefix_keep_it_once() -> None:
    scheduler = started(engine(), keep="hazard")
    system = tuple(range(5))  # 80 of 100 tokens
    first, second = (
        task(application=name, successors=1, prefix=(*system, number))
        for number, name in ((100, "one"), (200, "other"))
    )
    scheduler.step(0.0, [TaskSubmitted(first), TaskSubmitted(second)])
    scheduler.step(1.0, [TaskFinished(first.id, 0, 20)])
    assert scheduler.snapshot()["models"]["m"]["engines"][0]["kept_tokens"] == 40
    scheduler.step(2.0, [TaskFinished(second.id, 0, 20)])
    assert scheduler.snapshot()["models"]["m"]["engines"][0]["kept_tokens"] == 160


def test_kept_tokens_go_with_their_engine_and_with_the_next_turn() -> None:
    scheduler = started(engine(), keep="hazard")
    turn = task(application="agent", successors=1)
    scheduler.step(0.0, [TaskSubmitted(turn)])
    scheduler.step(1.0, [TaskFinished(turn.id, 0, 20)])
    scheduler.step(2.0, [TaskSubmitted(task(application="agent"))])
    assert scheduler.snapshot()["models"]["m"]["engines"][0]["kept_tokens"] == 0
    scheduler = started(engine(), keep="hazard")
    again = replace(turn, id=next(_ids))
    scheduler.step(0.0, [TaskSubmitted(again)])
    scheduler.step(1.0, [TaskFinished(again.id, 0, 20)])
    assert scheduler.snapshot()["models"]["m"]["engines"][0]["kept_tokens"] == 120
    scheduler.step(1.0, [EngineLeft("e"), EngineJoined(engine())])
    assert scheduler.snapshot()["models"]["m"]["engines"][0]["kept_tokens"] == 0


def test_an_update_changes_what_a_running_task_is_for() -> None:
    scheduler = started(engine())
    running = task()
    scheduler.step(0.0, [TaskSubmitted(running)])
    limits = []
    for objective in (Objective("tpot", 0.05), Objective("latency"), Objective()):
        scheduler.step(1.0, [TaskUpdated(running.id, objective=objective)])
        state = scheduler.snapshot()["models"]["m"]["engines"][0]
        limits.append((state["latency_batch"], state["step_limit_s"]))
    assert limits == [(1, 0.05), (1, None), (0, None)]


def test_an_update_says_that_more_calls_follow() -> None:
    scheduler = started(engine(max_batch=1), keep="hazard")
    running, waiting, ordinary = task(), task(), task()
    scheduler.step(0.0, [TaskSubmitted(each) for each in (running, waiting, ordinary)])
    scheduler.step(1.0, [TaskUpdated(waiting.id, successors=2)])
    retentions = []
    for ended in (running, waiting):
        actions = scheduler.step(2.0, [TaskFinished(ended.id, 0, 20)])
        retentions += [action.retention for action in actions if isinstance(action, Place)]
    assert retentions == ["keep", "normal"]


def test_an_application_that_has_returned_is_not_forgotten_with_the_paused_ones() -> None:
    scheduler = started(engine(), max_applications=1)
    turn = task(application="back")
    scheduler.step(0.0, [TaskSubmitted(turn)])
    scheduler.step(1.0, [TaskFinished(turn.id, 0, 20)])
    again = task(application="back")
    scheduler.step(2.0, [TaskSubmitted(again)])
    for number in range(3):
        other = task()
        scheduler.step(3.0 + number, [TaskSubmitted(other)])
        scheduler.step(3.5 + number, [TaskFinished(other.id, 0, 20)])
    assert scheduler.snapshot()["models"]["m"]["applications"] == 2
    scheduler.step(9.0, [TaskFinished(again.id, 0, 20)])
    assert scheduler.num_tasks == 0
    assert scheduler.snapshot()["models"]["m"]["applications"] == 1


# Names, determinism


@pytest.mark.parametrize("policy", ["parrot", TURNS])
def test_every_preset_places_a_task(policy: str) -> None:
    scheduler = Scheduler(preset_of(policy))
    only = task()
    actions = scheduler.step(0.0, [EngineJoined(engine()), TaskSubmitted(only)])
    assert placed(actions) == [only.id]


@pytest.mark.parametrize("field", ["admission", "order", "place", "keep"])
def test_an_unknown_policy_is_named(field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}: no policy is called 'best'; there are [a-z]"):
        Scheduler(replace(CONFIG, **{field: "best"}))  # type: ignore[arg-type]


SAME = """
import random, sys
from parrot_scheduler.config import SchedulerConfig
from parrot_scheduler.event_log import write_actions
from parrot_scheduler.events import *
from parrot_scheduler.scheduler import Scheduler
from parrot_scheduler.task import *
rng = random.Random(5)
scheduler = Scheduler(SchedulerConfig())
running, out = [], []
events = [EngineJoined(EngineDescription(f"e{i}", "m", 5000, 8, 512, 16)) for i in range(5)]
for number in range(600):
    family = rng.randrange(6)
    events.append(TaskSubmitted(Task(
        number, "m", f"t{rng.randrange(4)}", f"a{rng.randrange(40)}", 160 + rng.randrange(200),
        rng.randrange(1, 90), prefix=tuple(family * 100 + i for i in range(10)),
        template=f"f{family}", objective=rng.choice([THROUGHPUT, LATENCY]),
        groups=(GroupRef(f"g{number % 9}", 4),) if number % 3 == 0 else (),
    )))
    if running and rng.random() < 0.7:
        done = running.pop(rng.randrange(len(running)))
        events.append(TaskFinished(done, 10, rng.randrange(90)))
    actions = scheduler.step(number / 50, events)
    running += [a.task_id for a in actions if type(a).__name__ == "Place"]
    out.append(write_actions(actions))
    events = []
sys.stdout.write("\\n".join(out))
"""


def test_decisions_do_not_depend_on_the_hash_seed() -> None:
    """Sets and dicts of strings are laid out differently with each seed."""
    outputs = [
        subprocess.run(
            [sys.executable, "-c", SAME],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            timeout=120,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0].count(b'"Place"') > 100
    assert outputs[0] == outputs[1]


def test_blocks_count_as_cached_until_they_are_evicted() -> None:
    scheduler = started(engine(reports_blocks=True))
    hashes = (1, 2, 3)
    stored = [
        BlocksStored("e", hashes),
        BlocksEvicted("e", (3,)),
        TaskSubmitted(task(prefix=hashes)),
    ]
    (place,) = (a for a in scheduler.step(1.0, stored) if isinstance(a, Place))
    assert place.reasons.expected_cached_tokens == 32
    # At least one token of a prompt is computed, wherever it has to run.
    whole = task(prompt_tokens=32, prefix=hashes[:2], bound_to="e")
    (place,) = (a for a in scheduler.step(2.0, [TaskSubmitted(whole)]) if isinstance(a, Place))
    assert place.reasons.expected_cached_tokens == 31
