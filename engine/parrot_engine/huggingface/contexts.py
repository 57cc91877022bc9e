"""Contexts of the huggingface engine: tokens, past key values, and the work queued on them.

State only; what is done with it is `parrot_engine.huggingface.engine`, what is computed from it
`parrot_engine.huggingface.forward`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor
from transformers import DynamicCache

from parrot_engine.batch import SamplingRow
from parrot_engine.protocol import Fill, FinishReason, Generate, TokenLogprobs


@dataclass(slots=True, eq=False)
class Filling:
    """A Fill in a context's queue."""

    fill: Fill
    #: Where its tokens begin; None before they are part of the context.
    start: int | None = None
    #: With `prompt_logprobs`: one entry per token scored so far.
    scores: list[TokenLogprobs | None] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Generating:
    """A Generate in a context's queue."""

    generate: Generate
    #: Of the random stream; drawn at submission, so that it does not depend on the batch.
    seed: int
    end_token_ids: frozenset[int]
    #: Made when its first token is about to be sampled; its lists grow with the generation.
    row: SamplingRow | None = None

    def begin(self, token_ids: list[int]) -> SamplingRow:
        """The one sampling row; made when the first token, which follows these, comes up."""
        if self.row is None:
            self.row = SamplingRow(
                self.generate.sampling, list(token_ids), [], self.seed, self.end_token_ids
            )
        return self.row

    @property
    def num_generated(self) -> int:
        """Tokens so far."""
        return 0 if self.row is None else len(self.row.generated_token_ids)

    def no_logprobs(self) -> list[TokenLogprobs] | None:
        """The log-probabilities of no tokens: a list only if they were asked for."""
        return [] if self.generate.sampling.logprobs is not None else None


@dataclass(slots=True, eq=False)
class Fork:
    """The point in a parent's queue at which a child begins."""

    child: Context


Work: TypeAlias = Filling | Generating | Fork


@dataclass(slots=True, eq=False)
class Context:
    """One context."""

    id: int
    token_ids: list[int] = field(default_factory=list)
    #: Past key values of the first `computed` tokens.
    cache: DynamicCache | None = None
    computed: int = 0
    #: What the model says behind the last computed token, float32 `[vocab_size]`.
    logits: Tensor | None = None
    queue: deque[Work] = field(default_factory=deque)
    #: Waits in its parent's queue.
    unborn: bool = False
    #: Freed by the caller, but it may still compute what a waiting fork depends on.
    freed: bool = False
    #: Freed or failed for good: nothing shall be computed or kept for it any more.
    gone: bool = False

    @property
    def generating(self) -> Generating | None:
        """The Generate at the head of the queue."""
        head = self.queue[0] if self.queue else None
        return head if isinstance(head, Generating) else None

    @property
    def forks(self) -> list[Context]:
        """The children that wait in the queue and are still wanted."""
        children = [work.child for work in self.queue if isinstance(work, Fork)]
        return [child for child in children if not child.gone]

    def append_sampled(
        self, row: SamplingRow, token_id: int, max_tokens: int
    ) -> FinishReason | None:
        """Append a token that was sampled with `row`; why its generation ends, if it does.

        Args:
            max_tokens: that the context may hold.
        """
        self.token_ids.append(token_id)
        row.generated_token_ids.append(token_id)
        if token_id in row.end_token_ids:
            return "stop"
        if (
            len(row.generated_token_ids) >= row.params.max_tokens
            or len(self.token_ids) >= max_tokens
        ):
            return "length"
        return None
