"""Driving an engine by hand: submit, step until it is idle, look at what it said."""

from __future__ import annotations

from collections.abc import Sequence

from parrot_engine.protocol import Engine, Event, Generated, Primitive, SamplingParams


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
    """Greedy sampling past the end of text: as many tokens as asked for."""
    return SamplingParams(max_tokens, temperature=0.0, ignore_eos=True, **options)  # type: ignore[arg-type]
