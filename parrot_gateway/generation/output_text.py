"""The text of one candidate, and where in it the text of each token begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from parrot_engine.protocol import FinishReason, TokenLogprobs
from parrot_engine.text import OutputText, Tokenizer

from parrot_gateway.generation.request import TextToken


class TextDelta(NamedTuple):
    """What a push made visible."""

    text: str
    #: Tokens of which some text is visible now, each given out once.
    tokens: list[TextToken]
    #: How many of the pushed ids belong to the candidate; fewer than pushed after a stop string.
    num_tokens: int
    finish_reason: FinishReason | None


class ChoiceText:
    """One candidate's text.

    Args:
        tokenizer: the model's.
        prompt_token_ids: what the candidate continues; decides about a leading space.
        stop: strings that end the text.
        skip_special_tokens: leave special tokens out of the text.
    """

    __slots__ = ("_output", "_pending")

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        stop: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self._output = OutputText(
            tokenizer, prompt_token_ids, stop, skip_special_tokens=skip_special_tokens
        )
        #: Tokens whose text is not visible yet.
        self._pending: list[TextToken] = []

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return self._output.finished

    def push(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] | None = None,
        finish_reason: FinishReason | None = None,
    ) -> TextDelta:
        """Take the tokens of one engine step.

        With `finish_reason` "stop" the last id ended the text and is no part of it.
        """
        if logprobs is None:
            delta = self._output.push(token_ids, finish_reason)
            return TextDelta(delta.text, [], delta.num_tokens, delta.finish_reason)
        offsets: list[int] = []
        delta = self._output.push(token_ids, finish_reason, offsets=offsets)
        visible = len(token_ids) - (finish_reason == "stop")
        self._pending += [
            TextToken(logprobs[position], offset, is_end=position >= visible)
            for position, offset in enumerate(offsets)
        ]
        tokens = self._pending
        if delta.finish_reason is None or delta.stop_string is not None:
            # Tokens that lie wholly in held text stay behind; after a stop string, for good.
            shown = 0
            while shown < len(tokens) and tokens[shown].offset < self._output.num_shown:
                shown += 1
            tokens = tokens[:shown]
        self._pending = self._pending[len(tokens) :]
        return TextDelta(delta.text, tokens, delta.num_tokens, delta.finish_reason)
