"""A deterministic engine in the gateway's process: each token is a hash of all tokens before it.

One token too many, too few or changed in a context, another seed, or another count of generated
tokens: everything that follows differs. It can be stalled and killed at any point of its work.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from zlib import crc32

from parrot_engine.protocol import (
    Event,
    Fill,
    Filled,
    FreeContext,
    Generate,
    Generated,
    GenerateEnd,
    Primitive,
    SamplingParams,
    TokenLogprobs,
)


def next_token(
    ids: Sequence[int], generated: int, sampling: SamplingParams, vocabulary: Sequence[int]
) -> int:
    """The token that follows `ids`, of which the last `generated` were generated."""
    seed = (sampling.seed or 0) if sampling.temperature else -1
    digest = crc32(array("I", ids).tobytes() + b"%d/%d" % (seed, generated))
    return vocabulary[digest % len(vocabulary)]


def logprobs_of(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -token_id / 512, [])


@dataclass(slots=True)
class _Context:
    token_ids: list[int]
    #: Not computed yet.
    fill: Fill | None = None
    generate: Generate | None = None
    generated: int = 0
    parent: int | None = None


class HashingEngine:
    """Takes primitives and gives the events of one step at a time.

    Args:
        vocabulary: tokens that are written.
        eos: tokens that end a text.
        draw: decides how far each context comes in a step.
    """

    def __init__(self, vocabulary: Sequence[int], eos: Sequence[int], draw: Random) -> None:
        self._vocabulary = vocabulary
        self._eos = frozenset(eos)
        self._draw = draw
        self.contexts: dict[int, _Context] = {}

    @property
    def is_busy(self) -> bool:
        return any(each.fill or each.generate for each in self.contexts.values())

    def submit(self, primitives: Sequence[Primitive]) -> None:
        """Take primitives; a wrong one is a mistake of the gateway."""
        for primitive in primitives:
            if isinstance(primitive, Fill):
                assert primitive.context_id not in self.contexts, "a context is filled twice"
                assert primitive.token_ids, "a Fill of nothing"
                self._open(primitive).fill = primitive
            elif isinstance(primitive, Generate):
                context = self._open(primitive)
                assert context.generate is None, "a context generates twice"
                assert 0 <= primitive.generated < primitive.sampling.max_tokens
                context.generate, context.generated = primitive, primitive.generated
            else:
                assert isinstance(primitive, FreeContext)
                self.contexts.pop(primitive.context_id, None)

    def _open(self, primitive: Fill | Generate) -> _Context:
        parent = primitive.parent_context_id
        if parent is not None:
            assert primitive.context_id not in self.contexts, "a fork into a context that exists"
            assert parent in self.contexts, "a fork of no context"
        if primitive.context_id not in self.contexts:
            assert parent is not None or isinstance(primitive, Fill), "no context to generate on"
            self.contexts[primitive.context_id] = _Context([], parent=parent)
        return self.contexts[primitive.context_id]

    def step(self) -> list[Event]:
        """Some contexts come further, in the order that they came."""
        events: list[Event] = []
        for context_id, context in list(self.contexts.items()):
            if self._draw.random() < 0.3:
                continue
            if context.parent is not None:
                parent = self.contexts.get(context.parent)
                assert parent is not None, "a parent is freed before it was forked"
                if parent.fill is not None:
                    continue
                context.token_ids, context.parent = list(parent.token_ids), None
            if context.fill is not None:
                events.append(self._fill(context_id, context, context.fill))
            elif context.generate is not None:
                events.append(self._advance(context_id, context, context.generate))
        return events

    def _fill(self, context_id: int, context: _Context, fill: Fill) -> Event:
        context.token_ids += fill.token_ids
        context.fill = None
        logprobs: list[TokenLogprobs | None] | None = None
        if fill.prompt_logprobs is not None:
            logprobs = [None, *map(logprobs_of, fill.token_ids[1:])]
        return Filled(context_id, len(fill.token_ids), 0, logprobs)

    def _advance(self, context_id: int, context: _Context, generate: Generate) -> Generated:
        sampling = generate.sampling
        ids: list[int] = []
        reason: GenerateEnd | None = None
        ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else self._eos)
        for _ in range(self._draw.randint(1, 3)):
            token_id = next_token(context.token_ids, context.generated, sampling, self._vocabulary)
            context.token_ids.append(token_id)
            context.generated += 1
            ids.append(token_id)
            if token_id in ends:
                reason = "stop"
            elif context.generated >= sampling.max_tokens:
                reason = "length"
            if reason is not None:
                context.generate = None
                break
        logprobs = None if sampling.logprobs is None else [logprobs_of(i) for i in ids]
        return Generated(context_id, ids, logprobs, reason)
