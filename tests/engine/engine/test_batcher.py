"""Batching of a step: budget, order, prefix hits, eviction, preemption."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness.engine.doubles import (
    ScriptedRunner,
    Trace,
    prompt,
    reference_generate,
    scripted_engine,
)
from parrot_engine.engine.builtin_engine import BuiltinEngine
from parrot_engine.protocol import Fill, Filled, FreeContext, Generate, Retention, SamplingParams

pytestmark = pytest.mark.usefixtures("overlap")

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


def expected(tokens: list[int], params: SamplingParams = GREEDY) -> list[int]:
    return reference_generate(tokens, params)[0]


def sizes(runner: ScriptedRunner) -> list[list[int]]:
    """Tokens per row, step by step."""
    return [[len(row.token_ids) for row in batch.rows] for batch in runner.batches]


def check_prompts(engine: BuiltinEngine, count: int, *, length: int) -> None:
    """So many prompts at once get what each would get alone."""
    trace = Trace(engine)
    for index in range(count):
        trace.submit(Fill(index, prompt(length, index)), Generate(index, GREEDY))
    trace.run()
    for index in range(count):
        assert trace.tokens(index) == expected(prompt(length, index))


# The token budget


@pytest.mark.parametrize("budget", [1, 3, 4, 5, 16, 17])
def test_prompt_in_chunks(budget: int) -> None:
    engine, runner = scripted_engine(max_batch_tokens=budget)
    trace = Trace(engine).submit(Fill(1, prompt(17)), Generate(1, GREEDY)).run()
    assert trace.tokens(1) == expected(prompt(17))
    chunks = [budget] * (17 // budget) + [17 % budget] * (17 % budget > 0)
    assert sizes(runner) == [[chunk] for chunk in chunks] + [[1]] * 5


def test_long_prompt_does_not_stall_running_generations() -> None:
    engine, runner = scripted_engine(max_batch_tokens=6)
    trace = Trace(engine)
    for index in (1, 2):
        trace.submit(Fill(index, prompt(3, index)), Generate(index, GREEDY))
    trace.step()
    trace.submit(Fill(3, prompt(20)), Generate(3, GREEDY)).run()
    assert sizes(runner)[:6] == [[3, 3], [1, 1, 4], [1, 1, 4], [1, 1, 4], [1, 1, 4], [1, 1, 4]]
    assert trace.tokens(3) == expected(prompt(20))


@pytest.mark.parametrize(("most", "chunk"), [(None, 3), (5, 5), (100, 11)])
def test_prompts_that_can_wait_leave_urgent_generations_short_steps(
    most: int | None, chunk: int
) -> None:
    engine, runner = scripted_engine(max_batch_tokens=12, max_background_tokens=most)
    trace = Trace(engine).submit(Fill(1, prompt(3)), Generate(1, GREEDY))
    trace.step()
    trace.submit(Fill(2, prompt(40, 2), priority=1), Fill(3, prompt(40, 3), priority=1)).run()
    steps = sizes(runner)
    assert steps[0] == [3]
    assert all(rows[0] == 1 and sum(rows[1:]) == chunk for rows in steps[1:6])
    # Nobody is disturbed any more: whole steps.
    assert [12] in steps
    assert trace.tokens(1) == expected(prompt(3))


def test_what_steps_leave_to_prompts_that_can_wait_is_saved_up() -> None:
    engine, runner = scripted_engine(
        max_batch_tokens=40, max_background_tokens=3, background_burst_tokens=9
    )
    trace = Trace(engine).submit(Fill(1, prompt(3)), Generate(1, replace(GREEDY, max_tokens=30)))
    for _ in range(4):
        trace.step()
    # Four steps have left 12 tokens: two bursts, and then as many as each step gains.
    trace.submit(Fill(2, prompt(35, 2), priority=1)).run()
    assert sizes(runner)[:10] == [[3], [1], [1], [1], *[[1, 9]] * 2, *[[1, 3]] * 4]
    assert trace.tokens(1) == expected(prompt(3), replace(GREEDY, max_tokens=30))


def test_no_more_than_64_bursts_are_saved_up() -> None:
    engine, runner = scripted_engine(
        num_blocks=600,
        max_position=600,
        max_batch_tokens=400,
        max_background_tokens=4,
        background_burst_tokens=8,
    )
    trace = Trace(engine).submit(Fill(1, prompt(3)), Generate(1, replace(GREEDY, max_tokens=500)))
    for _ in range(150):
        trace.step()
    for index in range(2, 22):
        trace.submit(Fill(index, prompt(60, index), priority=1))
    for _ in range(140):
        trace.step()
    # A step gains 4 and takes 8: 64 x 8 tokens last for 128 steps.
    chunks = [sum(rows[1:]) for rows in sizes(runner)[150:285]]
    assert chunks == [8] * 128 + [4] * 7


def test_generations_that_can_wait_take_from_what_prompts_that_can_wait_get() -> None:
    engine, runner = scripted_engine(max_batch_tokens=12, max_background_tokens=5)
    trace = Trace(engine).submit(Fill(1, prompt(3)), Generate(1, GREEDY))
    trace.submit(Fill(2, prompt(3, 2), priority=1), Generate(2, GREEDY, priority=1))
    trace.step()
    trace.submit(Fill(3, prompt(40, 3), priority=1)).run()
    assert sizes(runner)[:2] == [[3, 3], [1, 1, 4]]


def test_prompts_of_the_same_urgency_share_the_whole_step() -> None:
    engine, runner = scripted_engine(max_batch_tokens=12, max_background_tokens=1)
    trace = Trace(engine).submit(Fill(1, prompt(3)), Generate(1, GREEDY))
    trace.step()
    trace.submit(Fill(2, prompt(22, 2))).run()
    assert sizes(runner)[1:3] == [[1, 11], [1, 11]]


def test_long_prompts_leave_generations_as_urgent_short_steps() -> None:
    engine, runner = scripted_engine(
        max_batch_tokens=12, max_background_tokens=2, long_prompt_tokens=20
    )
    trace = Trace(engine).submit(Fill(1, prompt(3)), Generate(1, GREEDY))
    trace.step()
    # The shorter one is not limited.
    trace.submit(Fill(3, prompt(20, 3)), Fill(2, prompt(40, 2))).run()
    steps = [sorted(rows) for rows in sizes(runner)]
    assert steps[:4] == [[3], [1, 11], [1, 2, 9], [1, 2]]
    assert [12] in steps[4:], "whole steps when the generation is over"
    assert trace.tokens(1) == expected(prompt(3))


def test_what_is_cached_of_a_prompt_does_not_make_it_long() -> None:
    engine, runner = scripted_engine(
        max_batch_tokens=12, max_background_tokens=2, long_prompt_tokens=20
    )
    trace = Trace(engine).submit(Fill(1, prompt(40))).run()
    trace.submit(Fill(2, prompt(3, 2)), Generate(2, GREEDY))
    trace.step()
    before = len(runner.batches)
    trace.submit(Fill(3, [*prompt(40), *prompt(10, 3)])).run()
    assert max(sizes(runner)[before]) > 2


def test_urgent_prompts_are_not_held_back() -> None:
    engine, runner = scripted_engine(max_batch_tokens=12, max_background_tokens=1)
    trace = Trace(engine).submit(Fill(1, prompt(3), priority=2), Generate(1, GREEDY, priority=2))
    trace.step()
    trace.submit(Fill(2, prompt(22, 2), priority=1)).run()
    assert [sorted(rows) for rows in sizes(runner)[1:3]] == [[1, 11], [1, 11]]


def test_what_can_wait_gets_on_all_the_same() -> None:
    engine, _ = scripted_engine(max_batch_tokens=8, max_background_tokens=1)
    trace = Trace(engine).submit(Fill(1, prompt(3)), Generate(1, GREEDY))
    trace.submit(*[Fill(i, prompt(9, i), priority=1) for i in range(2, 6)])
    trace.submit(*[Generate(i, GREEDY, priority=1) for i in range(2, 6)]).run()
    for index in range(2, 6):
        assert trace.tokens(index) == expected(prompt(9, index))


def test_budget_smaller_than_the_batch_starves_nobody() -> None:
    engine, _ = scripted_engine(max_batch_tokens=2, max_batch_size=8)
    check_prompts(engine, 6, length=5)


def test_first_come_first_served_within_a_priority() -> None:
    engine, _ = scripted_engine(max_batch_size=1)
    trace = Trace(engine)
    trace.submit(
        Fill(1, prompt(4, 1), priority=1),
        Fill(2, prompt(4, 2), priority=0),
        Fill(3, prompt(4, 3), priority=-1),
        Fill(4, prompt(4, 4), priority=0),
    ).run()
    assert [event.context_id for event in trace.events] == [3, 2, 4, 1]


def test_higher_priority_takes_the_place_of_a_running_context() -> None:
    engine, _ = scripted_engine(max_batch_size=1)
    trace = Trace(engine).submit(Fill(1, prompt(4)), Generate(1, GREEDY, priority=0))
    trace.step()
    trace.submit(Fill(2, prompt(4, 2), priority=-1), Generate(2, GREEDY, priority=-1)).run()
    finished = [event.context_id for event in trace.events if getattr(event, "finish_reason", 0)]
    assert finished == [2, 1]
    assert trace.tokens(1) == expected(prompt(4))
    # It lost its place, not its KV.
    assert engine.stats().preemptions == 0


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_work_that_something_urgent_waits_for_is_urgent(depth: int) -> None:
    """Behind it in its queue, or in a fork, or in a fork of a fork that is not there yet."""
    engine, _ = scripted_engine(max_batch_size=1)
    trace = Trace(engine)
    trace.submit(*[Fill(index, prompt(4, index), priority=index) for index in range(7, 10)])
    parents = range(9, 9 + depth)
    trace.submit(*[Fill(i + 1, [i], parent_context_id=i, priority=9) for i in parents])
    trace.submit(Generate(9 + depth, GREEDY, priority=-1)).run()
    filled = [event.context_id for event in trace.events if isinstance(event, Filled)]
    assert filled == [*range(9, 10 + depth), 7, 8]
    assert trace.tokens(9 + depth) == expected([*prompt(4, 9), *parents])


def test_work_behind_an_urgent_fork_is_not_urgent() -> None:
    engine, _ = scripted_engine(max_batch_size=1)
    trace = Trace(engine).submit(
        Fill(1, prompt(4, 1), priority=5),
        Fill(2, prompt(4, 2), priority=1),
        Generate(3, GREEDY, parent_context_id=1, priority=0),
        Fill(1, prompt(4, 3), priority=5),
    )
    trace.run()
    filled = [event.context_id for event in trace.events if isinstance(event, Filled)]
    assert filled == [1, 2, 1]


# Prefixes found again


@pytest.mark.parametrize("length", [3, 4, 5, 8, 9])
def test_whole_prompt_found_recomputes_one_token(length: int) -> None:
    engine, runner = scripted_engine()
    trace = Trace(engine).submit(Fill(1, prompt(length)), Generate(1, GREEDY)).run()
    before = runner.num_tokens
    trace.submit(Fill(2, prompt(length)), Generate(2, replace(GREEDY, max_tokens=1))).run()
    full = length // 4 * 4
    cached = min(full, length - 1)
    assert trace.filled(2) == [Filled(2, length, cached)]
    assert runner.num_tokens - before == length - cached
    assert trace.tokens(2) == trace.tokens(1)[:1]


def test_prefix_of_a_freed_context_is_found() -> None:
    trace = Trace(scripted_engine()[0]).submit(Fill(1, prompt(9)), Generate(1, GREEDY)).run()
    conversation = [*prompt(9), *trace.tokens(1)]
    trace.submit(FreeContext(1), Fill(2, [*conversation, 7]), Generate(2, GREEDY)).run()
    # 9 + 6 tokens, of which the last was never computed: three full blocks.
    assert trace.filled(2)[0].cached_tokens == 12
    assert trace.tokens(2) == expected([*conversation, 7])


@pytest.mark.parametrize(("retention", "left"), [("keep", 1), ("normal", 2), ("drop", 2)])
def test_what_shall_be_kept_outlives_what_was_used_later(retention: Retention, left: int) -> None:
    """Four blocks; each conversation takes two, and the third has to take those of another."""
    engine, _ = scripted_engine(num_blocks=4)
    trace = Trace(engine).submit(Fill(1, prompt(8, 1))).run()
    trace.submit(FreeContext(1, retention)).run()
    trace.submit(Fill(2, prompt(8, 2))).run()
    trace.submit(FreeContext(2)).run()
    trace.submit(Fill(3, prompt(8, 3))).run()
    trace.submit(FreeContext(3)).run()
    gone = 3 - left
    trace.submit(Fill(4, [*prompt(8, left), 5])).run()
    assert trace.filled(4)[0].cached_tokens == 8
    trace.submit(FreeContext(4), Fill(5, [*prompt(8, gone), 5])).run()
    assert trace.filled(5)[0].cached_tokens == 0


def test_what_was_dropped_goes_before_what_is_older() -> None:
    engine, _ = scripted_engine(num_blocks=4)
    trace = Trace(engine)
    for index, retention in ((1, "normal"), (2, "drop")):
        trace.submit(Fill(index, prompt(8, index))).run()
        trace.submit(FreeContext(index, retention)).run()
    trace.submit(Fill(3, prompt(8, 3))).run()
    trace.submit(FreeContext(3)).run()
    trace.submit(Fill(4, [*prompt(8, 1), 5])).run()
    assert trace.filled(4)[0].cached_tokens == 8


@pytest.mark.parametrize("drops", [True, False])
def test_what_was_kept_goes_first_once_it_is_dropped(drops: bool) -> None:
    engine, _ = scripted_engine(num_blocks=4)
    trace = Trace(engine)
    for index, retention in ((1, "keep"), (2, "normal")):
        trace.submit(Fill(index, prompt(8, index))).run()
        trace.submit(FreeContext(index, retention)).run()
    if drops:
        trace.submit(FreeContext(1, "drop")).run()
    trace.submit(Fill(3, prompt(8, 3))).run()
    trace.submit(FreeContext(3)).run()
    left, gone = (2, 1) if drops else (1, 2)
    trace.submit(Fill(4, [*prompt(8, left), 5])).run()
    assert trace.filled(4)[0].cached_tokens == 8
    trace.submit(FreeContext(4), Fill(5, [*prompt(8, gone), 5])).run()
    assert trace.filled(5)[0].cached_tokens == 0


def test_prefix_is_found_in_the_middle_of_a_context() -> None:
    engine, runner = scripted_engine()
    trace = Trace(engine).submit(Fill(1, prompt(16))).run()
    trace.submit(Fill(2, prompt(6)), Fill(2, prompt(16)[6:]), Generate(2, GREEDY)).run()
    assert [event.cached_tokens for event in trace.filled(2)] == [4, 9]
    assert trace.tokens(2) == expected(prompt(16))
    assert sum(len(row) for row in sizes(runner)) == 1 + 1 + 1 + 5


def test_no_prefix_caching() -> None:
    engine, _ = scripted_engine(prefix_caching=False)
    trace = Trace(engine).submit(Fill(1, prompt(12))).run()
    trace.submit(Fill(2, prompt(12)), FreeContext(1)).run()
    assert trace.filled(2)[0].cached_tokens == 0
    assert engine.stats().cached_blocks == 0


def test_prompts_that_arrive_together_compute_their_prefix_once() -> None:
    engine, runner = scripted_engine()
    trace = Trace(engine)
    for index in range(4):
        trace.submit(Fill(index, [*prompt(40), index]), Generate(index, GREEDY))
    trace.run()
    assert [trace.filled(index)[0].cached_tokens for index in range(4)] == [0, 40, 40, 40]
    assert sizes(runner)[0] == [41]
    assert max(map(max, sizes(runner)[1:])) == 1
    for index in range(4):
        assert trace.tokens(index) == expected([*prompt(40), index])


def test_equal_blocks_are_kept_once() -> None:
    engine, _ = scripted_engine()
    trace = Trace(engine).submit(Fill(1, prompt(8))).run()
    trace.submit(Fill(2, prompt(8), prompt_logprobs=0)).run()
    assert engine.stats().free_blocks == engine.info.num_blocks - 2


# Running out of blocks


def test_cached_prefixes_go_first_and_leaves_before_roots() -> None:
    engine, _ = scripted_engine(num_blocks=6)
    trace = Trace(engine).submit(Fill(1, prompt(16)), FreeContext(1)).run()
    assert engine.stats().cached_blocks == 0  # freed before it began
    trace.submit(Fill(1, prompt(16))).run()
    trace.submit(FreeContext(1), Fill(2, prompt(16, 5))).run()
    assert engine.stats().preemptions == 0
    trace.submit(FreeContext(2), Fill(3, prompt(16))).run()
    assert trace.filled(3)[0].cached_tokens == 8


def test_idle_contexts_lose_their_kv_least_recently_used_first() -> None:
    engine, runner = scripted_engine(num_blocks=6, prefix_caching=False)
    trace = Trace(engine).submit(Fill(1, prompt(8, 1)), Fill(2, prompt(8, 2))).run()
    trace.submit(Fill(1, [])).run()
    trace.submit(Fill(3, prompt(12, 3))).run()
    before = len(runner.batches)
    trace.submit(Generate(1, GREEDY)).run()
    assert sizes(runner)[before] == [1]
    before = len(runner.batches)
    trace.submit(Generate(2, GREEDY)).run()
    assert sizes(runner)[before] == [8]
    assert trace.tokens(1) == expected(prompt(8, 1))
    assert trace.tokens(2) == expected(prompt(8, 2))


def test_pinned_contexts_stay_as_long_as_anything_else_can_go() -> None:
    engine, runner = scripted_engine(num_blocks=6, prefix_caching=False)
    trace = Trace(engine).submit(Fill(1, prompt(8, 1), pin=True), Fill(2, prompt(8, 2))).run()
    trace.submit(Fill(3, prompt(16, 3))).run()
    before = len(runner.batches)
    trace.submit(Generate(1, replace(GREEDY, max_tokens=1))).run()
    assert sizes(runner)[before] == [1]
    trace.submit(FreeContext(2), FreeContext(3), Fill(4, prompt(20, 4))).run()
    assert len(trace.filled(4)) == 1
    before = len(runner.batches)
    trace.submit(Generate(1, GREEDY)).run()
    assert sizes(runner)[before] == [9]


def test_preempted_context_goes_on_with_the_same_tokens() -> None:
    engine, runner = scripted_engine(num_blocks=8, prefix_caching=False)
    trace = Trace(engine)
    params = replace(GREEDY, max_tokens=16)
    for index in range(3):
        trace.submit(Fill(index, prompt(7, index)), Generate(index, params))
    trace.run()
    assert engine.stats().preemptions > 0
    for index in range(3):
        assert trace.tokens(index) == expected(prompt(7, index), params)
    finished = [event.context_id for event in trace.events if getattr(event, "finish_reason", 0)]
    assert finished == [0, 1, 2], "the oldest is never the one that gives way"
    assert max(max(row) for row in sizes(runner)[1:]) > 1, "nothing was computed again"


def test_context_that_fills_the_whole_cache_runs_among_others() -> None:
    engine, _ = scripted_engine(num_blocks=5, block_size=4)
    trace = Trace(engine)
    params = replace(GREEDY, max_tokens=50)
    trace.submit(Fill(0, prompt(4), pin=True)).run()
    for index in range(1, 4):
        trace.submit(Fill(index, prompt(10, index)), Generate(index, params))
    trace.run()
    for index in range(1, 4):
        wanted, _ = reference_generate(prompt(10, index), params, max_context=20)
        assert trace.tokens(index) == wanted
        assert trace.finish(index) == ["length"]


def test_whole_prompt_found_in_a_full_cache() -> None:
    engine, runner = scripted_engine(num_blocks=3, block_size=4)
    trace = Trace(engine).submit(Fill(1, prompt(11))).run()
    trace.submit(Fill(1, [5])).run()
    trace.submit(Fill(2, [*prompt(11), 5])).run()
    before = runner.num_tokens
    trace.submit(Generate(2, replace(GREEDY, max_tokens=1))).run()
    assert trace.finish(2) == ["length"]
    assert runner.num_tokens == before, "no room for a token, nothing to compute"
    trace.submit(Fill(3, prompt(8)), Generate(3, replace(GREEDY, max_tokens=4))).run()
    assert trace.tokens(3) == expected(prompt(8))[:4]


def test_admission_waits_for_room_instead_of_preempting() -> None:
    engine, _ = scripted_engine(num_blocks=10, max_batch_tokens=8)
    check_prompts(engine, 4, length=24)
    assert engine.stats().preemptions == 0


def test_waiting_context_that_needs_nothing_any_more_keeps_its_place() -> None:
    engine, _ = scripted_engine(num_blocks=6, max_logprob_tokens=4)
    trace = Trace(engine).submit(Fill(1, prompt(8))).run()
    trace.submit(FreeContext(1), Fill(2, prompt(16, 5), prompt_logprobs=0)).step()
    trace.submit(Fill(3, prompt(8))).step()
    assert engine.stats().waiting == 1, "it was found in the cache, but there was no room to run"
    trace.submit(Fill(3, [5, 6, 7]), Generate(3, GREEDY)).run()
    assert [event.cached_tokens for event in trace.filled(3)] == [8, 0]
    assert trace.tokens(3) == expected([*prompt(8), 5, 6, 7])
