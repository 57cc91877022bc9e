"""What one engine step computes: the contract between the batcher and the runner.

Plain values, made on the CPU by the batcher, read by the runner and by attention back ends. No
"is prefill" flag: a decode is a row of one token, a chunk of prefill a row of many, and both may
stand in one batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from parrot_engine.protocol import SamplingParams, TokenLogprobs

#: Of which tokens of a row the logits are needed.
LogitsNeed: TypeAlias = Literal["none", "last", "all"]


class BlockCopy(NamedTuple):
    """Copy the KV of a whole block, in every layer, before the step writes anything."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class BatchRow:
    """Consecutive tokens of one context, computed in this step."""

    #: The tokens to compute; at least one.
    token_ids: list[int]
    #: Position of the first of them; KV of positions 0 … start-1 is already in the blocks.
    start: int
    #: Physical block ids covering positions 0 … start + len(token_ids) - 1.
    block_table: list[int]
    logits: LogitsNeed = "none"


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Everything that the runner computes in one step."""

    rows: list[BatchRow]
    copies: list[BlockCopy] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(len(row.token_ids) for row in self.rows)


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What the sampler needs to know of one sequence, beside its logits."""

    params: SamplingParams
    #: Tokens of the context when the Generate began (for the repetition penalty).
    prompt_token_ids: list[int]
    #: Tokens generated since (for the other penalties, `min_tokens`, and the random stream).
    generated_token_ids: list[int]
    #: Resolved seed of the random stream: `params.seed`, or drawn once for this Generate.
    seed: int
    #: Ids that `min_tokens` bans while too few tokens are there: end-of-text and stop ids.
    end_token_ids: frozenset[int]


class SampledToken(NamedTuple):
    """The outcome for one row. `token_id` is None when its logits held a NaN or only -inf."""

    token_id: int | None
    logprobs: TokenLogprobs | None
