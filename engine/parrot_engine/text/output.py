"""The text of one generation as its tokens arrive: detokenized, and cut at stop strings.

A pure state machine without an engine. Its caller stops the engine when a delta reports a completed
stop string, because engines do not see stop strings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from parrot_engine.protocol import FinishReason, GenerateEnd
from parrot_engine.text.detokenizer import IncrementalDetokenizer
from parrot_engine.text.stop import StopStrings
from parrot_engine.text.tokenizer import Tokenizer


class OutputDelta(NamedTuple):
    """The effect of one `OutputText.push`."""

    #: Text that became final and is not part of a stop string.
    text: str
    #: Number of pushed ids that belong to the output; fewer than pushed after a stop string.
    num_tokens: int
    #: Set when the output is complete.
    finish_reason: FinishReason | None = None
    #: The stop string that ended it.
    stop_string: str | None = None
    #: True if a token completed the stop string; False if text held back until the end did.
    stopped_by_token: bool = False


class OutputText:
    """The text of one generation.

    Args:
        tokenizer: the model's.
        prompt_token_ids: prompt that the output continues; decides about a leading space.
        stop: strings that end the text; no part of them is shown.
        skip_special_tokens: true omits special tokens from the text.
    """

    __slots__ = ("_detokenizer", "_stops", "_watches_stops", "finished", "num_chars", "num_shown")

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
        #: Characters decoded, and characters shown.
        self.num_chars = 0
        self.num_shown = 0
        self.finished = False

    def push(
        self,
        token_ids: Sequence[int],
        finish_reason: GenerateEnd | None = None,
        *,
        offsets: list[int] | None = None,
    ) -> OutputDelta:
        """Take the next tokens; call it until `finished`.

        Args:
            token_ids: tokens of one or several engine steps.
            finish_reason: given with the last of them. With "stop" and "closed" the last id ended
                the text and is not part of it.
            offsets: extended by one entry per id that belongs to the output: the number of
                characters decoded before it. An ending id comes behind all text.
        """
        if finish_reason == "closed":
            finish_reason = "stop"
        visible = len(token_ids) - 1 if finish_reason == "stop" and token_ids else len(token_ids)
        if not self._watches_stops and offsets is None:
            text = self._detokenizer.push(token_ids[:visible])
            if finish_reason is not None:
                text += self._detokenizer.flush()
                self.finished = True
            self.num_chars += len(text)
            self.num_shown += len(text)
            return OutputDelta(text, len(token_ids), finish_reason)
        shown: list[str] = []
        for position in range(visible):
            if offsets is not None:
                offsets.append(self.num_chars)
            piece = self._detokenizer.push(token_ids[position : position + 1])
            matched = self._take(piece, shown)
            if matched is not None:
                self.finished = True
                return OutputDelta("".join(shown), position + 1, "stop", matched, True)
        if finish_reason is None:
            return OutputDelta("".join(shown), len(token_ids))
        self.finished = True
        matched = self._take(self._detokenizer.flush(), shown)
        if matched is None:
            rest = self._stops.flush()
            self._show(rest.text, shown)
            matched = rest.matched
        if offsets is not None and visible < len(token_ids):
            offsets.append(self.num_chars)
        reason: FinishReason = finish_reason if matched is None else "stop"
        return OutputDelta("".join(shown), len(token_ids), reason, matched)

    def _take(self, piece: str, shown: list[str]) -> str | None:
        """Pass decoded text on as far as it may be shown; return the stop string it completed."""
        if not piece:
            return None
        self.num_chars += len(piece)
        result = self._stops.push(piece)
        self._show(result.text, shown)
        return result.matched

    def _show(self, text: str, shown: list[str]) -> None:
        if text:
            shown.append(text)
            self.num_shown += len(text)
