"""A call that loses its engine after any event gives out what it would have without."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
from harness.gateway.scripted_remote import byte_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from parrot_engine.protocol import (
    Event,
    Fill,
    Filled,
    FinishReason,
    FreeContext,
    Generate,
    Generated,
    Primitive,
    SamplingParams,
    TokenLogprobs,
)

from parrot_gateway.backends.own import state as state_module
from parrot_gateway.backends.own.state import GenerationState
from parrot_gateway.calls.generation_request import (
    ChoiceDelta,
    GenerationRequest,
    PromptFilled,
    TextToken,
    TokenizedPrompt,
    Update,
)
from parrot_gateway.calls.usage import Usage

TOKENIZER = byte_tokenizer()
END = TOKENIZER.token_id("<|im_end|>") or 0
#: What the engine writes: parts of stop strings, parts of characters, and now and then the end.
VOCABULARY = [*TOKENIZER.encode("ST OP a € é b c 😀 the fox"), END]


@dataclass
class _Context:
    #: Until it is forked.
    parent: int | None
    token_ids: list[int] = field(default_factory=list)
    queue: deque[Fill | Generate] = field(default_factory=deque)
    #: Of the Generate at the head.
    made: int | None = None


class Engine:
    """Its tokens depend on all that a generation has to keep: prompt, tokens, seed and index."""

    def __init__(self, cached: int) -> None:
        self.contexts: dict[int, _Context] = {}
        self._cached = cached

    def submit(self, primitives: Sequence[Primitive]) -> None:
        for primitive in primitives:
            if isinstance(primitive, FreeContext):
                del self.contexts[primitive.context_id]
            elif isinstance(primitive, Fill | Generate):
                parent = primitive.parent_context_id
                if parent is not None:
                    assert primitive.context_id not in self.contexts
                context = self.contexts.setdefault(primitive.context_id, _Context(parent))
                context.queue.append(primitive)

    def ready(self) -> list[int]:
        """Contexts with something to do: a fork happens after all that its parent had to do."""
        return [
            context_id
            for context_id, context in self.contexts.items()
            if context.queue and (context.parent is None or not self.contexts[context.parent].queue)
        ]

    def work_on(self, context_id: int) -> Event:
        """Do the next thing on a context."""
        context = self.contexts[context_id]
        if context.parent is not None:
            context.token_ids = list(self.contexts[context.parent].token_ids)
            context.parent = None
        head = context.queue[0]
        if isinstance(head, Fill):
            context.queue.popleft()
            context.token_ids += head.token_ids
            scores = None
            if head.prompt_logprobs is not None:
                scores = [None, *(TokenLogprobs(i, -1.0) for i in head.token_ids[1:])]
            return Filled(context_id, len(head.token_ids), self._cached, scores)
        sampling = head.sampling
        if context.made is None:
            context.made = head.generated
        begin = len(context.token_ids) - context.made
        assert begin > 0
        made = context.token_ids[begin:]
        text = f"{context.token_ids[:begin]} {made} {sampling.seed} {len(made)}"
        token = VOCABULARY[zlib.crc32(text.encode()) % len(VOCABULARY)]
        context.token_ids.append(token)
        context.made += 1
        reason: FinishReason | None = None
        if token == END:
            reason = "stop"
        elif context.made >= sampling.max_tokens:
            reason = "length"
        if reason is not None:
            context.queue.popleft()
        logprobs = None
        if sampling.logprobs is not None:
            logprobs = [TokenLogprobs(token, -1.0 / (1 + token))]
        return Generated(context_id, [token], logprobs, reason)


class Outcome(NamedTuple):
    """All that a call has given out."""

    filled: dict[int, PromptFilled]
    texts: dict[tuple[int, int], str]
    token_ids: dict[tuple[int, int], list[int]]
    tokens: dict[tuple[int, int], list[TextToken]]
    ends: dict[tuple[int, int], tuple[str | None, str | None]]
    rankings: list[list[int]]
    usage: Usage


def run(
    request: GenerationRequest, seed: int | None, order: list[int], losses: set[int]
) -> Outcome:
    """Run a call to its end.

    Args:
        order: which of the contexts comes next, over and over.
        losses: numbers of events after which the engine is lost.
    """
    state = GenerationState(request, TOKENIZER, seed)
    outcome = Outcome({}, {}, {}, {}, {}, [], Usage(0, 0, 0))
    engine, context_ids, count = Engine(cached=1), iter(range(1, 100_000)), 0

    def begin() -> None:
        while needed := state.contexts_needed:
            engine.submit(state.begin([next(context_ids) for _ in range(needed)]))

    begin()
    while not state.done:
        ready = engine.ready()
        event = engine.work_on(ready[order[count % len(order)] % len(ready)])
        progress = state.apply(event)
        if progress.update is not None:
            note(progress.update, outcome)
        count += 1
        if state.done:
            break
        if count in losses:
            left = state.resume()
            assert left.prompts
            assert all(prompt.token_ids for prompt in left.prompts)
            engine = Engine(cached=2)
        else:
            engine.submit(progress.primitives)
        begin()
    rankings = [state.ranking(prompt) for prompt in range(len(request.prompts))]
    # How much is cached is the engine's own business.
    usage = state.usage._replace(cached_tokens=0)
    return outcome._replace(rankings=rankings, usage=usage)


def note(update: Update, outcome: Outcome) -> None:
    if isinstance(update, PromptFilled):
        assert update.prompt not in outcome.filled, "given out twice"
        outcome.filled[update.prompt] = update._replace(cached_tokens=0)
        return
    assert isinstance(update, ChoiceDelta)
    key = (update.prompt, update.choice)
    assert key not in outcome.ends, "after its end"
    outcome.texts[key] = outcome.texts.get(key, "") + update.text
    outcome.token_ids.setdefault(key, []).extend(update.token_ids)
    outcome.tokens.setdefault(key, []).extend(update.tokens)
    if update.finish_reason is not None:
        outcome.ends[key] = (update.finish_reason, update.stop_string)


@st.composite
def requests(draw: st.DrawFn) -> GenerationRequest:
    best_of = draw(st.integers(1, 3))
    logprobs = draw(st.sampled_from([None, 0, 2]))
    sampling = SamplingParams(
        draw(st.integers(0, 12)),
        seed=draw(st.sampled_from([None, 7])),
        logprobs=logprobs,
        stop=tuple(draw(st.lists(st.sampled_from(["STOP", "a", "é", "€ "]), max_size=2))),
    )
    texts = draw(st.lists(st.sampled_from(["Hi", "Hello world", "x"]), min_size=1, max_size=4))
    return GenerationRequest(
        [TokenizedPrompt(TOKENIZER.encode(text)) for text in texts],
        sampling,
        n=draw(st.integers(1, best_of)),
        best_of=best_of,
        prompt_logprobs=draw(st.sampled_from([None, 1])),
    )


@given(
    requests(),
    st.lists(st.integers(0, 20), min_size=1, max_size=30),
    st.sets(st.integers(1, 60), max_size=12),
    st.sampled_from([1, 4, 256]),
)
def test_a_loss_after_any_event_changes_nothing(
    request: GenerationRequest, order: list[int], losses: set[int], limit: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_module, "MAX_OPEN_CONTEXTS", limit)
        seed = 99 if request.sampling.seed is None else None
        assert run(request, seed, order, losses) == run(request, seed, order, set())


def test_the_comparison_sees_tokens_that_are_drawn_otherwise() -> None:
    """The control: an engine that forgets how much was generated writes something else."""
    request = GenerationRequest([TokenizedPrompt([1, 2])], SamplingParams(40, seed=7))
    whole = run(request, None, [0], set())
    assert run(request, None, [0], {3}) == whole
    with pytest.MonkeyPatch.context() as patch:
        original = state_module.Generate

        def forgetful(*args: Any) -> Generate:
            return original(*args[:4])

        patch.setattr(state_module, "Generate", forgetful)
        assert run(request, None, [0], {3}) != whole


def test_only_what_is_open_is_filled_again() -> None:
    prompts = [TokenizedPrompt([1, 2]), TokenizedPrompt([3, 4])]
    state = GenerationState(GenerationRequest(prompts, SamplingParams(2, seed=1)), TOKENIZER)
    state.begin([1, 2])
    state.apply(Filled(1, 2, 1))
    state.apply(Generated(1, [VOCABULARY[0]]))
    state.apply(Generated(1, [VOCABULARY[0]], finish_reason="length"))
    assert (state.cached_tokens, state.engine_filled, state.progress) == (1, 2, 3)
    left = state.resume()
    assert left.prompts == [prompts[1]]
    assert state.contexts_needed == 1
    fill, generate = state.begin([3])
    assert (fill, generate) == (Fill(3, [3, 4]), Generate(3, SamplingParams(2, seed=1)))
    state.apply(Filled(3, 2, 2))
    state.apply(Generated(3, [VOCABULARY[1]]))
    assert state.cached_tokens == 3
    assert state.resume().sampling.max_tokens == 1
    fill, generate = state.begin([4])
    assert fill == Fill(4, [3, 4, VOCABULARY[1]])
    assert isinstance(generate, Generate)
    assert generate.generated == 1
    # What another engine finds is not found for the call a second time.
    assert state.apply(Filled(4, 3, 2)) == (None, [])
    assert (state.cached_tokens, state.refilled_tokens) == (3, 1)
    assert state.apply(Generated(3, [0])) == (None, []), "an event of the lost engine"


def test_prompts_of_a_call_without_a_seed_are_drawn_apart() -> None:
    prompts = [TokenizedPrompt([1])] * 3
    request = GenerationRequest(prompts, SamplingParams(2), n=2, best_of=2)
    state = GenerationState(request, TOKENIZER, 5)
    primitives = state.begin(list(range(1, 10)))
    seeds = [each.sampling.seed for each in primitives if isinstance(each, Generate)]
    assert len(set(seeds)) == 6
    assert None not in seeds
