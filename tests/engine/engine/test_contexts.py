"""Contexts: order of primitives, forks, freeing, failures, queue bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness.engine.doubles import (
    Trace,
    prompt,
    reference_generate,
    reference_logprobs,
    scripted_engine,
)
from parrot_engine.engine.context_store import ContextStore
from parrot_engine.engine.contexts import MAX_FAILURES, Context
from parrot_engine.exceptions import ContextStateError
from parrot_engine.kv_cache.block_pool import BlockPool
from parrot_engine.protocol import (
    Failed,
    FailureCode,
    Fill,
    Filled,
    FreeContext,
    Generate,
    Generated,
    SamplingParams,
)

pytestmark = pytest.mark.usefixtures("overlap")

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


def expected(tokens: list[int], params: SamplingParams = GREEDY) -> list[int]:
    return reference_generate(tokens, params)[0]


def code_of(trace: Trace, context_id: int) -> FailureCode | None:
    failure = trace.failure(context_id)
    return None if failure is None else failure.code


# Order


def test_primitives_of_a_context_run_in_order() -> None:
    trace = Trace(scripted_engine()[0])
    trace.submit(
        Fill(1, prompt(5)), Generate(1, GREEDY), Fill(1, prompt(3, 9)), Generate(1, GREEDY)
    ).run()
    first = expected(prompt(5))
    second = expected([*prompt(5), *first, *prompt(3, 9)])
    assert trace.tokens(1) == first + second
    kinds = [type(event).__name__ for event in trace.events]
    assert kinds == ["Filled", *["Generated"] * 6, "Filled", *["Generated"] * 6]


def test_first_token_needs_no_step_of_its_own() -> None:
    trace = Trace(scripted_engine()[0]).submit(Fill(1, prompt(5)), Generate(1, GREEDY))
    events = trace.step()
    assert [type(event) for event in events] == [Filled, Generated]


def test_generate_after_everything_is_computed() -> None:
    engine, runner = scripted_engine()
    trace = Trace(engine).submit(Fill(1, prompt(8))).run()
    trace.submit(Generate(1, replace(GREEDY, max_tokens=1))).run()
    assert trace.tokens(1) == expected(prompt(8))[:1]
    assert [batch.num_tokens for batch in runner.batches] == [8, 1]


def test_fork_stands_where_it_was_submitted() -> None:
    trace = Trace(scripted_engine()[0])
    trace.submit(
        Fill(1, prompt(5)),
        Generate(2, GREEDY, parent_context_id=1),
        Generate(1, GREEDY),
        Generate(3, GREEDY, parent_context_id=1),
        Fill(1, prompt(2, 7)),
        Fill(4, prompt(3), parent_context_id=3),
        Generate(4, GREEDY),
    ).run()
    first = expected(prompt(5))
    third = expected([*prompt(5), *first])
    assert trace.tokens(1) == trace.tokens(2) == first
    assert trace.tokens(3) == third
    assert trace.tokens(4) == expected([*prompt(5), *first, *third, *prompt(3)])


def test_fork_of_a_running_context_waits_for_it() -> None:
    trace = Trace(scripted_engine()[0]).submit(Fill(1, prompt(5)), Generate(1, GREEDY))
    trace.step()
    trace.submit(Fill(2, [3], parent_context_id=1), Generate(2, GREEDY)).run()
    assert trace.tokens(2) == expected([*prompt(5), *trace.tokens(1), 3])


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9])
def test_fork_inside_a_block_shares_all_of_it(length: int) -> None:
    engine, runner = scripted_engine(prefix_caching=False)
    trace = Trace(engine).submit(Fill(1, prompt(length))).run()
    computed = runner.num_tokens
    for child in (2, 3, 4):
        trace.submit(Fill(child, [child], parent_context_id=1), Generate(child, GREEDY))
    trace.submit(Generate(1, GREEDY)).run()
    assert trace.tokens(1) == expected(prompt(length))
    for child in (2, 3, 4):
        assert trace.tokens(child) == expected([*prompt(length), child])
    # The children's own tokens, their generations, and the parent's last token once more.
    assert runner.num_tokens - computed == 3 * (1 + 5) + 6


def test_last_owner_of_a_block_writes_into_it() -> None:
    engine, runner = scripted_engine()
    trace = Trace(engine).submit(Fill(1, prompt(5))).run()
    for child in (2, 3):
        trace.submit(Generate(child, replace(GREEDY, max_tokens=1), parent_context_id=1))
    trace.submit(FreeContext(1)).run()
    assert len([copy for batch in runner.batches for copy in batch.copies]) == 1


def test_tokens_of_an_earlier_fill_that_are_found_again_do_not_count_as_cached() -> None:
    engine, runner = scripted_engine(num_blocks=4)
    trace = Trace(engine).submit(Fill(1, prompt(6))).run()
    # Takes the KV of the idle context, whose full block stays in the cache.
    trace.submit(Fill(2, prompt(12, 7))).run()
    trace.submit(FreeContext(2, "drop")).run()
    computed = runner.num_tokens
    trace.submit(Fill(1, prompt(6, 3))).run()
    assert runner.num_tokens - computed == 8
    assert [event.cached_tokens for event in trace.filled(1)] == [0, 0]


def test_long_chain_of_forks() -> None:
    trace = Trace(scripted_engine(max_waiting=2000, num_blocks=3)[0])
    trace.submit(Fill(0, [1]))
    for index in range(1500):
        trace.submit(Fill(index + 1, [], parent_context_id=index))
    trace.submit(Generate(1500, GREEDY)).run()
    assert trace.tokens(1500) == expected([1])


def test_empty_fill() -> None:
    trace = Trace(scripted_engine()[0]).submit(Fill(1, []), Fill(1, [], prompt_logprobs=1)).run()
    assert trace.filled(1) == [Filled(1, 0, 0), Filled(1, 0, 0, [])]
    assert trace.submit(Generate(1, GREEDY)).run().failure(1) == Failed(
        1, "invalid_request", "context_id: the context is empty; there is nothing to extend"
    )


# Log-probabilities of prompts


@pytest.mark.parametrize("budget", [1, 3, 4, 5, 100])
def test_prompt_logprobs_over_chunks_and_fills(budget: int) -> None:
    trace = Trace(scripted_engine(max_batch_tokens=budget)[0])
    whole = prompt(14)
    trace.submit(
        Fill(1, whole[:5], prompt_logprobs=1),
        Fill(1, whole[5:6], prompt_logprobs=1),
        Fill(1, whole[6:8]),
        Fill(1, whole[8:], prompt_logprobs=1),
        Generate(1, GREEDY),
    ).run()
    first, second, third, fourth = trace.filled(1)
    assert third.prompt_logprobs is None
    found = [
        *(first.prompt_logprobs or []),
        *(second.prompt_logprobs or []),
        *(fourth.prompt_logprobs or []),
    ]
    scores = reference_logprobs(whole, 0, 1)
    wanted = scores[:6] + scores[8:]
    assert found[0] is None
    for one, other in zip(found[1:], wanted[1:], strict=True):
        assert one is not None
        assert other is not None
        assert (one.token_id, one.logprob) == (other.token_id, pytest.approx(other.logprob))
        assert one.top[0][0] == other.top[0][0]
    assert trace.tokens(1) == expected(whole)


def test_prompt_logprobs_are_computed_even_if_cached() -> None:
    trace = Trace(scripted_engine()[0]).submit(Fill(1, prompt(12))).run()
    trace.submit(Fill(2, prompt(12), prompt_logprobs=0), Fill(3, prompt(12))).run()
    assert trace.filled(2)[0].cached_tokens == 0
    assert len(trace.filled(2)[0].prompt_logprobs or []) == 12
    assert trace.filled(3)[0].cached_tokens == 12


def test_prompt_logprobs_of_a_fork_begin_at_the_fork() -> None:
    trace = Trace(scripted_engine()[0]).submit(
        Fill(1, prompt(6)), Fill(2, [5, 6], parent_context_id=1, prompt_logprobs=0)
    )
    found = trace.run().filled(2)[0].prompt_logprobs
    assert found is not None
    for one, other in zip(found, reference_logprobs([*prompt(6), 5, 6], 6, 0), strict=True):
        assert one is not None
        assert other is not None
        assert one.logprob == pytest.approx(other.logprob)


# Freeing


def test_free_cancels() -> None:
    engine, runner = scripted_engine()
    trace = Trace(engine).submit(Fill(1, prompt(5)), Generate(1, GREEDY))
    trace.step()
    trace.submit(FreeContext(1))
    trace.run()
    assert len(trace.tokens(1)) == 1
    assert len(runner.batches) == 1
    assert engine.stats().contexts == 0


def test_parent_freed_at_once_still_gives_its_fork() -> None:
    engine, _ = scripted_engine(max_batch_tokens=2)
    trace = Trace(engine).submit(
        Fill(1, prompt(9)),
        Generate(2, GREEDY, parent_context_id=1),
        Generate(1, GREEDY),
        FreeContext(1),
    )
    trace.run()
    assert trace.tokens(2) == expected(prompt(9))
    assert trace.tokens(1) == []
    assert trace.filled(1) == [Filled(1, 9, 0)]
    assert engine.stats().contexts == 1


def test_freed_parent_goes_on_to_the_last_fork_only() -> None:
    trace = Trace(scripted_engine()[0])
    trace.submit(
        Fill(1, prompt(5)),
        Generate(1, GREEDY),
        Generate(2, GREEDY, parent_context_id=1),
        Generate(1, GREEDY),
        FreeContext(1),
    ).run()
    assert trace.tokens(1) == expected(prompt(5))
    assert trace.tokens(2) == expected([*prompt(5), *trace.tokens(1)])


def test_freeing_the_last_fork_ends_the_freed_parent() -> None:
    engine, runner = scripted_engine(max_batch_tokens=2)
    trace = Trace(engine).submit(
        Fill(1, prompt(20)),
        Generate(2, GREEDY, parent_context_id=1),
        Generate(3, GREEDY, parent_context_id=2),
        FreeContext(1),
        FreeContext(2),
    )
    trace.step()
    assert engine.stats().contexts == 3
    trace.submit(FreeContext(3)).run()
    assert engine.stats().contexts == 0
    assert len(runner.batches) == 1
    assert engine.stats().free_blocks == engine.info.num_blocks


def test_parent_freed_while_children_run() -> None:
    engine, _ = scripted_engine()
    trace = Trace(engine).submit(Fill(1, prompt(6)))
    for child in (2, 3):
        trace.submit(Fill(child, [child], parent_context_id=1), Generate(child, GREEDY))
    trace.step()
    trace.step()
    trace.submit(FreeContext(1)).run()
    for child in (2, 3):
        assert trace.tokens(child) == expected([*prompt(6), child])


def test_id_used_again_after_free() -> None:
    trace = Trace(scripted_engine(max_batch_tokens=2)[0])
    trace.submit(
        Fill(1, prompt(9)),
        Generate(2, GREEDY, parent_context_id=1),
        FreeContext(1),
        Fill(1, prompt(3)),
        Generate(1, GREEDY),
    ).run()
    assert trace.tokens(2) == expected(prompt(9))
    assert trace.filled(1) == [Filled(1, 3, 0)]
    assert trace.tokens(1) == expected(prompt(3))


# Failures


def test_unknown_contexts() -> None:
    trace = Trace(scripted_engine()[0])
    trace.submit(
        Generate(1, GREEDY),
        Fill(2, [1], parent_context_id=9),
        Generate(3, GREEDY, parent_context_id=9),
    ).run()
    assert [code_of(trace, index) for index in (1, 2, 3)] == ["unknown_context"] * 3
    assert "9" in trace.of(3, Failed)[0].message


def test_parent_of_an_existing_context_is_refused() -> None:
    trace = Trace(scripted_engine()[0])
    trace.submit(Fill(1, [1]), Fill(2, [2]), Fill(2, [3], parent_context_id=1)).run()
    failure = trace.failure(2)
    assert failure is not None
    assert failure.code == "invalid_request"
    assert failure.message.startswith("parent_context_id")


def test_failure_takes_waiting_forks_along_but_not_born_ones() -> None:
    trace = Trace(scripted_engine(max_position=16)[0])
    trace.submit(
        Fill(1, prompt(10)),
        Generate(2, GREEDY, parent_context_id=1),
        Fill(1, prompt(10)),
        Generate(3, GREEDY, parent_context_id=1),
        Generate(4, GREEDY, parent_context_id=3),
    ).run()
    assert [code_of(trace, index) for index in (1, 3, 4)] == ["context_too_long"] * 3
    assert "parent context 1" in trace.of(3, Failed)[0].message
    assert trace.tokens(2) == reference_generate(prompt(10), GREEDY, max_context=16)[0]


def test_failure_is_remembered_until_the_id_is_freed() -> None:
    trace = Trace(scripted_engine()[0])
    trace.submit(Fill(1, [-1])).run()
    trace.submit(Fill(1, [1]), Generate(2, GREEDY, parent_context_id=1)).run()
    assert [failure.code for failure in trace.of(1, Failed)] == ["invalid_request"] * 2
    assert code_of(trace, 2) == "invalid_request"
    trace.submit(FreeContext(1), Fill(1, [1]), Generate(1, GREEDY)).run()
    assert trace.tokens(1) == expected([1])


def test_context_that_the_cache_cannot_hold() -> None:
    engine, _ = scripted_engine(num_blocks=3, block_size=4)
    trace = Trace(engine).submit(Fill(1, prompt(12)), Fill(2, prompt(13))).run()
    assert trace.filled(1) == [Filled(1, 12, 0)]
    failure = trace.failure(2)
    assert failure is not None
    assert failure.code == "context_too_long"
    assert "13" in failure.message
    assert "12" in failure.message


def test_bounded_queues() -> None:
    engine, _ = scripted_engine(max_waiting=3, max_contexts=5, max_batch_size=1)
    trace = Trace(engine)
    for index in range(5):
        trace.submit(Fill(index, prompt(4, index)), Generate(index, GREEDY))
    trace.run()
    codes = [code_of(trace, index) for index in range(5)]
    assert codes == [None, None, None, "overloaded", "overloaded"]
    trace.submit(Fill(10, [1]), Fill(11, [1])).run()
    trace.submit(Fill(12, [1])).run()
    assert [code_of(trace, index) for index in (10, 11, 12)] == [None, None, "overloaded"]
    trace.submit(FreeContext(12), FreeContext(0), Fill(12, [1])).run()
    assert len(trace.filled(12)) == 1


def test_bounded_queue_of_one_context() -> None:
    trace = Trace(scripted_engine()[0])
    trace.submit(Fill(1, prompt(4)), Generate(1, GREEDY), *[Fill(1, [])] * 5000).run()
    assert code_of(trace, 1) == "overloaded"


def test_number_of_remembered_failures_is_bounded() -> None:
    trace = Trace(scripted_engine()[0])
    trace.submit(*[Fill(index, [-1]) for index in range(5000)]).run()
    trace.submit(Fill(0, [1]), Fill(4999, [1])).run()
    assert len(trace.filled(0)) == 1
    assert len(trace.of(4999, Failed)) == 2


def test_a_failed_id_that_is_used_on_is_remembered_longest() -> None:
    trace = Trace(scripted_engine()[0])
    trace.submit(*[Fill(index, [-1]) for index in range(MAX_FAILURES)]).run()
    trace.submit(Fill(0, [1]), Fill(MAX_FAILURES, [-1])).run()
    trace.submit(Fill(0, [1]), Fill(1, [1])).run()
    assert len(trace.of(0, Failed)) == 3
    assert len(trace.filled(1)) == 1, "the oldest failure makes room for the newest"


def test_waiting_contexts_that_are_freed() -> None:
    engine, _ = scripted_engine(max_batch_size=1)
    trace = Trace(engine)
    for index in range(300):
        trace.submit(Fill(index, prompt(3, index)))
    trace.step()
    trace.submit(*[FreeContext(index) for index in range(20, 300)])
    for index in range(300, 303):
        trace.submit(Fill(index, prompt(3, index), priority=-1))
    trace.run()
    order = [event.context_id for event in trace.events]
    assert order == [0, 300, 301, 302, *range(1, 20)]


def test_pending_forks_count_as_waiting() -> None:
    trace = Trace(scripted_engine(max_waiting=3)[0]).submit(Fill(0, prompt(9)))
    for child in range(1, 5):
        trace.submit(Generate(child, GREEDY, parent_context_id=0))
    trace.run()
    codes = [code_of(trace, child) for child in range(1, 5)]
    assert codes == [None, None, "overloaded", "overloaded"]


# Salt


def test_salt_separates_prefixes() -> None:
    trace = Trace(scripted_engine()[0])
    trace.submit(Fill(1, prompt(9), salt="a")).run()
    trace.submit(
        Fill(2, prompt(9), salt="b"), Fill(3, prompt(9)), Fill(4, prompt(9), salt="a")
    ).run()
    cached = [trace.filled(index)[0].cached_tokens for index in (2, 3, 4)]
    assert cached == [0, 0, 8]


def test_fork_keeps_its_salt() -> None:
    trace = Trace(scripted_engine()[0])
    trace.submit(Fill(1, prompt(6), salt="a"), Fill(2, prompt(6, 3), parent_context_id=1)).run()
    trace.submit(Fill(3, [*prompt(6), *prompt(6, 3)], salt="a")).run()
    assert trace.filled(3)[0].cached_tokens == 12
    trace.submit(Fill(4, [1], parent_context_id=1, salt="b")).run()
    failure = trace.failure(4)
    assert failure is not None
    assert failure.message.startswith("salt")


def test_illegal_transition_tells_the_story() -> None:
    store = ContextStore(
        BlockPool(4), block_size=4, max_context_tokens=16, max_waiting=4, max_contexts=4
    )
    store.submit_fill(Fill(1, [1, 2]))
    context = store.get(1)
    assert isinstance(context, Context)
    store.states.move(context, "running")
    store.free(1)
    with pytest.raises(ContextStateError, match="cannot become running") as caught:
        store.states.move(context, "running")
    assert caught.value.story == ("waiting", "running", "freed", "KV dropped", "gone")
