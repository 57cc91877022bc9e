"""Random programs of primitives, and what each of their contexts has to say.

The order in which an engine runs primitives must not show in the outputs. So a program's outcome
is found by executing each primitive at once, on plain lists of tokens; only a freed context may
say less than that.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import strategies as st
from parrot_engine.protocol import (
    Failed,
    FailureCode,
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

from harness.engine.doubles import POISON, Trace, reference_generate, reference_logprobs


def engine_limits(**others: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Arguments of `scripted_engine` that are narrow for a random program; `others` go first."""
    limits = {
        "max_position": st.just(60),
        "block_size": st.integers(1, 5),
        "num_blocks": st.integers(8, 40),
        "max_batch_size": st.integers(1, 5),
        "prefix_caching": st.booleans(),
        **others,
    }
    return st.fixed_dictionaries(limits)


@dataclass
class Expected:
    """Output of a context that is never freed."""

    tokens: list[int] = field(default_factory=list)
    salt: str = ""
    generated: list[int] = field(default_factory=list)
    finish: list[FinishReason] = field(default_factory=list)
    #: Length and scores of each Fill.
    fills: list[tuple[int, list[TokenLogprobs | None] | None]] = field(default_factory=list)
    failure: FailureCode | None = None
    freed: bool = False


class Reference:
    """Executes primitives on lists of tokens."""

    def __init__(self, max_context: int) -> None:
        self.max_context = max_context
        self.contexts: dict[int, Expected] = {}

    def take(self, primitive: Primitive) -> None:
        """Execute one primitive."""
        if isinstance(primitive, FreeContext):
            self.contexts[primitive.context_id].freed = True
            return
        context = self.contexts.get(primitive.context_id)
        if context is None:
            context = self.contexts[primitive.context_id] = Expected()
            if isinstance(primitive, Fill):
                context.salt = primitive.salt
            if primitive.parent_context_id is not None:
                parent = self.contexts[primitive.parent_context_id]
                context.tokens = list(parent.tokens)
                context.failure = parent.failure
        if context.failure is not None:
            return
        if isinstance(primitive, Fill):
            self._fill(context, primitive)
        else:
            self._generate(context, primitive)

    def _fill(self, context: Expected, fill: Fill) -> None:
        start = len(context.tokens)
        tokens = context.tokens + fill.token_ids
        if len(tokens) > self.max_context:
            context.failure = "context_too_long"
            return
        scores = None
        if fill.prompt_logprobs is not None:
            if POISON in tokens[:-1] and fill.token_ids:
                context.failure = "numerical_error"
                return
            scores = reference_logprobs(tokens, start, fill.prompt_logprobs)
        context.tokens = tokens
        context.fills.append((len(fill.token_ids), scores))

    def _generate(self, context: Expected, generate: Generate) -> None:
        if not context.tokens:
            context.failure = "invalid_request"
            return
        room = len(context.tokens) < self.max_context and generate.sampling.max_tokens > 0
        if room and POISON in context.tokens:
            context.failure = "numerical_error"
            return
        tokens, finish = reference_generate(
            context.tokens, generate.sampling, max_context=self.max_context
        )
        context.tokens = context.tokens + tokens
        context.generated += tokens
        context.finish.append(finish)


#: One element: primitives that are submitted together, and steps to run afterwards.
Program = list[tuple[list[Primitive], int]]


def random_program(source: random.Random, *, length: int = 12) -> Program:
    """A program with much sharing: few different tokens, forks of forks, frees at any time."""
    program: Program = []
    live: list[int] = []
    next_id = 0
    prompts = [[source.randint(1, 3) for _ in range(source.randint(1, 20))] for _ in range(3)]
    for _ in range(length):
        batch: list[Primitive] = []
        for _ in range(source.choice([1, 1, 2, 4])):
            choice = source.random()
            priority = source.choice([0, 0, 0, 1, -1])
            if choice < 0.12 and live:
                freed = live.pop(source.randrange(len(live)))
                batch.append(FreeContext(freed))
                continue
            parent = None
            if live and choice < 0.4:
                context_id = source.choice(live)
            else:
                context_id, next_id = next_id, next_id + 1
                if live and choice < 0.75:
                    parent = source.choice(live)
                live.append(context_id)
            is_new_root = parent is None and context_id == next_id - 1
            if is_new_root or source.random() < 0.5:
                batch.append(_random_fill(source, context_id, parent, prompts, priority))
            else:
                sampling = random_sampling(source)
                batch.append(Generate(context_id, sampling, parent, priority))
        program.append((batch, source.choice([0, 0, 1, 2, 5])))
    return program


def _random_fill(
    source: random.Random,
    context_id: int,
    parent: int | None,
    prompts: Sequence[list[int]],
    priority: int,
) -> Fill:
    tokens = list(source.choice(prompts)[: source.randint(0, 20)])
    if source.random() < 0.3:
        tokens.append(source.randint(4, 6))
    if source.random() < 0.02:
        tokens.append(POISON)
    return Fill(
        context_id,
        tokens,
        parent,
        prompt_logprobs=source.choice([None, None, None, 0, 2]),
        priority=priority,
        pin=source.random() < 0.15,
    )


def random_sampling(source: random.Random) -> SamplingParams:
    """Parameters whose outcome is determined."""
    params = SamplingParams(max_tokens=source.choice([0, 1, 2, 5, 9]), temperature=0)
    if source.random() < 0.4:
        params = replace(params, temperature=0.9, seed=source.randrange(100))
    if source.random() < 0.2:
        params = replace(params, repetition_penalty=1.3, frequency_penalty=0.4)
    if source.random() < 0.3:
        params = replace(params, ignore_eos=True)
    if source.random() < 0.2:
        params = replace(params, stop_token_ids=(5, 7), min_tokens=2)
    return params


def check_program(trace: Trace, program: Program) -> None:
    """Run a program and compare what each context said with what it has to say.

    Raises:
        AssertionError: an output that is wrong, missing, or too much.
    """
    reference = Reference(trace.engine.info.max_context_tokens)
    for batch, steps in program:
        trace.submit(*batch)
        for primitive in batch:
            reference.take(primitive)
        for _ in range(steps):
            trace.step()
    trace.run()
    for context_id, expected in reference.contexts.items():
        _check_context(trace, context_id, expected)
    trace.submit(*[FreeContext(context_id) for context_id in reference.contexts]).run()
    stats = trace.engine.stats()
    assert (stats.contexts, stats.running, stats.waiting) == (0, 0, 0)
    assert stats.free_blocks == trace.engine.info.num_blocks


def _check_context(trace: Trace, context_id: int, expected: Expected) -> None:
    generated, finish = trace.tokens(context_id), trace.finish(context_id)
    filled = trace.of(context_id, Filled)
    failures = trace.of(context_id, Failed)
    events = trace.of(context_id, Generated)
    codes = {failure.code for failure in failures}
    assert codes <= {expected.failure}, f"context {context_id}: {failures}"
    if not expected.freed:
        assert generated == expected.generated, f"context {context_id}"
        assert finish == expected.finish
        assert len(filled) == len(expected.fills)
        assert bool(codes) == (expected.failure is not None)
    assert generated == expected.generated[: len(generated)], f"context {context_id}"
    assert finish == expected.finish[: len(finish)]
    assert all(len(event.token_ids) <= 1 for event in events)
    for event, (num_tokens, scores) in zip(filled, expected.fills, strict=False):
        assert event.num_tokens == num_tokens
        assert 0 <= event.cached_tokens <= num_tokens
        _check_scores(event.prompt_logprobs, scores)


def _check_scores(
    found: list[TokenLogprobs | None] | None, expected: list[TokenLogprobs | None] | None
) -> None:
    assert (found is None) == (expected is None)
    assert len(found or []) == len(expected or [])
    for one, other in zip(found or [], expected or [], strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.token_id == other.token_id
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]
