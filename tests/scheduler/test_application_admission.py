"""Admission: whole applications are held while the engines' memory is full."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parrot_scheduler.actions import Action, Hold, Place, Release
from parrot_scheduler.admission import DistinctBlocks
from parrot_scheduler.config import SchedulerConfig
from parrot_scheduler.events import (
    ApplicationFinished,
    EngineJoined,
    EngineLeft,
    TaskCancelled,
    TaskFinished,
    TaskSubmitted,
    Tick,
)
from parrot_scheduler.scheduler import Scheduler
from parrot_scheduler.task import EngineDescription, StepModel, Task

_ids = count(1)
#: A token is filled in a tenth of a second.
SLOW = StepModel(weights_s=0.001, context_token_s=0.0, prefill_token_s=0.1)

#: Any context takes long to compute anew, beside decoding.
DEAR = StepModel(weights_s=1e-8, context_token_s=0.0, prefill_token_s=3e-5)


def started(keep: str = "none", **engine: Any) -> Scheduler:
    config = SchedulerConfig(
        admission="working-set",
        order="fcfs",
        keep=keep,
        predict_lengths=False,
        max_hold_s=20.0,
        working_set_target=0.8,
    )
    scheduler = Scheduler(config)
    fields = {"capacity_tokens": 1000, "max_batch": 16, "max_batch_tokens": 512, "step_model": DEAR}
    scheduler.step(
        0.0, [EngineJoined(EngineDescription("e", "m", block_tokens=10, **(fields | engine)))]
    )
    return scheduler


def task(
    application: str,
    prompt: int,
    prefix: tuple[int, ...] = (),
    successors: int = 0,
    returns: float = 0.9,
) -> Task:
    """A call of an agent, by default: others are likely to follow."""
    fields: dict[str, Any] = {"prefix": prefix, "successors": successors, "returns": returns}
    return Task(next(_ids), "m", "t", application, prompt, 20, **fields)


def kinds(actions: list[Action]) -> list[tuple[str, object]]:
    return [
        (type(a).__name__, a.task_id if isinstance(a, Place) else a.application)
        for a in actions
        if isinstance(a, Place | Hold | Release)
    ]


def test_a_new_application_waits_until_there_is_room_and_short_calls_pass() -> None:
    scheduler = started()
    first, second, chat = task("a", 500), task("b", 400), task("c", 100)
    assert kinds(scheduler.step(0.0, [TaskSubmitted(first)])) == [("Place", first.id)]
    assert kinds(scheduler.step(1.0, [TaskSubmitted(second)])) == [("Hold", "b")]
    assert kinds(scheduler.step(2.0, [TaskSubmitted(chat)])) == [("Place", chat.id)]
    (held,) = scheduler.snapshot()["models"]["m"]["held_applications"]
    assert (held["application"], held["since"], held["tasks"]) == ("b", 1.0, 1)
    actions = scheduler.step(4.0, [TaskFinished(first.id, 0, 20)])
    assert kinds(actions) == [("Release", "b"), ("Place", second.id)]
    (place,) = (a for a in actions if isinstance(a, Place))
    assert (place.reasons.waited_s, place.reasons.held_s) == (3.0, 3.0)


def test_what_does_not_go_on_is_not_held_until_it_does() -> None:
    """It has no context that others could push out while it pauses."""
    scheduler = started()
    agent = task("a", 500)
    chat, more = task("b", 400, returns=0.0), task("b", 480, returns=0.0)
    scheduler.step(0.0, [TaskSubmitted(agent)])
    assert kinds(scheduler.step(1.0, [TaskSubmitted(chat)])) == [("Place", chat.id)]
    scheduler.step(2.0, [TaskFinished(chat.id, 0, 20)])
    assert kinds(scheduler.step(3.0, [TaskSubmitted(more)])) == [("Hold", "b")]


def test_calls_of_an_application_inside_are_not_held() -> None:
    scheduler = started()
    first, more = task("a", 980), task("a", 500)
    scheduler.step(0.0, [TaskSubmitted(first)])
    assert kinds(scheduler.step(1.0, [TaskSubmitted(more)])) == []
    assert scheduler.snapshot()["models"]["m"]["queued"] == 1


def test_all_calls_of_a_held_application_wait_and_enter_together() -> None:
    scheduler = started()
    first = task("a", 700)
    calls = [task("b", 200), task("b", 210)]
    scheduler.step(0.0, [TaskSubmitted(first)])
    assert kinds(scheduler.step(1.0, [TaskSubmitted(calls[0])])) == [("Hold", "b")]
    assert kinds(scheduler.step(2.0, [TaskSubmitted(calls[1])])) == []
    assert kinds(scheduler.step(3.0, [TaskFinished(first.id, 0, 20)])) == [
        ("Release", "b"),
        ("Place", calls[0].id),
        ("Place", calls[1].id),
    ]


def test_nobody_is_held_longer_than_the_bound() -> None:
    scheduler = started()
    scheduler.step(0.0, [TaskSubmitted(task("a", 980))])
    scheduler.step(1.0, [TaskSubmitted(task("b", 700))])
    assert kinds(scheduler.step(20.9, [Tick()])) == []
    assert kinds(scheduler.step(21.0, [Tick()])) == [("Release", "b")]


def test_an_application_larger_than_the_target_runs_alone() -> None:
    scheduler = started()
    large = task("a", 950)
    assert kinds(scheduler.step(0.0, [TaskSubmitted(large)])) == [("Place", large.id)]


def test_the_same_beginning_counts_once() -> None:
    """Ten calls with a common prompt fit where two of their length would not."""
    scheduler = started()
    calls = [task(f"a{i}", 500, tuple(range(50))) for i in range(10)]
    actions = scheduler.step(0.0, [TaskSubmitted(call) for call in calls])
    assert len([a for a in actions if isinstance(a, Place)]) == 10


def test_what_paused_applications_keep_counts_and_they_return_first() -> None:
    scheduler = started(keep="hazard", step_model=SLOW)
    agent, busy = task("agent", 500, successors=1), task("busy", 20)
    scheduler.step(0.0, [TaskSubmitted(agent), TaskSubmitted(busy)])
    scheduler.step(1.0, [TaskFinished(agent.id, 0, 20)])
    other = task("other", 400)
    assert kinds(scheduler.step(1.1, [TaskSubmitted(other)])) == [("Hold", "other")]
    back = task("agent", 560)
    assert kinds(scheduler.step(1.2, [TaskSubmitted(back)])) == [("Place", back.id)]
    scheduler.step(1.3, [TaskFinished(back.id, 0, 20)])
    actions = scheduler.step(1.4, [ApplicationFinished("agent")])
    assert kinds(actions) == [("Release", "other"), ("Place", other.id)]


def test_a_session_that_returns_to_its_kv_may_use_all_of_the_memory() -> None:
    """620 and 370 of 1,000 tokens: beyond the target of 800, which others are held at."""
    scheduler = started(keep="hazard", step_model=SLOW)
    agent, busy = task("agent", 300, successors=1), task("busy", 600)
    scheduler.step(0.0, [TaskSubmitted(agent)])
    scheduler.step(1.0, [TaskFinished(agent.id, 0, 20)])
    assert kinds(scheduler.step(1.1, [TaskSubmitted(busy)])) == [("Place", busy.id)]
    new, back = task("new", 350), task("agent", 350)
    assert kinds(scheduler.step(1.2, [TaskSubmitted(new)])) == [("Hold", "new")]
    assert kinds(scheduler.step(1.3, [TaskSubmitted(back)])) == [("Place", back.id)]
    scheduler.step(1.4, [TaskFinished(back.id, 0, 20)])
    # And no more than that: 620 + 420 tokens.
    assert kinds(scheduler.step(1.5, [TaskSubmitted(task("agent", 400))])) == [("Hold", "agent")]


def test_what_paused_applications_keep_yields_while_engines_have_nothing_to_compute() -> None:
    scheduler = started(keep="hazard", step_model=SLOW)
    agent, other = task("agent", 500, successors=1), task("other", 400)
    scheduler.step(0.0, [TaskSubmitted(agent)])
    scheduler.step(1.0, [TaskFinished(agent.id, 0, 20)])
    assert kinds(scheduler.step(1.1, [TaskSubmitted(other)])) == [("Place", other.id)]


def test_a_held_application_without_calls_is_not_held_any_more() -> None:
    scheduler = started()
    scheduler.step(0.0, [TaskSubmitted(task("a", 700))])
    gone = task("b", 700)
    scheduler.step(1.0, [TaskSubmitted(gone)])
    assert kinds(scheduler.step(2.0, [TaskCancelled(gone.id)])) == [("Release", "b")]
    assert scheduler.snapshot()["models"]["m"]["held_applications"] == []


def test_a_held_task_that_ends_is_neither_placed_nor_waited_for() -> None:
    """The application goes on with its other task, and is admitted by what that one needs."""
    scheduler = started()
    scheduler.step(0.0, [TaskSubmitted(task("a", 500))])
    large, small = task("b", 700), task("b", 100)
    scheduler.step(1.0, [TaskSubmitted(large), TaskSubmitted(small)])
    assert kinds(scheduler.step(2.0, [TaskCancelled(large.id), Tick()])) == [
        ("Release", "b"),
        ("Place", small.id),
    ]
    assert scheduler.num_tasks == 2


def test_an_admitted_task_that_ends_before_it_is_placed_makes_room_for_others() -> None:
    scheduler = started(max_batch=1)
    running, waiting, held = task("a", 100), task("b", 400), task("c", 300)
    scheduler.step(0.0, [TaskSubmitted(running), TaskSubmitted(waiting)])
    assert kinds(scheduler.step(1.0, [TaskSubmitted(held)])) == [("Hold", "c")]
    assert kinds(scheduler.step(2.0, [TaskCancelled(waiting.id)])) == [("Release", "c")]
    assert kinds(scheduler.step(3.0, [TaskFinished(running.id, 0, 20)])) == [("Place", held.id)]


def test_an_admitted_application_counts_until_its_own_first_task_ends() -> None:
    scheduler = started(max_batch=1)
    running, first, second = task("a", 100), task("b", 400), task("b", 10)
    scheduler.step(0.0, [TaskSubmitted(running), TaskSubmitted(first), TaskSubmitted(second)])
    assert kinds(scheduler.step(1.0, [TaskSubmitted(task("c", 300))])) == [("Hold", "c")]
    assert kinds(scheduler.step(2.0, [TaskCancelled(second.id)])) == []
    assert kinds(scheduler.step(3.0, [TaskCancelled(first.id)])) == [("Release", "c")]


def test_an_output_needs_room_as_its_prompt_does() -> None:
    scheduler = started()
    scheduler.step(0.0, [TaskSubmitted(task("a", 100))])
    story = replace(task("b", 10), max_tokens=800)
    assert kinds(scheduler.step(1.0, [TaskSubmitted(story)])) == [("Hold", "b")]
    answer = replace(task("c", 10), max_tokens=600)
    assert kinds(scheduler.step(2.0, [TaskSubmitted(answer)])) == [("Place", answer.id)]


def test_an_engine_with_larger_blocks_changes_nothing_of_what_has_entered() -> None:
    """Blocks of those that enter are counted in one size, until nobody enters."""
    scheduler = started(capacity_tokens=10_000, max_batch=1)
    running, first = task("a", 500), task("b", 500, tuple(range(50)))
    scheduler.step(0.0, [TaskSubmitted(running), TaskSubmitted(first)])
    # Too small for the one that waits.
    scheduler.step(1.0, [EngineJoined(EngineDescription("f", "m", 100, 1, 512, block_tokens=40))])
    second = task("c", 400, tuple(range(100, 140)))
    assert kinds(scheduler.step(2.0, [TaskSubmitted(second)])) == []
    # 520 + 520 + 420 tokens are in; of 8,080 that leaves 6,620.
    assert kinds(scheduler.step(3.0, [TaskSubmitted(task("d", 6600))])) == []
    assert kinds(scheduler.step(4.0, [TaskSubmitted(task("e", 100))])) == [("Hold", "e")]


def test_without_engines_nobody_is_held() -> None:
    scheduler = started()
    scheduler.step(0.0, [TaskSubmitted(task("a", 700))])
    held = task("b", 700)
    scheduler.step(1.0, [TaskSubmitted(held)])
    assert kinds(scheduler.step(2.0, [EngineLeft("e")])) == [("Release", "b")]


prompts = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 200), st.integers(0, 200)), max_size=12
)


@given(prompts)
def test_shared_tokens_are_those_of_distinct_blocks(parts: list[tuple[int, int, int]]) -> None:
    """Never fewer than there are, and at most a quarter of what is shared is missed."""
    shared = DistinctBlocks()
    chains = [
        tuple(("common", family, i) for i in range(common))
        + tuple(("own", number, i) for i in range(own))
        for number, (family, common, own) in enumerate(parts)
    ]
    total = 0
    for chain in chains:
        new = shared.new_blocks(chain)
        shared.add(chain)
        total += new
        assert shared.blocks == total
    distinct = len({key for chain in chains for key in chain})
    all_blocks = sum(map(len, chains))
    assert distinct <= shared.blocks <= all_blocks
    for number, chain in enumerate(chains, 1):
        shared.remove(chain)
        left = DistinctBlocks()
        for other in chains[number:]:
            left.add(other)
        assert shared.blocks == left.blocks


@pytest.mark.parametrize("blocks", [1, 7, 8, 30, 100, 1000])
def test_equal_prompts_share_all(blocks: int) -> None:
    shared = DistinctBlocks()
    shared.add(range(blocks))
    assert shared.blocks == blocks
    assert shared.new_blocks(range(blocks)) == 0
    longer = shared.new_blocks(range(2 * blocks))
    assert blocks <= longer <= blocks + blocks / 4 + 1


def test_a_context_that_is_gone_gives_no_right_to_more_memory_than_new_ones_have() -> None:
    scheduler = started()
    agent, busy = task("agent", 200), task("busy", 650)
    scheduler.step(0.0, [TaskSubmitted(agent)])
    scheduler.step(1.0, [TaskFinished(agent.id, 0, 20)])
    scheduler.step(2.0, [TaskSubmitted(busy)])
    # 670 + 260 tokens would fit into the memory of 1000, but not into the target of 800.
    back, new = task("agent", 240), task("new", 240)
    assert kinds(scheduler.step(3.0, [TaskSubmitted(new)])) == [("Hold", "new")]
    assert kinds(scheduler.step(4.0, [TaskSubmitted(back)])) == [("Hold", "agent")]
    released = kinds(scheduler.step(5.0, [TaskFinished(busy.id, 0, 20)]))
    assert sorted(released[:2]) == [("Release", "agent"), ("Release", "new")]
