"""The text of one candidate as its tokens arrive: detokenized, cut at stop strings.

A pure state machine; who generates and who reads is not its business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from parrot_engine.protocol import FinishReason, TokenLogprobs
from parrot_engine.text import IncrementalDetokenizer, StopStrings, Tokenizer

from parrot_gateway.generation.request import TextToken


class TextDelta(NamedTuple):
    """What a push made visible."""

    text: str
    #: Tokens of which some text is visible now, each given out once.
    tokens: list[TextToken]
    #: How many of the pushed ids belong to the candidate; fewer than pushed after a stop string.
    num_tokens: int
    finish_reason: FinishReason | None
    #: Whether a stop string ended it, so that the engine has to be told.
    stopped_by_text: bool


class ChoiceText:
    """One candidate's text.

    Args:
        tokenizer: the model's.
        prompt_token_ids: what the candidate continues; decides about a leading space.
        stop: strings that end the text.
        skip_special_tokens: leave special tokens out of the text.
    """

    __slots__ = (
        "_detokenizer",
        "_length",
        "_pending",
        "_released",
        "_stops",
        "_watches_stops",
        "finished",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        stop: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, prompt_token_ids, skip_special_tokens=skip_special_tokens
        )
        self._stops = StopStrings(stop)
        self._watches_stops = bool(stop)
        #: Characters decoded, and of those the ones given out.
        self._length = 0
        self._released = 0
        #: Tokens whose text is not visible yet.
        self._pending: list[TextToken] = []
        self.finished = False

    def push(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] | None = None,
        finish_reason: FinishReason | None = None,
    ) -> TextDelta:
        """Take the tokens of one engine step.

        With `finish_reason` "stop" the last id ended the text and is no part of it.
        """
        visible = len(token_ids) - 1 if finish_reason == "stop" and token_ids else len(token_ids)
        if not self._watches_stops and logprobs is None:
            text = self._detokenizer.push(token_ids[:visible])
            if finish_reason is not None:
                text += self._detokenizer.flush()
                self.finished = True
            return TextDelta(text, [], len(token_ids), finish_reason, False)
        return self._push_singly(token_ids, visible, logprobs, finish_reason)

    def _push_singly(
        self,
        token_ids: Sequence[int],
        visible: int,
        logprobs: Sequence[TokenLogprobs] | None,
        finish_reason: FinishReason | None,
    ) -> TextDelta:
        """Token by token: where each one begins, and which one completes a stop string."""
        pieces: list[str] = []
        for position in range(visible):
            if logprobs is not None:
                self._pending.append(TextToken(logprobs[position], self._length))
            piece = self._detokenizer.push(token_ids[position : position + 1])
            if self._take(piece, pieces):
                return self._delta(pieces, position + 1, "stop", stopped_by_text=True)
        if finish_reason is not None:
            matched = self._take(self._detokenizer.flush(), pieces)
            if not matched:
                rest = self._stops.flush()
                self._show(rest.text, pieces)
                matched = rest.matched is not None
            if logprobs is not None and visible < len(token_ids):
                self._pending.append(TextToken(logprobs[-1], self._length, is_end=True))
            return self._delta(
                pieces, len(token_ids), "stop" if matched else finish_reason, matched=matched
            )
        return self._delta(pieces, len(token_ids), None)

    def _take(self, piece: str, pieces: list[str]) -> bool:
        """Pass decoded text on as far as it may be seen; whether a stop string was completed."""
        if not piece:
            return False
        self._length += len(piece)
        result = self._stops.push(piece)
        self._show(result.text, pieces)
        return result.matched is not None

    def _show(self, text: str, pieces: list[str]) -> None:
        if text:
            pieces.append(text)
            self._released += len(text)

    def _delta(
        self,
        pieces: list[str],
        num_tokens: int,
        finish_reason: FinishReason | None,
        *,
        stopped_by_text: bool = False,
        matched: bool = False,
    ) -> TextDelta:
        self.finished = finish_reason is not None
        tokens = self._pending
        if not self.finished or stopped_by_text or matched:
            # Tokens that lie wholly in held text stay behind; after a stop string, for good.
            shown = 0
            while shown < len(tokens) and tokens[shown].offset < self._released:
                shown += 1
            tokens, self._pending = tokens[:shown], tokens[shown:]
        else:
            self._pending = []
        return TextDelta("".join(pieces), tokens, num_tokens, finish_reason, stopped_by_text)
