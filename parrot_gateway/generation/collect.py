"""Waits for the whole of a call: what an answer that is not streamed is made of.

Or hands its text on while it is written, to whoever reads it within the gateway.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from parrot_engine.protocol import FinishReason

from parrot_gateway.generation.generate import Generation
from parrot_gateway.generation.request import ChoiceDelta, PromptFilled, TextToken, Usage


@dataclass(slots=True)
class Candidate:
    """One candidate, joined from its deltas."""

    pieces: list[str] = field(default_factory=list)
    tokens: list[TextToken] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    #: A call that generates nothing ends by its length.
    finish_reason: FinishReason = "length"

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.pieces)


@dataclass(slots=True)
class Outcome:
    """What became of one prompt."""

    #: The answered candidates, best first.
    candidates: list[Candidate]
    filled: PromptFilled | None = None


async def collect(generation: Generation, prompts: int, best_of: int) -> list[Outcome]:
    """Run an entered generation to its end; one outcome a prompt.

    Raises:
        GatewayError: as `Generation.next`.
    """
    outcomes = [Outcome([Candidate() for _ in range(best_of)]) for _ in range(prompts)]
    while not generation.state.done:
        update = await generation.next()
        if update is None:
            continue
        outcome = outcomes[update.prompt]
        if isinstance(update, PromptFilled):
            outcome.filled = update
            continue
        candidate = outcome.candidates[update.choice]
        if update.text:
            candidate.pieces.append(update.text)
        candidate.tokens += update.tokens
        candidate.token_ids += update.token_ids
        if update.finish_reason is not None:
            candidate.finish_reason = update.finish_reason
    for prompt, outcome in enumerate(outcomes):
        outcome.candidates = [outcome.candidates[i] for i in generation.state.ranking(prompt)]
    return outcomes


class TextReader(Protocol):
    """Reads the text of a call within the gateway, where no client has to be answered."""

    def write(self, text: str) -> None:
        """The next piece of the text.

        Raises:
            GatewayError: no more of it is wanted; ends the call.
        """
        ...

    def end(self, usage: Usage) -> None:
        """The text is complete."""
        ...


async def hand_over(
    generation: Generation, reader: TextReader, *, best_of: int = 1, echo: str = ""
) -> None:
    """Run a generation of one prompt with one answer, and hand its text to `reader`.

    Args:
        generation: not entered yet.
        reader: gets the text as it is written; of several candidates only the best one, at the end.
        best_of: candidates.
        echo: precedes the text.

    Raises:
        GatewayError: as `Generation.next`, or what the reader raised.
    """
    if echo:
        reader.write(echo)
    with generation:
        if best_of > 1:
            (outcome,) = await collect(generation, 1, best_of)
            reader.write(outcome.candidates[0].text)
        while not generation.state.done:
            update = await generation.next()
            if isinstance(update, ChoiceDelta) and update.text:
                reader.write(update.text)
    reader.end(generation.state.usage)
