"""Our placement: prefixes stick and spread, what is on its way is no queue, promises are kept."""

from __future__ import annotations

import random

import pytest
from harness.engine_pools import BLOCK, CONFIG, Engines, chain
from hypothesis import given, settings
from hypothesis import strategies as st
from parrot_scheduler.events import EngineReport
from parrot_scheduler.policy import EngineChoice
from parrot_scheduler.task import GroupRef, Objective, StepModel
from parrot_scheduler.task_state import TaskState

LONG = 400  # blocks: 6400 tokens, 0.15 s to compute


def placed(engines: Engines, state: TaskState, now: float = 0.0) -> EngineChoice:
    choice = engines.place(state, now)
    assert choice is not None
    return choice


# A prefix hit sticks


def test_load_elsewhere_never_draws_a_task_from_its_prefix() -> None:
    """The published code's flaw: its second rule, the fullest engine, overrode the hit."""
    for holder in range(3):
        engines = Engines("parrot", 4)
        engines.pool.prefixes.stored(holder, chain(1, 20))
        engines.load(3, 10)
        assert placed(engines, engines.state(400, 50, chain(1, 20))).row == holder


def test_the_deeper_of_two_holders_is_taken() -> None:
    engines = Engines("parrot", 3)
    engines.pool.prefixes.stored(0, chain(1, 60))
    engines.pool.prefixes.stored(2, chain(1, 100))
    choice = placed(engines, engines.state(1650, 50, chain(1, 100)))
    assert (choice.row, choice.expected_cached_tokens) == (2, 1600)


def test_tasks_of_one_prefix_meet_where_the_first_one_computes_it() -> None:
    engines = Engines("parrot", 4)
    rows = {
        placed(engines, engines.state(6500, 50, chain(1, LONG) + chain(10 + i, 5))).row
        for i in range(6)
    }
    assert len(rows) == 1


def test_the_queued_tokens_of_its_own_prefix_are_no_queue_to_a_task() -> None:
    engines = Engines("parrot", 4)
    shared = chain(1, LONG)
    states = [engines.state(6500, 50, shared + chain(10 + i, 5)) for i in range(6)]
    rows = {placed(engines, state).row for state in states}
    assert len(rows) == 1
    # Others see that queue.
    assert placed(engines, engines.state(500, 50)).row not in rows


def test_of_its_own_prefix_only_what_is_not_computed_is_no_queue() -> None:
    engines = Engines("parrot", 2)
    first = engines.put_on(0, engines.state(6450, 50, chain(1, LONG)))
    engines.fill(first)
    engines.put_on(0, engines.state(20_000, 50))
    choice = placed(engines, engines.state(6450, 50, chain(1, LONG)))
    assert (choice.row, choice.decided_by) == (1, "replicate")


def test_what_a_draining_engine_holds_does_not_count() -> None:
    engines = Engines("parrot", 3)
    engines.pool.prefixes.stored(0, chain(1, LONG))
    engines.pool.prefixes.stored(1, chain(1, 100))
    engines.pool.drain(0)
    choice = placed(engines, engines.state(LONG * BLOCK + 50, 50, chain(1, LONG)))
    assert (choice.row, choice.decided_by) == (1, "prefix")
    assert choice.details["best_cached_tokens"] == 1600


# A hot prefix spreads


def test_one_hot_prefix_ends_up_on_every_engine() -> None:
    engines = Engines("parrot", 4, max_batch=256, capacity=400_000)
    counts = [0] * 4
    for i in range(400):
        # Each has a prompt of its own behind the common beginning.
        prefix = chain(1, 200) + chain(100 + i, 40)
        state = engines.state(3900, 300, prefix)
        counts[placed(engines, state).row] += 1
        engines.fill(state)
    assert sum(counts) == 400
    assert min(counts) >= 60
    assert max(counts) <= 140


# Room


def test_a_task_waits_until_an_engine_has_room() -> None:
    engines = Engines("parrot", 2, max_batch=4)
    tasks = engines.load(0, 4) + engines.load(1, 4)
    late = engines.state(100, 10)
    assert engines.place(late) is None
    engines.end(tasks[5])
    assert placed(engines, late).row == 1


def test_an_engine_is_full_once_what_is_placed_needs_all_of_its_kv() -> None:
    engines = Engines("parrot", 1, capacity=2_000)
    tasks = [engines.state(500, 100) for _ in range(5)]
    # The fourth is begun with 200 tokens free; it waits in the engine for its room.
    assert [engines.place(each) is not None for each in tasks] == [True] * 4 + [False]
    engines.end(tasks[1])
    assert placed(engines, tasks[4]).row == 0


def test_with_room_anywhere_a_task_goes_where_it_costs_least_room_or_not() -> None:
    engines = Engines("parrot", 2, capacity=10_000)
    engines.pool.prefixes.stored(0, chain(1, LONG))
    engines.load(0, 2, prompt=6000)
    assert not engines.pool.has_room(engines.state(6500, 50, chain(1, LONG)), 0)
    assert placed(engines, engines.state(6500, 50, chain(1, LONG))).row == 0


def test_kv_of_paused_applications_keeps_nobody_out() -> None:
    engines = Engines("parrot", 1, capacity=10_000)
    engines.load(0, 3)
    engines.pool.retain(0, 8_000)
    assert placed(engines, engines.state(1000, 100)).row == 0


def test_an_idle_engine_takes_a_task_of_any_size() -> None:
    engines = Engines("parrot", 2, capacity=1000)
    engines.load(0, 1, prompt=100, output=10)
    assert placed(engines, engines.state(950, 40)).row == 1


# Groups


def test_a_group_spreads_over_idle_engines_where_that_ends_sooner() -> None:
    engines = Engines("parrot", 4)
    group = (GroupRef("map", 12),)
    rows = [placed(engines, engines.state(1000, 300, groups=group)).row for _ in range(12)]
    assert [rows.count(row) for row in range(4)] == [3, 3, 3, 3]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**20))
def test_groups_are_never_starved(seed: int) -> None:
    """Every member of a group of any size gets a place, as long as tasks end."""
    rng = random.Random(seed)
    engines = Engines("parrot", rng.randrange(1, 4), capacity=4000, max_batch=4)
    waiting = [
        engines.state(
            rng.randrange(10, 3500),
            rng.randrange(1, 400),
            groups=tuple(GroupRef(f"g{rng.randrange(3)}", 12) for _ in range(rng.randrange(1, 3))),
        )
        for _ in range(24)
    ]
    running: list[TaskState] = []
    for step in range(200):
        for state in list(waiting):
            if engines.place(state, float(step)) is not None:
                waiting.remove(state)
                running.append(state)
        if not running:
            break
        engines.end(running.pop(rng.randrange(len(running))))
    assert not waiting


# Objectives


def test_batch_work_keeps_away_where_a_step_would_get_too_long() -> None:
    engines = Engines("parrot", 2, max_batch=256)
    engines.load(0, 30)
    engines.load(1, 60)
    # 30 x 700 tokens decode in 5.4 ms there; 20,000 more would take 0.6 ms.
    chat = engines.state(100, 100, objective=Objective("tpot", 0.0055))
    assert placed(engines, chat).row == 0
    large = engines.state(20_000, 100)
    assert placed(engines, large).row == 1
    assert placed(engines, engines.state(20_000, 100, objective=Objective("latency"))).row in (0, 1)


def test_batch_work_waits_for_promises_but_not_for_ever() -> None:
    engines = Engines("parrot", 1, max_batch=256)
    engines.load(0, 20)
    engines.put_on(0, engines.state(100, 100, objective=Objective("tpot", 0.0052)))
    large = engines.state(20_000, 100)
    assert engines.place(large, 1.0) is None
    assert engines.place(large, CONFIG.starvation_s - 1) is None
    assert placed(engines, large, CONFIG.starvation_s).row == 0


def test_somebody_who_waits_does_not_wait_for_the_promises_of_others() -> None:
    engines = Engines("parrot", 1, max_batch=256)
    engines.load(0, 20)
    engines.put_on(0, engines.state(100, 100, objective=Objective("tpot", 0.0052)))
    assert placed(engines, engines.state(20_000, 100, objective=Objective("latency"))).row == 0


def test_a_promise_that_no_engine_could_keep_binds_nobody() -> None:
    engines = Engines("parrot", 1)
    engines.put_on(0, engines.state(100, 100, objective=Objective("tpot", 0.001)))
    assert placed(engines, engines.state(1000, 100)).row == 0


@pytest.mark.parametrize(
    "objective", [Objective("ttft", 0.2), Objective("deadline", 0.8), Objective("tpot", 0.0050)]
)
def test_a_timed_objective_rules_engines_out_that_would_miss_it(objective: Objective) -> None:
    engines = Engines("parrot", 2, max_batch=256)
    # By the product row 0 is cheaper: nothing cached elsewhere. But it is slow in every way.
    engines.load(0, 3, prompt=5000, output=1000)
    engines.put_on(0, engines.state(6500, 1000))
    engines.load(1, 28, prompt=10, output=10)
    plain = engines.choose(engines.state(600, 100))
    assert plain is not None
    timed = engines.choose(engines.state(600, 100, objective=objective))
    assert timed is not None
    assert timed.row == 1


# Preference, explanations


def test_a_task_goes_where_its_producer_was_unless_that_costs_much_more() -> None:
    engines = Engines("parrot", 3)
    choice = placed(engines, engines.state(1000, 10, prefers="e2"))
    assert (choice.row, choice.decided_by) == (2, "preferred")
    assert placed(engines, engines.state(1000, 10, prefers="e2")).row != 2
    assert placed(engines, engines.state(1000, 10, prefers="gone")).row >= 0


@pytest.mark.parametrize(("cached", "row"), [(10, 1), (30, 0)])
def test_a_preferred_engine_may_cost_a_quarter_more(cached: int, row: int) -> None:
    """1.2 or 1.9 times as much, for what the other one caches."""
    engines = Engines("parrot", 2)
    engines.pool.prefixes.stored(0, chain(1, cached))
    call = engines.state(1000, 10, chain(1, 62), common_tokens=900, prefers="e1")
    assert placed(engines, call).row == row


def test_a_template_counts_as_cached_beside_a_context_that_is_shorter() -> None:
    """An engine without visible blocks is assumed to hold both."""
    engines = Engines("parrot", 2, block_tokens=0, reports=False)
    more = {"template": "x", "template_tokens": 100, "application": "agent"}
    engines.end(engines.put_on(1, engines.state(300, 10, **more)))
    choice = placed(engines, engines.state(300, 10, **more))
    assert (choice.row, choice.expected_cached_tokens) == (1, 100)


# Sessions


def test_a_session_whose_context_is_gone_is_as_free_as_any_call() -> None:
    engines = Engines("parrot", 2)
    first = engines.put_on(0, engines.state(2000, 50, chain(1, 125), application="agent"))
    engines.application(first).context_tokens = 2000
    turn = engines.state(2400, 50, chain(1, 150), application="agent")
    engines.end(first)
    engines.load(0, 3)
    engines.pool.prefixes.evicted(0, None)
    assert placed(engines, turn).row == 1


@pytest.mark.parametrize(
    ("application", "busy", "row"), [("agent", 3, 0), ("agent", 40, 1), ("other", 3, 1)]
)
def test_a_session_stays_with_its_context_unless_that_costs_much_more(
    application: str, busy: int, row: int
) -> None:
    """Both have the beginning that all sessions share; one has this session's turns as well."""
    engines = Engines("parrot", 2)
    first = engines.put_on(0, engines.state(2000, 50, chain(1, 125), application="agent"))
    engines.fill(first)
    engines.end(first)
    engines.pool.prefixes.stored(1, chain(1, 110))
    for other in range(busy):
        engines.fill(engines.put_on(0, engines.state(160, 50, chain(100 + other, 10))))
    turn = engines.state(2100, 50, chain(1, 125), application=application)
    assert placed(engines, turn).row == row


@pytest.mark.parametrize(("elsewhere", "row"), [(40, 0), (100, 1)])
def test_a_session_leaves_an_engine_that_caches_less_than_the_cheapest(
    elsewhere: int, row: int
) -> None:
    """It ran last where 60 of its 125 blocks are, at 2.4 times the cost of 100 of them."""
    engines = Engines("parrot", 2)
    first = engines.put_on(0, engines.state(960, 50, chain(1, 60), application="agent"))
    engines.fill(first)
    engines.end(first)
    engines.pool.prefixes.stored(1, chain(1, elsewhere))
    turn = engines.state(2000, 50, chain(1, 125), application="agent")
    assert placed(engines, turn).row == row


@pytest.mark.parametrize(("shared", "row"), [(30, 1), (50, 0)])
def test_a_fan_out_does_not_follow_its_first_call_for_what_all_begin_with(
    shared: int, row: int
) -> None:
    """The last engine counts where it caches a third of the prompt: 30 or 50 of 125 blocks."""
    engines = Engines("parrot", 2)
    engines.fill(engines.put_on(0, engines.state(2000, 50, chain(1, 125), application="maps")))
    engines.fill(engines.put_on(0, engines.state(160, 50, chain(100, 10))))
    beginning = chain(1, shared)
    call = engines.state(2000, 50, (*beginning, *chain(2, 125)[shared:]), application="maps")
    assert placed(engines, call).row == row


@pytest.mark.parametrize(("sequence_s", "row"), [(0.0, 0), (3.6e-4, 1)])
def test_where_a_sequence_is_dear_a_session_leaves_its_context_sooner(
    sequence_s: float, row: int
) -> None:
    engines = Engines("parrot", 2)
    learn(engines, sequence_s, sequence_s)
    first = engines.put_on(0, engines.state(2000, 50, chain(1, 125), application="agent"))
    engines.fill(first)
    engines.end(first)
    engines.pool.prefixes.stored(1, chain(1, 110))
    for other in range(3):
        engines.fill(engines.put_on(0, engines.state(160, 50, chain(100 + other, 10))))
    turn = engines.state(2100, 50, chain(1, 125), application="agent")
    assert placed(engines, turn).row == row


@pytest.mark.parametrize(("common", "row"), [(None, 1), (1600, 0), (1800, 1), (2000, 1)])
def test_calls_go_where_more_is_cached_than_what_any_applications_share(
    common: int | None, row: int
) -> None:
    """A round of agents reads a text of its own; a system prompt that all read is copied."""
    engines = Engines("parrot", 2)
    engines.pool.prefixes.stored(0, chain(1, 110))
    engines.pool.prefixes.stored(1, chain(1, 100))
    for other in range(3):
        engines.fill(engines.put_on(0, engines.state(160, 50, chain(100 + other, 10))))
    call = engines.state(1800, 50, chain(1, 112), common_tokens=common)
    assert placed(engines, call).row == row


def own_share(engines: Engines, busy: dict[int, int], last: str | None = None) -> int:
    """Return the row of a call of 1,800 tokens, of which any applications share 500."""
    for row, number in busy.items():
        engines.load(row, number, prompt=100, output=10)
    call = engines.state(1800, 50, chain(1, 112), common_tokens=500, application="agent")
    engines.application(call).last_engine = last
    return placed(engines, call).row


def test_a_call_goes_where_its_own_is_though_the_engine_of_its_last_call_is_cheaper() -> None:
    engines = Engines("parrot", 2)
    engines.pool.prefixes.stored(0, chain(1, 20))
    engines.pool.prefixes.stored(1, chain(1, 100))
    assert own_share(engines, {1: 9}, "e0") == 1


def test_of_engines_that_hold_as_much_of_its_own_a_call_takes_the_cheapest() -> None:
    engines = Engines("parrot", 3)
    engines.pool.prefixes.stored(0, chain(1, 100))
    engines.pool.prefixes.stored(1, chain(1, 100))
    assert own_share(engines, {0: 10, 1: 8}) == 1


def test_where_the_engine_that_holds_most_is_full_the_next_one_is_a_calls_own() -> None:
    engines = Engines("parrot", 3, max_batch=11)
    engines.pool.prefixes.stored(0, chain(1, 105))
    engines.pool.prefixes.stored(1, chain(1, 100))
    assert own_share(engines, {0: 11, 1: 10}) == 1


def test_calls_of_a_session_that_begin_together_spread() -> None:
    engines = Engines("parrot", 4)
    rows = [
        placed(engines, engines.state(2000, 50, chain(number, 125), application="maps")).row
        for number in range(8)
    ]
    assert sorted(rows) == [0, 0, 1, 1, 2, 2, 3, 3]


@given(
    returns=st.floats(0, 1),
    cached=st.integers(0, 100),
    loads=st.lists(st.integers(0, 60), min_size=3, max_size=3),
    home=st.sampled_from([None, "e0", "e2", "gone"]),
)
@settings(max_examples=60, deadline=None)
def test_whatever_is_believed_of_a_session_a_call_gets_an_engine_with_room(
    returns: float, cached: int, loads: list[int], home: str | None
) -> None:
    engines = Engines("parrot", 3)
    for row, num in enumerate(loads):
        engines.load(row, num, prompt=100, output=10)
    engines.pool.prefixes.stored(2, chain(1, cached))
    state = engines.state(1700, 10, chain(1, 100), returns=returns, application="agent")
    application = engines.application(state)
    application.last_engine, application.context_tokens = home, 1600
    choice = placed(engines, state)
    assert loads[choice.row] < 64


def learn(engines: Engines, *sequences_s: float) -> None:
    """Each engine reports what a sequence adds to its steps."""
    for row, sequence_s in enumerate(sequences_s):
        model = StepModel(1.8e-4, 1.7e-6, 1.8e-4, 4.8e-3, sequence_s)
        engines.pool.report(row, EngineReport(f"engine-{row}", 0, 0, 0, model))


@pytest.mark.parametrize(("home", "row"), [(None, 2), ("e0", 2), ("e1", 1), ("e2", 2)])
def test_an_engine_of_the_last_call_is_compared_with_the_deepest_and_the_idlest(
    home: str | None, row: int
) -> None:
    """It holds less than the first and has more to do than the last, and is neither's equal."""
    engines = Engines("parrot", 4)
    for number, (cached, num) in enumerate(((100, 40), (60, 2), (0, 0))):
        engines.load(number, num, prompt=100, output=10)
        engines.pool.prefixes.stored(number, chain(1, cached))
    state = engines.state(1650, 1000, chain(1, 100), application="agent")
    engines.application(state).last_engine = home
    assert placed(engines, state).row == row


@pytest.mark.parametrize(("sequence_s", "row"), [(0.0, 0), (3.6e-4, 1)])
def test_where_a_sequence_is_dear_a_long_output_leaves_its_prefix(
    sequence_s: float, row: int
) -> None:
    engines = Engines("parrot", 2)
    learn(engines, sequence_s, sequence_s)
    engines.load(0, 8)
    engines.load(1, 1)
    engines.pool.prefixes.stored(0, chain(1, 20))
    assert placed(engines, engines.state(330, 5, chain(1, 20))).row == 0, "little to decode"
    assert placed(engines, engines.state(330, 100, chain(1, 20))).row == row


@pytest.mark.parametrize("learned", [(3.6e-4, 3.6e-4), (1e-4, 6.2e-4), (6.2e-4, 1e-4)])
def test_what_one_engine_has_learned_of_its_steps_draws_nobody_there(
    learned: tuple[float, float],
) -> None:
    engines = Engines("parrot", 2)
    learn(engines, *learned)
    engines.load(0, 2)
    engines.load(1, 3)
    assert placed(engines, engines.state(64, 200)).row == 0


def test_a_choice_explains_itself() -> None:
    engines = Engines("parrot", 3)
    engines.load(1, 2)
    engines.pool.prefixes.stored(1, chain(1, 100))
    choice = placed(engines, engines.state(1700, 100, chain(1, 100)))
    assert choice.decided_by == "prefix"
    assert choice.candidates == 3
    # A generated token is worth about one of a prompt by the default step model.
    assert choice.cost == pytest.approx((100 + 100 * 1.0075) * 3, rel=1e-3)
    assert choice.details["prefill_tokens"] == 100
    assert choice.details["batch"] == 2
    assert choice.details["best_cached_tokens"] == 1600
    assert 0 < float(choice.details["ttft_s"]) < float(choice.details["finish_s"])


def test_a_member_whose_prompt_is_cached_elsewhere_does_not_follow_its_group() -> None:
    engines = Engines("parrot", 2)
    group = (GroupRef("map", 4),)
    engines.put_on(0, engines.state(5000, 50, groups=group))
    engines.pool.prefixes.stored(1, chain(1, 300))
    choice = placed(engines, engines.state(300 * BLOCK + 20, 50, chain(1, 300), groups=group))
    assert (choice.row, choice.decided_by) == (1, "prefix")
