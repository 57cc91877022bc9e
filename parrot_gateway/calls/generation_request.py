"""Requests to engines and the updates that come back: plain values, no HTTP, no waiting."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from parrot_engine.protocol import FinishReason, SamplingParams, TokenLogprobs

from parrot_gateway.calls.reasoning import ReasoningStart
from parrot_gateway.calls.tools.parsing import ContentPiece, ToolParsing, ToolPiece


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """One tokenized prompt."""

    token_ids: list[int]
    #: As the caller wrote it; None when token ids were given.
    text: str | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One call: every prompt gets `best_of` candidates, of which `n` are answered."""

    prompts: Sequence[TokenizedPrompt]
    #: `max_tokens` 0 fills the prompts and generates nothing. `stop` is applied here, not by the
    #: engine.
    sampling: SamplingParams
    n: int = 1
    best_of: int = 1
    #: Alternatives per prompt token to report; None reports nothing.
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    #: Prefixes are shared only under the same salt.
    salt: str = ""
    #: Whether engines may find the beginning of a prompt in their caches.
    is_cached: bool = True
    #: The field that the sampling's grammar comes from, for errors.
    grammar_param: str | None = None
    #: Text of each prompt that precedes its choices; None echoes nothing.
    echoes: Sequence[str] | None = None
    #: How tool calls are read out of the text; None reads none.
    tools: ToolParsing | None = None
    #: Where reasoning is read out of the text; None reads none.
    reasoning: ReasoningStart | None = None


class TextToken(NamedTuple):
    """A token's log-probability and where its text begins.

    The offset counts characters from the beginning of the choice's text. A token that completes
    no character begins where the character will.
    """

    logprobs: TokenLogprobs
    offset: int
    #: The end-of-text or stop id that ended the candidate; not part of its text.
    is_end: bool = False


#: Beside the reason why an answer ended, in all APIs: its JSON was closed near `max_tokens`.
CLOSED = {"finish_details": {"type": "max_tokens"}}

AnswerFinishReason: TypeAlias = FinishReason | Literal["tool_calls"]


class PromptFilled(NamedTuple):
    """A prompt is in the engine's memory."""

    prompt: int
    cached_tokens: int
    #: One entry a token when requested; None for the first.
    logprobs: list[TokenLogprobs | None] | None


class ChoiceDelta(NamedTuple):
    """Text and tokens that one engine step added to one candidate."""

    prompt: int
    #: Number of the candidate within its prompt, from 0.
    choice: int
    text: str
    #: Tokens whose text became visible, when log-probabilities were requested.
    tokens: list[TextToken]
    #: Every id generated in this step up to the end of the candidate.
    token_ids: list[int]
    finish_reason: AnswerFinishReason | None
    #: The text as content and pieces of tool calls, where tools may be called.
    pieces: list[ToolPiece] | None = None
    #: Reasoning that precedes the text, and is no part of it.
    reasoning: str = ""
    #: The one that ended the candidate, if a stop string did and that is known.
    stop_string: str | None = None
    #: It ended by a `stop` to which its grammar led it near `max_tokens`.
    is_closed: bool = False

    @property
    def content(self) -> str:
        """Text that is no part of a tool call."""
        if self.pieces is None:
            return self.text
        return "".join(piece.text for piece in self.pieces if isinstance(piece, ContentPiece))


Update: TypeAlias = PromptFilled | ChoiceDelta


def choice_seed(seed: int | None, choice: int) -> int | None:
    """The seed of one candidate: reproducible, and different for each.

    The first keeps the caller's seed, so that `n` does not change it. The others are hashed
    instead of counted up: else candidate 1 of seed 7 would repeat candidate 0 of seed 8.
    """
    if seed is None:
        return None
    if choice == 0:
        return seed & (2**63 - 1)
    digest = hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
