"""Driving an engine by hand, and the conformance suite of engines: small scenarios, which assert.

`check_engine` runs them all; `ENGINE_CHECKS` has them one by one, for a test each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from parrot_engine.protocol import (
    Engine,
    Event,
    Failed,
    Fill,
    Filled,
    FreeContext,
    Generate,
    Generated,
    Primitive,
    SamplingParams,
    StepResult,
)


def run_until_idle(engine: Engine, *primitives: Primitive, max_steps: int = 1000) -> list[Event]:
    """Submit, then step until nothing is left to do; the events in order."""
    engine.submit(primitives)
    events: list[Event] = []
    for _ in range(max_steps):
        result = engine.step()
        events += result.events
        if not result.has_work:
            return events
    raise AssertionError(f"the engine is still at work after {max_steps} steps")


def tokens_of(events: Sequence[Event], context_id: int) -> list[int]:
    """All tokens generated on a context."""
    return [
        token_id
        for event in events
        if isinstance(event, Generated) and event.context_id == context_id
        for token_id in event.token_ids
    ]


def greedy(max_tokens: int, **options: object) -> SamplingParams:
    """Greedy sampling past the end of text: as many tokens as given."""
    return SamplingParams(max_tokens, temperature=0.0, ignore_eos=True, **options)  # type: ignore[arg-type]


def _only_failure(events: Sequence[Event], context_id: int) -> Failed:
    own = [event for event in events if event.context_id == context_id]
    assert len(own) == 1, own
    assert isinstance(own[0], Failed), own
    assert own[0].message
    return own[0]


def _fill_then_generate(engine: Engine) -> None:
    events = run_until_idle(engine, Fill(1, [5, 6, 7]), Generate(1, greedy(4)))
    filled = [event for event in events if isinstance(event, Filled)]
    generated = [event for event in events if isinstance(event, Generated)]
    assert [(event.context_id, event.num_tokens) for event in filled] == [(1, 3)]
    assert 0 <= filled[0].cached_tokens <= 3
    assert filled[0].prompt_logprobs is None
    assert events.index(filled[0]) < events.index(generated[0])
    assert len(tokens_of(events, 1)) == 4
    assert [event.finish_reason for event in generated[:-1]] == [None] * (len(generated) - 1)
    assert generated[-1].finish_reason == "length"
    assert all(event.logprobs is None for event in generated)


def _greedy_is_repeatable(engine: Engine) -> None:
    prompt = [3, 1, 4, 1, 5]
    first = tokens_of(run_until_idle(engine, Fill(1, prompt), Generate(1, greedy(6))), 1)
    both = run_until_idle(
        engine,
        Fill(2, prompt), Generate(2, greedy(6)),
        Fill(3, [2, 7]), Generate(3, greedy(9)),
    )  # fmt: skip
    assert tokens_of(both, 2) == first
    assert len(tokens_of(both, 3)) == 9


def _no_tokens_asked_for(engine: Engine) -> None:
    events = run_until_idle(engine, Fill(1, [5]), Generate(1, greedy(0)))
    assert tokens_of(events, 1) == []
    assert isinstance(events[-1], Generated)
    assert events[-1].finish_reason == "length"


def _forks_begin_at_the_parents_end(engine: Engine) -> None:
    whole = run_until_idle(engine, Fill(9, [1, 2, 3, 4, 5]), Generate(9, greedy(3)))
    parts = run_until_idle(
        engine,
        Fill(1, [1, 2, 3]),
        Fill(2, [4, 5], parent_context_id=1),
        Generate(2, greedy(3)),
        Generate(3, greedy(3), parent_context_id=1),
        Generate(1, greedy(3)),
    )
    assert tokens_of(parts, 2) == tokens_of(whole, 9)
    assert tokens_of(parts, 3) == tokens_of(parts, 1)
    assert len(tokens_of(parts, 1)) == 3


def _forks_outlive_their_parent(engine: Engine) -> None:
    whole = run_until_idle(engine, Fill(9, [1, 2, 3, 4]), Generate(9, greedy(3)))
    run_until_idle(engine, Fill(1, [1, 2, 3]), Fill(2, [4], parent_context_id=1))
    events = run_until_idle(engine, FreeContext(1), Generate(2, greedy(3)))
    assert tokens_of(events, 2) == tokens_of(whole, 9)


def _a_freed_parent_reports_up_to_its_last_fork(engine: Engine) -> None:
    events = run_until_idle(
        engine,
        Fill(1, [1, 2, 3]),
        Generate(2, greedy(3), parent_context_id=1),
        Generate(1, greedy(3)),
        FreeContext(1),
    )
    own = [event for event in events if event.context_id == 1]
    assert [(type(event), getattr(event, "num_tokens", None)) for event in own[:1]] == [(Filled, 3)]
    # What was queued behind the fork may have begun, but does not end.
    assert all(isinstance(event, Generated) for event in own[1:])
    assert len(tokens_of(events, 1)) < 3
    assert len(tokens_of(events, 2)) == 3
    # The id is free: its next use is a new context, whatever events the old one still reports.
    events = run_until_idle(
        engine,
        Fill(3, [4] * 20),
        Generate(4, greedy(3), parent_context_id=3),
        FreeContext(3),
        Fill(3, [5, 6]),
    )
    filled = [event for event in events if isinstance(event, Filled) and event.context_id == 3]
    assert filled[-1].num_tokens == 2
    assert len(tokens_of(events, 4)) == 3


def _generated_tokens_are_part_of_the_context(engine: Engine) -> None:
    whole = tokens_of(run_until_idle(engine, Fill(1, [8, 9]), Generate(1, greedy(6))), 1)
    parts = run_until_idle(engine, Fill(2, [8, 9]), Generate(2, greedy(2)), Generate(2, greedy(4)))
    assert tokens_of(parts, 2) == whole
    again = run_until_idle(
        engine, Fill(3, [8, 9]), Generate(3, greedy(2)), Fill(3, [7]), Generate(3, greedy(2))
    )
    fresh = run_until_idle(engine, Fill(4, [8, 9, *whole[:2], 7]), Generate(4, greedy(2)))
    assert tokens_of(again, 3)[2:] == tokens_of(fresh, 4)


def _stop_ids_end_a_generation(engine: Engine) -> None:
    whole = tokens_of(run_until_idle(engine, Fill(1, [4, 4]), Generate(1, greedy(5))), 1)
    stop = whole[2]
    events = run_until_idle(engine, Fill(2, [4, 4]), Generate(2, greedy(5, stop_token_ids=(stop,))))
    assert tokens_of(events, 2) == whole[: whole.index(stop) + 1]
    assert isinstance(events[-1], Generated)
    assert events[-1].finish_reason == "stop"


def _freeing_cancels(engine: Engine) -> None:
    engine.submit([Fill(1, [5, 6]), Generate(1, greedy(200))])
    for _ in range(3):
        engine.step()
    events = run_until_idle(engine, FreeContext(1), FreeContext(1), FreeContext(77))
    assert events == []
    events = run_until_idle(engine, Fill(1, [5, 6]), Generate(1, greedy(1)))
    assert len(tokens_of(events, 1)) == 1


def _failures_are_events(engine: Engine) -> None:
    info = engine.info
    unknown = run_until_idle(engine, Fill(1, [1], parent_context_id=50))
    assert _only_failure(unknown, 1).code == "unknown_context"
    unknown = run_until_idle(engine, FreeContext(1), Generate(1, greedy(1)))
    assert _only_failure(unknown, 1).code == "unknown_context"
    outside = run_until_idle(engine, FreeContext(1), Fill(1, [info.vocab_size]))
    assert _only_failure(outside, 1).code == "invalid_request"
    again = run_until_idle(engine, Generate(1, greedy(1)))
    assert _only_failure(again, 1).code == "invalid_request"
    long = run_until_idle(engine, FreeContext(1), Fill(1, [1] * (info.max_context_tokens + 1)))
    assert _only_failure(long, 1).code == "context_too_long"
    run_until_idle(engine, Fill(2, [1]), Fill(3, [1]))
    doubled = run_until_idle(engine, Fill(3, [1], parent_context_id=2))
    assert _only_failure(doubled, 3).code == "invalid_request"
    # Whatever failed is gone; freeing makes its id a new one.
    run_until_idle(engine, FreeContext(1), FreeContext(3))
    assert len(tokens_of(run_until_idle(engine, Fill(1, [1]), Generate(1, greedy(2))), 1)) == 2
    assert len(tokens_of(run_until_idle(engine, Fill(3, [1]), Generate(3, greedy(2))), 3)) == 2


def _a_full_context_ends_with_length(engine: Engine) -> None:
    room = engine.info.max_context_tokens
    events = run_until_idle(engine, Fill(1, [1] * (room - 2)), Generate(1, greedy(50)))
    assert isinstance(events[-1], Generated)
    assert events[-1].finish_reason == "length"
    assert 1 <= len(tokens_of(events, 1)) <= 3


def _a_failure_harms_nobody_else(engine: Engine) -> None:
    alone = tokens_of(run_until_idle(engine, Fill(1, [5, 6]), Generate(1, greedy(5))), 1)
    events = run_until_idle(
        engine,
        Fill(2, [5, 6]), Generate(2, greedy(5)),
        Fill(3, [engine.info.vocab_size]), Generate(3, greedy(5)),
    )  # fmt: skip
    assert tokens_of(events, 2) == alone
    assert _only_failure([e for e in events if isinstance(e, Failed)][:1], 3)
    assert tokens_of(events, 3) == []


def _logprobs_where_asked_for(engine: Engine) -> None:
    events = run_until_idle(
        engine, Fill(1, [5, 6, 7], prompt_logprobs=1), Generate(1, greedy(3, logprobs=2))
    )
    filled = next(event for event in events if isinstance(event, Filled))
    assert filled.prompt_logprobs is not None
    assert filled.prompt_logprobs[0] is None
    assert [item.token_id for item in filled.prompt_logprobs if item] == [6, 7]
    for event in events:
        if isinstance(event, Generated) and event.token_ids:
            assert event.logprobs is not None
            assert [item.token_id for item in event.logprobs] == event.token_ids
            for item in event.logprobs:
                assert len(item.top) == 2
                assert item.logprob <= 0.0
                # Greedy takes the likeliest token.
                assert item.top[0][0] == item.token_id
                assert item.top[0][1] >= item.top[1][1]


def _seeds_repeat(engine: Engine) -> None:
    sampling = SamplingParams(8, temperature=1.0, seed=7, ignore_eos=True)
    one = run_until_idle(engine, Fill(1, [5, 6]), Generate(1, sampling))
    two = run_until_idle(
        engine,
        Fill(3, [9]), Generate(3, greedy(3)),
        Fill(2, [5, 6]), Generate(2, sampling),
    )  # fmt: skip
    assert tokens_of(one, 1) == tokens_of(two, 2)


def _a_generation_goes_on_elsewhere(engine: Engine) -> None:
    """On other contexts, filled with what it has generated, it goes on as it would have."""
    prompt = [5, 6, 5]
    penalties = {"frequency_penalty": 1.5, "repetition_penalty": 1.3}
    for options in ({}, penalties, {"stop_token_ids": tuple(range(16)), "min_tokens": 6}):
        for draw in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 7}):
            sampling = SamplingParams(8, ignore_eos=True, **options, **draw)  # type: ignore[arg-type]
            ids = tokens_of(run_until_idle(engine, Fill(1, prompt), Generate(1, sampling)), 1)
            run_until_idle(engine, FreeContext(1))
            for count in range(len(ids)):
                before = ids[:count]
                events = run_until_idle(
                    engine,
                    Fill(2, [*prompt, *before]),
                    Generate(2, sampling, generated=count),
                    # A candidate that forks the prompt.
                    Fill(3, prompt),
                    Fill(4, before, parent_context_id=3),
                    Generate(4, sampling, generated=count),
                )
                run_until_idle(engine, *map(FreeContext, (2, 3, 4)))
                assert tokens_of(events, 2) == ids[count:], (sampling, count)
                assert tokens_of(events, 4) == ids[count:], (sampling, count)
    events = run_until_idle(engine, Fill(5, prompt), Generate(5, greedy(3), generated=3))
    (failed,) = [event for event in events if isinstance(event, Failed)]
    assert failed.code == "invalid_request"
    assert failed.message.startswith("generated")


def _idle_engines_do_nothing(engine: Engine) -> None:
    before = engine.stats()
    assert engine.step() == StepResult([], False)
    run_until_idle(engine, Fill(1, [5, 6]), Generate(1, greedy(3)))
    after = engine.stats()
    assert after.generated_tokens - before.generated_tokens == 3
    assert after.filled_tokens + after.cached_tokens > before.filled_tokens + before.cached_tokens
    assert after.running == 0
    assert after.contexts == 1


#: The scenarios of `check_engine`, one by one.
ENGINE_CHECKS: tuple[Callable[[Engine], None], ...] = (
    _fill_then_generate,
    _greedy_is_repeatable,
    _no_tokens_asked_for,
    _forks_begin_at_the_parents_end,
    _forks_outlive_their_parent,
    _a_freed_parent_reports_up_to_its_last_fork,
    _generated_tokens_are_part_of_the_context,
    _stop_ids_end_a_generation,
    _freeing_cancels,
    _failures_are_events,
    _a_full_context_ends_with_length,
    _a_failure_harms_nobody_else,
    _logprobs_where_asked_for,
    _seeds_repeat,
    _a_generation_goes_on_elsewhere,
    _idle_engines_do_nothing,
)


def check_engine(factory: Callable[[], Engine]) -> None:
    """Put an engine through every scenario of the protocol.

    Args:
        factory: makes a fresh engine each time; with a vocabulary of at least 16 tokens and
            contexts of 256 tokens or more.

    Raises:
        AssertionError: it does not follow the protocol.
    """
    for check in ENGINE_CHECKS:
        engine = factory()
        try:
            check(engine)
        finally:
            engine.close()
