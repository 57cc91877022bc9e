"""The simulated engine against closed forms, and what it must never do."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import MODEL, Bench, profile, step


def test_one_call_takes_exactly_its_steps() -> None:
    bench = Bench(profile())
    sequence = bench.submit(1.0, 1, [("a", 1000)], 50)
    bench.run()
    filled = 1.0 + step(1000, 0)
    assert sequence.first_token_at == filled
    decode = sum(step(0, 1000 + generated) for generated in range(1, 50))
    assert bench.ended_at[1] == filled + decode
    assert (sequence.cached, sequence.prefilled, sequence.generated) == (0, 1000, 50)
    assert bench.engine.used_tokens == 0


def test_long_prompt_in_chunks() -> None:
    bench = Bench(profile())
    sequence = bench.submit(0.0, 1, [("a", 5000)], 1)
    bench.run()
    assert bench.ended_at[1] == 2 * step(2048, 0) + step(5000 - 4096, 0) == sequence.first_token_at


def test_chunks_share_their_steps_with_decodes() -> None:
    bench = Bench(profile())
    bench.submit(0.0, 1, [("a", 16)], 100)
    second = bench.submit(step(16, 0) / 2, 2, [("b", 4096)], 1)
    bench.run()
    # The second comes during the first's fill; 2,047 tokens of a step are its own.
    t = step(16, 0)
    for chunk, context in ((2047, 17), (2047, 18), (2, 19)):
        t += step(chunk, context)
    assert second.first_token_at == t
    t += sum(step(0, context) for context in range(20, 16 + 100))
    assert bench.ended_at[1] == t


def test_two_calls_share_their_steps() -> None:
    alone, both = Bench(profile()), Bench(profile())
    alone.submit(0.0, 1, [("a", 512)], 64)
    alone.run()
    both.submit(0.0, 1, [("a", 512)], 64)
    both.submit(0.0, 2, [("b", 512)], 64)
    both.run()
    decode = sum(step(0, 2 * (512 + generated)) for generated in range(1, 64))
    assert both.ended_at[1] == both.ended_at[2] == step(1024, 0) + decode
    assert both.ended_at[2] < 1.2 * alone.ended_at[1]


def test_arrival_is_taken_in_at_the_next_step() -> None:
    bench = Bench(profile())
    bench.submit(0.0, 1, [("a", 16)], 1000)
    start = step(16, 0) + sum(step(0, 16 + g) for g in range(1, 100))
    second = bench.submit(start - 1e-4, 2, [("b", 16)], 2)
    bench.run()
    assert second.admitted_at == pytest.approx(start, abs=1e-12)


def test_memory_runs_out() -> None:
    bench = Bench(profile(capacity_tokens=2048))
    first = bench.submit(0.0, 1, [("a", 960)], 200)
    last = bench.submit(0.0, 2, [("b", 960)], 200)
    bench.run()
    assert (first.preemptions, last.preemptions) == (0, 1)
    assert bench.order == [1, 2]
    assert last.generated == 200
    # What it had generated until then was filled again, and what was evicted of its prompt.
    assert last.prefilled > 960
    assert bench.engine.counts.preemptions == 1


def test_an_urgent_one_is_not_preempted() -> None:
    bench = Bench(profile(capacity_tokens=2048))
    bulk = bench.submit(0.0, 1, [("a", 960)], 200, priority=5)
    urgent = bench.submit(0.001, 2, [("b", 960)], 200, priority=0)
    bench.run()
    assert (bulk.preemptions, urgent.preemptions) == (1, 0)


def test_queue_is_by_priority() -> None:
    bench = Bench(profile(max_batch=1))
    for task, priority in ((1, 0), (2, 3), (3, 1), (4, 1)):
        bench.submit(0.0, task, [(task, 64)], 4, priority=priority)
    bench.run()
    assert bench.order == [1, 3, 4, 2]


def test_too_large_fails_at_once() -> None:
    bench = Bench(profile(capacity_tokens=1024))
    large = bench.submit(0.0, 1, [("a", 1000)], 26)
    fits = bench.submit(0.0, 2, [("a", 1000)], 25)
    bench.run()
    assert large.failed
    assert not fits.failed
    assert fits.generated == 25


SEGMENTS = st.lists(
    st.tuples(st.sampled_from("abcdefgh"), st.sampled_from([3, 16, 40, 128])),
    min_size=1,
    max_size=5,
)
CALLS = st.lists(
    st.tuples(
        st.floats(0, 0.5),
        SEGMENTS,
        st.integers(0, 40),
        st.sampled_from(["keep", "normal", "drop"]),
        st.sampled_from(["A", "B", "C"]),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=30,
)


@settings(max_examples=150, deadline=None)
@given(
    calls=CALLS,
    capacity=st.sampled_from([512, 1024, 4096]),
    budget=st.sampled_from([64, 256, 2048]),
    batch=st.sampled_from([1, 4, 64]),
    shared=st.booleans(),
)
def test_every_sequence_ends_once_and_memory_holds(
    calls: list[tuple[float, list[tuple[str, int]], int, str, str, int]],
    capacity: int,
    budget: int,
    batch: int,
    shared: bool,
) -> None:
    bench = Bench(
        profile(
            capacity_tokens=capacity,
            max_batch_tokens=max(budget, batch + 1),
            max_batch=batch,
            shared_attention=shared,
        )
    )
    sequences = [
        bench.submit(
            at, i, segments, output, retention=retention, application=application, priority=priority
        )
        for i, (at, segments, output, retention, application, priority) in enumerate(calls)
    ]
    bench.run()
    assert sorted(bench.ended_at) == list(range(len(calls)))
    engine = bench.engine
    for s in sequences:
        assert s.failed or s.generated == s.output_tokens
        assert s.failed or s.cached + s.prefilled >= s.prompt.tokens
    assert engine.used_tokens == engine.running == engine.waiting == 0
    assert engine.counts.generated_tokens == sum(s.generated for s in sequences)
    engine.check()


@pytest.mark.parametrize(("limit", "steps"), [(None, 1), (512, 4)])
def test_prompts_that_can_wait_leave_urgent_decodes_short_steps(
    limit: int | None, steps: int
) -> None:
    """The prompt is filled in as many steps as its limit asks for."""
    bench = Bench(profile(max_background_tokens=limit))
    urgent = bench.submit(0.0, 1, [("u", 16)], 100)
    background = bench.submit(0.05, 2, [("b", 2032)], 1, priority=2)
    bench.run()
    assert urgent.first_token_at < background.first_token_at
    filled = background.first_token_at - background.admitted_at
    # Each step has its overhead, and a token of the decode's.
    more_s = filled - 2032 * MODEL.prefill_token_s
    assert more_s == pytest.approx(steps * MODEL.overhead_s, abs=steps * 1e-4)


def test_what_steps_leave_to_what_can_wait_is_saved_up() -> None:
    """508 tokens a step as long as decodes before left enough of 127 each."""
    filled: list[float] = []
    for burst in (None, 508):
        bench = Bench(profile(max_background_tokens=127, background_burst_tokens=burst, hidden=0.0))
        bench.submit(0.0, 1, [("u", 16)], 400)
        background = bench.submit(1.0, 2, [("b", 2032)], 1, priority=2)
        bench.run()
        filled.append(background.first_token_at - background.admitted_at)
    # The prompt is filled as fast as it can be, in 4 steps instead of 16.
    step_s = MODEL.weights_s + MODEL.overhead_s
    assert filled[0] - filled[1] == pytest.approx(12 * step_s, rel=0.01)


def test_a_limit_for_what_can_wait_binds_nobody_as_urgent_as_the_decodes() -> None:
    limited = Bench(profile(max_background_tokens=512))
    free = Bench(profile())
    for bench in (limited, free):
        bench.submit(0.0, 1, [("u", 16)], 100, priority=1)
        bench.submit(0.05, 2, [("b", 2032)], 1, priority=1)
        bench.run()
    assert limited.ended_at == free.ended_at
