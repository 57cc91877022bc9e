"""Test tools for engines: a scripted engine, and the checks that every engine passes.

`ScriptedEngine` follows the protocol without any model, so that whatever drives engines can be
tested quickly. `check_engine` puts any engine through the same small stories; it asserts.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from parrot_engine.protocol import (
    Engine,
    EngineInfo,
    EngineStats,
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
    TokenLogprobs,
)

#: The next token after these.
Script: TypeAlias = Callable[[Sequence[int]], int]


def hashed_script(vocab_size: int) -> Script:
    """A "model" whose next token depends on every token before it."""

    def script(token_ids: Sequence[int]) -> int:
        return zlib.crc32(",".join(map(str, token_ids)).encode()) % vocab_size

    return script


def fixed_script(continuation: Sequence[int], end: int) -> Script:
    """Says `continuation` after any prompt whose tokens it does not hold, then `end`."""

    def script(token_ids: Sequence[int]) -> int:
        said = 0
        while said < len(continuation) and token_ids[-said - 1] in continuation:
            said += 1
        return continuation[said] if said < len(continuation) else end

    return script


@dataclass(slots=True)
class _Context:
    token_ids: list[int] = field(default_factory=list)
    queue: deque[Fill | Generate] = field(default_factory=deque)
    generated: int = 0


class ScriptedEngine:
    """An engine whose tokens come from a function. One token per context and step.

    Args:
        script: the next token; by default one that depends on the whole context.
        info: what it claims to be.
        before_step: called at the beginning of each step; may block, or raise to break the step.
    """

    def __init__(
        self,
        script: Script | None = None,
        *,
        info: EngineInfo | None = None,
        before_step: Callable[[], None] | None = None,
    ) -> None:
        self.info = info or EngineInfo(
            model="scripted",
            kind="scripted",
            architecture="Scripted",
            device="cpu",
            dtype="none",
            max_context_tokens=512,
            vocab_size=256,
            eos_token_ids=[],
            max_batch_size=64,
        )
        self._script = script or hashed_script(self.info.vocab_size)
        self._before_step = before_step
        self._inbox: deque[Primitive] = deque()
        self._contexts: dict[int, _Context] = {}
        #: Failed ids, until they are freed.
        self._failures: dict[int, Failed] = {}
        self._steps = self._filled = self._generated = 0
        self.closed = False

    def submit(self, primitives: Sequence[Primitive]) -> None:
        """See `Engine.submit`."""
        self._inbox.extend(primitives)

    def step(self) -> StepResult:
        """See `Engine.step`."""
        if self._before_step is not None:
            self._before_step()
        events: list[Event] = []
        while self._inbox:
            self._accept(self._inbox.popleft(), events)
        for context_id, context in list(self._contexts.items()):
            if context.queue:
                self._advance(context_id, context, events)
        self._steps += 1
        return StepResult(events, any(context.queue for context in self._contexts.values()))

    def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        return EngineStats(
            running=sum(bool(context.queue) for context in self._contexts.values()),
            contexts=len(self._contexts),
            steps=self._steps,
            filled_tokens=self._filled,
            generated_tokens=self._generated,
        )

    def close(self) -> None:
        """See `Engine.close`."""
        self._contexts.clear()
        self.closed = True

    def _accept(self, primitive: Primitive, events: list[Event]) -> None:
        context_id = primitive.context_id
        if isinstance(primitive, FreeContext):
            self._contexts.pop(context_id, None)
            self._failures.pop(context_id, None)
            return
        if context_id in self._failures:
            # What was on its way when the context failed is answered the same.
            events.append(self._failures[context_id])
            return
        context = self._contexts.get(context_id)
        parent_id = primitive.parent_context_id
        if parent_id is not None:
            parent = self._contexts.get(parent_id)
            if context is not None:
                self._fail(context_id, "invalid_request", "the context exists", events)
                return
            if parent is None:
                self._fail(context_id, "unknown_context", f"no context {parent_id}", events)
                return
            # The fork happens after everything that was submitted to the parent before it.
            while parent.queue:
                self._advance(parent_id, parent, events)
            if parent_id not in self._contexts:
                self._fail(context_id, "unknown_context", f"no context {parent_id}", events)
                return
            context = self._contexts[context_id] = _Context(list(parent.token_ids))
        if context is None:
            if isinstance(primitive, Generate):
                self._fail(context_id, "unknown_context", f"no context {context_id}", events)
                return
            context = self._contexts[context_id] = _Context()
        context.queue.append(primitive)

    def _advance(self, context_id: int, context: _Context, events: list[Event]) -> None:
        primitive = context.queue[0]
        if isinstance(primitive, Fill):
            self._fill(context_id, context, primitive, events)
        else:
            self._generate(context_id, context, primitive, events)

    def _fill(self, context_id: int, context: _Context, fill: Fill, events: list[Event]) -> None:
        if not all(0 <= token_id < self.info.vocab_size for token_id in fill.token_ids):
            self._fail(context_id, "invalid_request", "a token outside the vocabulary", events)
            return
        if len(context.token_ids) + len(fill.token_ids) > self.info.max_context_tokens:
            self._fail(context_id, "context_too_long", "too many tokens", events)
            return
        logprobs: list[TokenLogprobs | None] | None = None
        if fill.prompt_logprobs is not None:
            logprobs = [self._logprobs(token, fill.prompt_logprobs) for token in fill.token_ids]
            if not context.token_ids:
                logprobs[:1] = [None]
        context.token_ids += fill.token_ids
        context.queue.popleft()
        self._filled += len(fill.token_ids)
        events.append(Filled(context_id, len(fill.token_ids), 0, logprobs))

    def _generate(
        self, context_id: int, context: _Context, generate: Generate, events: list[Event]
    ) -> None:
        sampling = generate.sampling
        full = len(context.token_ids) >= self.info.max_context_tokens
        if context.generated >= sampling.max_tokens or full:
            self._finish(context)
            events.append(Generated(context_id, [], None, "length"))
            return
        token_id = self._script(context.token_ids)
        context.token_ids.append(token_id)
        context.generated += 1
        self._generated += 1
        ends = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            ends.update(self.info.eos_token_ids)
        finish = "stop" if token_id in ends else None
        if finish is None and context.generated == sampling.max_tokens:
            finish = "length"
        logprobs = None
        if sampling.logprobs is not None:
            logprobs = [self._logprobs(token_id, sampling.logprobs)]
        if finish is not None:
            self._finish(context)
        events.append(Generated(context_id, [token_id], logprobs, finish))  # type: ignore[arg-type]

    @staticmethod
    def _finish(context: _Context) -> None:
        context.queue.popleft()
        context.generated = 0

    def _fail(self, context_id: int, code: str, message: str, events: list[Event]) -> None:
        self._contexts.pop(context_id, None)
        failure = Failed(context_id, code, message)  # type: ignore[arg-type]
        self._failures[context_id] = failure
        events.append(failure)

    @staticmethod
    def _logprobs(token_id: int, count: int) -> TokenLogprobs:
        top = [(token_id if index == 0 else index, -0.5 - index) for index in range(count)]
        return TokenLogprobs(token_id, -0.5, top)


# --- what every engine has to do ---


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


def _idle_engines_do_nothing(engine: Engine) -> None:
    before = engine.stats()
    assert engine.step() == StepResult([], False)
    run_until_idle(engine, Fill(1, [5, 6]), Generate(1, greedy(3)))
    after = engine.stats()
    assert after.generated_tokens - before.generated_tokens == 3
    assert after.filled_tokens + after.cached_tokens > before.filled_tokens + before.cached_tokens
    assert after.running == 0
    assert after.contexts == 1


#: The stories of `check_engine`, one by one.
ENGINE_CHECKS: tuple[Callable[[Engine], None], ...] = (
    _fill_then_generate,
    _greedy_is_repeatable,
    _no_tokens_asked_for,
    _forks_begin_at_the_parents_end,
    _forks_outlive_their_parent,
    _generated_tokens_are_part_of_the_context,
    _stop_ids_end_a_generation,
    _freeing_cancels,
    _failures_are_events,
    _a_full_context_ends_with_length,
    _a_failure_harms_nobody_else,
    _logprobs_where_asked_for,
    _seeds_repeat,
    _idle_engines_do_nothing,
)


def check_engine(factory: Callable[[], Engine]) -> None:
    """Put an engine through every story of the protocol.

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
