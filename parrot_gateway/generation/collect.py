"""Waits for the whole of a call: what an answer that is not streamed is made of."""

from __future__ import annotations

from dataclasses import dataclass, field

from parrot_gateway.generation.generate import Generation
from parrot_gateway.generation.request import (
    AnswerFinishReason,
    ChoiceDelta,
    PromptFilled,
    TextToken,
)
from parrot_gateway.generation.tools.parsing import ArgumentsPiece, CallBegin, ContentPiece


@dataclass(slots=True)
class CollectedCall:
    """One tool call."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Candidate:
    """One candidate, joined from its deltas."""

    #: Content; of a call that may use tools, without the calls.
    texts: list[str] = field(default_factory=list)
    calls: list[CollectedCall] = field(default_factory=list)
    tokens: list[TextToken] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    #: A call that generates nothing ends by its length.
    finish_reason: AnswerFinishReason = "length"

    @property
    def text(self) -> str:
        """All content."""
        return "".join(self.texts)

    def add(self, delta: ChoiceDelta) -> None:
        """Take more of it."""
        if delta.pieces is None:
            if delta.text:
                self.texts.append(delta.text)
        else:
            for piece in delta.pieces:
                if isinstance(piece, ContentPiece):
                    self.texts.append(piece.text)
                elif isinstance(piece, CallBegin):
                    self.calls.append(CollectedCall(piece.id, piece.name))
                elif isinstance(piece, ArgumentsPiece):
                    self.calls[piece.call].arguments += piece.text
        self.tokens += delta.tokens
        self.token_ids += delta.token_ids
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason

    def as_delta(self, prompt: int, choice: int) -> ChoiceDelta:
        """All of it at once, under another number."""
        return ChoiceDelta(
            prompt, choice, self.text, self.tokens, self.token_ids, self.finish_reason
        )


@dataclass(slots=True)
class CollectedPrompt:
    """The answers to one prompt."""

    #: Those that are answered, best first.
    candidates: list[Candidate]
    filled: PromptFilled | None = None


async def collect(generation: Generation, prompts: int, best_of: int) -> list[CollectedPrompt]:
    """Run an entered generation to its end; one entry a prompt.

    Raises:
        GatewayError: as `Generation.next`.
    """
    collected = [CollectedPrompt([Candidate() for _ in range(best_of)]) for _ in range(prompts)]
    while not generation.state.done:
        update = await generation.next()
        if update is None:
            continue
        if isinstance(update, PromptFilled):
            collected[update.prompt].filled = update
        else:
            collected[update.prompt].candidates[update.choice].add(update)
    for prompt, entry in enumerate(collected):
        ranking = generation.state.ranking(prompt)
        entry.candidates = [entry.candidates[index] for index in ranking]
        if len(ranking) < best_of:
            generation.choose(
                each.as_delta(prompt, rank) for rank, each in enumerate(entry.candidates)
            )
    return collected
