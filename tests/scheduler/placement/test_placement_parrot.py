"""Our placement: prefixes stick, hot ones spread, groups stay together, promises are kept."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from harness.engine_pools import BLOCK, CONFIG, Engines, chain
from hypothesis import given, settings
from hypothesis import strategies as st
from parrot_scheduler.placement import parrot
from parrot_scheduler.placement.parrot import Parrot
from parrot_scheduler.policy import EngineChoice, EngineWait
from parrot_scheduler.task import (
    DEFAULT_STEP_MODEL,
    LATENCY,
    EngineDescription,
    GroupRef,
    Objective,
)
from parrot_scheduler.task_state import TaskState

LONG = 400  # blocks: 6400 tokens, 0.15 s to compute


def placed(engines: Engines, state: TaskState, now: float = 0.0) -> EngineChoice:
    choice = engines.place(state, now)
    assert choice is not None
    return choice


# A prefix hit sticks


@settings(max_examples=60, deadline=None)
@given(
    holder=st.integers(0, 3),
    loads=st.lists(st.integers(0, 12), min_size=4, max_size=4),
    own=st.integers(0, 12),
    blocks=st.integers(100, LONG),
    output=st.integers(1, 100),
)
def test_a_prefix_hit_sticks_under_unrelated_load(
    holder: int, loads: list[int], own: int, blocks: int, output: int
) -> None:
    """Whatever others do, and unless the holder is so much busier that moving pays."""
    engines = Engines("parrot", 4)
    engines.pool.prefixes.stored(holder, chain(1, blocks))
    loads[holder] = own
    for row, num in enumerate(loads):
        engines.load(row, num)
    prompt = blocks * BLOCK + 50
    choice = placed(engines, engines.state(prompt, output, chain(1, blocks)))
    if choice.row == holder:
        assert choice.decided_by == "prefix"
        assert choice.expected_cached_tokens == blocks * BLOCK
        return
    # It moved: the decode steps saved must be worth computing the prefix, here and for others.
    moved_s = 2 * blocks * BLOCK * DEFAULT_STEP_MODEL.prefill_token_s
    saved_s = output * 700 * (own - loads[choice.row]) * DEFAULT_STEP_MODEL.context_token_s
    assert saved_s > moved_s
    assert choice.decided_by == "replicate"


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


def test_what_a_draining_engine_holds_does_not_count() -> None:
    engines = Engines("parrot", 3)
    engines.pool.prefixes.stored(0, chain(1, LONG))
    engines.pool.prefixes.stored(1, chain(1, 100))
    engines.pool.drain(0)
    choice = placed(engines, engines.state(LONG * BLOCK + 50, 50, chain(1, LONG)))
    assert (choice.row, choice.decided_by) == (1, "prefix")
    assert choice.details["best_cached_tokens"] == 1600


# A hot prefix spreads


def test_a_hot_engine_is_left_where_the_product_would_stay() -> None:
    """LMetric's failing case: all but nothing to prefill there, and hundreds of sequences."""
    rows = {}
    for policy in ("lmetric", "parrot"):
        engines = Engines(policy, 3, capacity=1_000_000, max_batch=512)
        engines.pool.prefixes.stored(0, chain(1, 100))
        engines.load(0, 90, prompt=5000, output=500)
        engines.load(1, 5)
        engines.load(2, 5)
        choice = placed(engines, engines.state(1610, 500, chain(1, 100)))
        rows[policy] = choice.row
        if policy == "parrot":
            assert choice.decided_by == "replicate"
    assert rows == {"lmetric": 0, "parrot": 1}


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


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**20))
def test_no_engine_is_filled_beyond_the_target_unless_by_one_task(seed: int) -> None:
    rng = random.Random(seed)
    engines = Engines("parrot", 3, capacity=8_000, max_batch=6)
    table, running = engines.pool.table, []
    for step in range(60):
        prefix = chain(rng.randrange(3), rng.randrange(60))
        state = engines.state(
            len(prefix) * BLOCK + rng.randrange(1, 2000), rng.randrange(1, 500), prefix
        )
        if engines.place(state, float(step)) is not None:
            running.append(state)
            if rng.random() < 0.7:
                engines.fill(state)
        for row in engines.rows:
            alone = table.batch[row] <= 1
            assert alone or table.working_set[row] <= CONFIG.working_set_target * 8_000 + 1e-6
            assert table.batch[row] <= 6
        if running and rng.random() < 0.4:
            engines.end(running.pop(rng.randrange(len(running))))
    for state in running:
        engines.end(state)
    assert table.working_set.tolist() == [0.0] * len(table.working_set)


def test_blocks_that_tasks_share_need_room_once() -> None:
    engines = Engines("parrot", 1, capacity=10_000)
    tails = [engines.state(6500, 50, chain(1, LONG)) for _ in range(20)]
    fitting = [engines.place(state) is not None for state in tails]
    # 0.85 x 10,000 tokens: 6,400 shared ones, and 150 for each task.
    assert fitting == [True] * 14 + [False] * 6


def test_an_idle_engine_takes_a_task_of_any_size() -> None:
    engines = Engines("parrot", 2, capacity=1000)
    engines.load(0, 1, prompt=100, output=10)
    assert placed(engines, engines.state(950, 40)).row == 1


def test_what_paused_applications_left_yields_only_where_it_must() -> None:
    engines = Engines("parrot", 2, capacity=10_000)
    engines.load(0, 3)
    engines.pool.retain(1, 8_000)
    assert placed(engines, engines.state(1000, 100)).row == 0
    engines.load(0, 7)
    engines.load(1, 1)
    assert placed(engines, engines.state(1000, 100)).row == 1


# Waiting for a holder


def full_holder() -> tuple[Engines, list[TaskState]]:
    engines = Engines("parrot", 2, max_batch=32)
    engines.pool.prefixes.stored(0, chain(1, LONG))
    tasks = engines.load(0, 32)
    engines.load(1, 20)
    return engines, tasks


def test_a_full_holder_is_waited_for_no_longer_than_computing_anew_takes() -> None:
    engines, tasks = full_holder()
    state = engines.state(LONG * BLOCK + 50, 50, chain(1, LONG))
    assert engines.place(state, 10.0) is None
    anew_s = LONG * BLOCK * DEFAULT_STEP_MODEL.prefill_token_s
    assert engines.place(state, 10.0 + 0.9 * anew_s) is None
    choice = placed(engines, state, 10.0 + 1.05 * anew_s)
    assert (choice.row, choice.expected_cached_tokens) == (1, 0)

    patient = engines.state(LONG * BLOCK + 50, 50, chain(1, LONG) + chain(2, 1))
    engines.end(tasks[0])
    assert placed(engines, patient, 10.0 + 1.1 * anew_s).row == 0


def test_whoever_waits_for_a_holder_takes_no_less_elsewhere_as_the_holder_gets_better() -> None:
    """What is expected of a holder changes with every task there: the bound only rises."""
    engines, tasks = full_holder()
    state = engines.state(LONG * BLOCK + 50, 50, chain(1, LONG))
    first = engines.ask(state, 10.0)
    assert isinstance(first, EngineWait)
    for task in tasks[:8]:
        engines.end(task)
    engines.load(0, 8, prompt=10, output=10)
    again = engines.ask(state, 10.0)
    assert isinstance(again, EngineWait)
    assert again.total_cost_s == first.total_cost_s
    newcomer = engines.ask(engines.state(LONG * BLOCK + 50, 50, chain(1, LONG)), 10.0)
    assert isinstance(newcomer, EngineWait)
    assert newcomer.total_cost_s < first.total_cost_s


def test_a_short_prefix_is_not_waited_for() -> None:
    engines = Engines("parrot", 2, max_batch=4)
    engines.pool.prefixes.stored(0, chain(1, 4))
    engines.load(0, 4)
    engines.load(1, 3)
    assert placed(engines, engines.state(100, 200, chain(1, 4))).row == 1


def test_nobody_waits_for_a_holder_while_an_engine_idles() -> None:
    engines, _ = full_holder()
    engines.pool.join(EngineDescription("e2", "m", 100_000, 32, 2048, BLOCK))
    assert placed(engines, engines.state(LONG * BLOCK + 50, 50, chain(1, LONG))).row == 2


# Groups


def with_groups(num: int, **sizes: int) -> Engines:
    """Engines where a group's members may end a quarter later to be together."""
    return Engines(Parrot(CONFIG, group_slack=1.25), num, **sizes)


def test_a_group_stays_on_one_engine_where_that_costs_little() -> None:
    engines = with_groups(4)
    group = (GroupRef("map", 12),)
    rows = [placed(engines, engines.state(100, 300, groups=group)).row for _ in range(12)]
    assert len(set(rows)) == 1


def test_a_group_spreads_over_idle_engines_where_that_ends_sooner() -> None:
    engines = Engines("parrot", 4)
    group = (GroupRef("map", 12),)
    rows = [placed(engines, engines.state(1000, 300, groups=group)).row for _ in range(12)]
    assert [rows.count(row) for row in range(4)] == [3, 3, 3, 3]


def test_a_member_goes_to_its_group_where_it_ends_no_later() -> None:
    engines = Engines("parrot", 3)
    engines.load(0, 6, prompt=100, output=10)
    engines.load(1, 3, prompt=200, output=140)
    engines.load(2, 3, prompt=200, output=140)
    member = engines.put_on(0, engines.state(10, 10, groups=(GroupRef("map", 4),)))
    engines.fill(member)
    choice = placed(engines, engines.state(100, 300, groups=(GroupRef("map", 4),)))
    assert (choice.row, choice.decided_by) == (0, "group")
    assert placed(engines, engines.state(100, 300)).row != 0


def test_without_groups_the_same_tasks_spread() -> None:
    engines = Engines(Parrot(replace(CONFIG, group_tasks=False)), 4)
    group = (GroupRef("map", 12),)
    rows = [placed(engines, engines.state(100, 300, groups=group)).row for _ in range(12)]
    assert len(set(rows)) == 4


def test_a_group_that_prefills_spreads_rather_than_queue_up() -> None:
    engines = with_groups(4)
    group = (GroupRef("map", 16),)
    rows = [placed(engines, engines.state(5000, 10, groups=group)).row for _ in range(16)]
    assert len(set(rows)) == 4


def test_a_group_too_large_for_an_engine_takes_as_few_as_it_needs() -> None:
    engines = with_groups(4, max_batch=8)
    group = (GroupRef("map", 15),)
    rows = [placed(engines, engines.state(100, 300, groups=group)).row for _ in range(15)]
    assert sorted(rows.count(row) for row in set(rows)) == [7, 8]


def test_a_group_looks_for_room_for_all_of_it() -> None:
    engines = with_groups(2, capacity=20_000)
    engines.load(0, 2, prompt=7000, output=500)
    engines.load(1, 4, prompt=100, output=10)
    assert placed(engines, engines.state(300, 300)).row == 0  # fewer sequences, little room
    group = (GroupRef("map", 12),)
    rows = [placed(engines, engines.state(300, 300, groups=group)).row for _ in range(12)]
    assert set(rows) == {1}


def test_groups_that_overlap_come_together() -> None:
    engines = with_groups(4)
    a, b = GroupRef("a", 6), GroupRef("b", 6)
    first = placed(engines, engines.state(100, 300, groups=(a,))).row
    both = placed(engines, engines.state(100, 300, groups=(b, a))).row
    last = placed(engines, engines.state(100, 300, groups=(b,))).row
    assert first == both == last


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**20))
def test_groups_are_never_starved(seed: int) -> None:
    """Whatever their size, as long as tasks end every member gets a place."""
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


def test_a_home_that_left_is_forgotten() -> None:
    engines = with_groups(2)
    group = (GroupRef("map", 4),)
    first = engines.state(100, 300, groups=group)
    home = placed(engines, first).row
    engines.end(first)
    engines.pool.leave(f"e{home}")
    assert placed(engines, engines.state(100, 300, groups=group)).row == 1 - home


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


# Sessions


def test_a_session_stays_on_its_engine_unless_it_would_take_twice_as_long() -> None:
    engines = Engines("parrot", 2)
    context = chain(1, LONG)
    first = engines.put_on(0, engines.state(LONG * BLOCK, 50, context, application="agent"))
    engines.fill(first)
    engines.end(first)
    engines.application(first).context_tokens = LONG * BLOCK
    engines.load(0, 12, prompt=3000)
    other = engines.state(LONG * BLOCK + 400, 1000, context)
    assert placed(engines, other).row == 1, "without its session it moves"
    engines.end(other)
    engines.pool.prefixes.evicted(1, None)
    turn = engines.state(LONG * BLOCK + 400, 1000, context, application="agent")
    choice = placed(engines, turn)
    assert (choice.row, choice.decided_by) == (0, "session")
    assert choice.expected_cached_tokens == LONG * BLOCK
    engines.load(0, 40, prompt=1, output=1)
    engines.pool.table.scalars.context_token_s[0] *= 100
    late = engines.state(LONG * BLOCK + 400, 1000, context, application="agent")
    assert placed(engines, late).row == 1


def test_a_session_whose_context_is_gone_is_as_free_as_any_call() -> None:
    engines = Engines("parrot", 2)
    first = engines.put_on(0, engines.state(2000, 50, chain(1, 125), application="agent"))
    engines.application(first).context_tokens = 2000
    turn = engines.state(2400, 50, chain(1, 150), application="agent")
    engines.end(first)
    engines.load(0, 3)
    engines.pool.prefixes.evicted(0, None)
    assert placed(engines, turn).row == 1


def test_calls_of_a_session_that_begin_together_spread() -> None:
    engines = Engines("parrot", 4)
    rows = [
        placed(engines, engines.state(2000, 50, chain(number, 125), application="maps")).row
        for number in range(8)
    ]
    assert sorted(rows) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_session_that_will_go_on_begins_where_load_is_least() -> None:
    engines = Engines("parrot", 2)
    system = chain(1, 100)
    engines.pool.prefixes.stored(0, system)
    engines.load(0, 20, prompt=10, output=10)
    single = engines.state(1700, 10, system)
    assert engines.choose(single).row == 0  # type: ignore[union-attr]
    first = engines.state(1700, 10, system, returns=0.9)
    choice = placed(engines, first)
    assert (choice.row, choice.decided_by) == (1, "session")


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


def test_a_choice_explains_itself() -> None:
    engines = Engines("parrot", 3)
    engines.load(1, 2)
    engines.pool.prefixes.stored(1, chain(1, 100))
    choice = placed(engines, engines.state(1700, 100, chain(1, 100)))
    assert choice.decided_by == "prefix"
    assert choice.candidates == 3
    assert choice.cost == 100 * 3
    assert choice.details["prefill_tokens"] == 100
    assert choice.details["batch"] == 2
    assert choice.details["best_cached_tokens"] == 1600
    assert 0 < float(choice.details["ttft_s"]) < float(choice.details["finish_s"])


def test_members_that_share_most_of_their_prompt_stay_together_even_if_later() -> None:
    def home_of_the_second(shared_blocks: int) -> str:
        engines = Engines("parrot", 2)
        group = (GroupRef("review", 4),)
        for row in (0, 1):
            engines.pool.prefixes.stored(row, chain(1, shared_blocks))
        engines.put_on(0, engines.state(shared_blocks * BLOCK + 50, 400, groups=group))
        engines.load(0, 7, prompt=2000, output=400)
        prefix = chain(1, shared_blocks)
        prompt = 300 * BLOCK + 50
        return placed(engines, engines.state(prompt, 400, prefix, groups=group)).decided_by

    assert home_of_the_second(300) == "group"
    assert home_of_the_second(100) != "group"


def test_a_member_whose_prompt_is_cached_elsewhere_does_not_follow_its_group() -> None:
    engines = Engines("parrot", 2)
    group = (GroupRef("map", 4),)
    engines.put_on(0, engines.state(5000, 50, groups=group))
    engines.pool.prefixes.stored(1, chain(1, 300))
    choice = placed(engines, engines.state(300 * BLOCK + 20, 50, chain(1, 300), groups=group))
    assert (choice.row, choice.decided_by) == (1, "prefix")


def test_what_nobody_waits_for_keeps_out_of_the_way_of_what_somebody_waits_for() -> None:
    """Queued prefill delays only the task itself; each call there would wait for the task."""
    engines = Engines("parrot", 2)
    engines.put_on(0, engines.state(6000, 100))
    for _ in range(16):
        engines.fill(engines.put_on(1, engines.state(50, 100, objective=LATENCY)))
    batch = engines.choose(engines.state(400, 50))
    chat = engines.choose(engines.state(400, 50, objective=LATENCY))
    assert batch is not None
    assert chat is not None
    assert (batch.row, chat.row) == (0, 1)


@pytest.mark.parametrize("few_rows", [16, -1], ids=["one by one", "by columns"])
@pytest.mark.parametrize(
    ("queued", "slack", "row"), [(8000, 2.0, 0), (12000, 2.0, 1), (12000, 4.0, 0), (8000, 1.0, 1)]
)
def test_what_nobody_waits_for_gives_way_up_to_a_bound(
    queued: int, slack: float, row: int, few_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes 0.25 s beside those whom somebody waits for; where it queues 0.45 or 0.55 s."""
    monkeypatch.setattr(parrot, "FEW_ROWS", few_rows)
    engines = Engines(Parrot(replace(CONFIG, yield_slack=slack)), 2)
    engines.put_on(0, engines.state(queued, 100))
    for _ in range(40):
        engines.fill(engines.put_on(1, engines.state(50, 100, objective=LATENCY)))
    batch = engines.choose(engines.state(400, 50))
    assert batch is not None
    assert batch.row == row
