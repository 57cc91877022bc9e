"""From the tokens of one Generate to a text that ends where it should.

Detokenizes as tokens come, or all at once where nobody reads along, cuts at stop strings, and says
why it ended. Knows no engine: whoever has one passes the events in and stops the generation when
told to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parrot_engine.protocol import FinishReason, Generated, SamplingParams, TokenLogprobs
from parrot_engine.text import IncrementalDetokenizer, StopStrings, Tokenizer


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One continuation of a prompt."""

    #: Number among the continuations of the same prompt.
    index: int
    #: Without special tokens and without the stop string; empty where no text was asked for.
    text: str
    #: All generated tokens, an end-of-text or stop id included; with a stop string up to the token
    #: that completed it.
    token_ids: list[int]
    finish_reason: FinishReason
    #: The stop string or stop id that ended it; None for end of text, and for `length`.
    stop_reason: str | int | None = None
    #: One entry a token when asked for.
    logprobs: list[TokenLogprobs] | None = None


class Completion:
    """Collects the tokens of one Generate."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        index: int = 0,
        streams: bool = True,
    ) -> None:
        """Begin behind a prompt, whose text the completion's text continues.

        Args:
            tokenizer: None for tokens without text.
            prompt_token_ids: the prompt.
            params: how it is generated; stop strings apply.
            index: its number among the continuations of the prompt.
            streams: whether `push` tells text. Without, and without stop strings, all text is
                made at the end, which costs less.

        Raises:
            ValueError: stop strings, but no text to find them in.
        """
        if params.stop and tokenizer is None:
            raise ValueError("stop strings need text: leave them out, or have tokens detokenized")
        self._params = params
        self._index = index
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None:
            self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids)
        self._reads_along = tokenizer is not None and (streams or bool(params.stop))
        self._stop = StopStrings(params.stop)
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self._finish_reason: FinishReason | None = None
        self._stop_reason: str | int | None = None

    @property
    def finished(self) -> bool:
        """Whether it ended: further tokens are not part of it."""
        return self._finish_reason is not None

    @property
    def stopped_by_string(self) -> bool:
        """Whether it ended by a stop string, of which the engine knows nothing."""
        return self._finish_reason == "stop" and isinstance(self._stop_reason, str)

    def push(self, event: Generated) -> str:
        """Take new tokens; returns the text that became certain. Does nothing once finished."""
        if self._finish_reason is not None:
            return ""
        if not self._reads_along:
            self._token_ids.extend(event.token_ids)
            if self._logprobs is not None and event.logprobs is not None:
                self._logprobs.extend(event.logprobs)
            if event.finish_reason is not None:
                self._end_at_once(event.finish_reason)
            return ""
        shown = len(self._text)
        for position, token_id in enumerate(event.token_ids):
            self._token_ids.append(token_id)
            if self._logprobs is not None and event.logprobs is not None:
                self._logprobs.append(event.logprobs[position])
            is_end = event.finish_reason == "stop" and position == len(event.token_ids) - 1
            if not is_end:
                assert self._detokenizer is not None
                self._push_text(self._detokenizer.push((token_id,)))
            if self.finished:
                break
        if event.finish_reason is not None and not self.finished:
            self._end(event.finish_reason)
        return "".join(self._text[shown:])

    def output(self) -> CompletionOutput:
        """The finished completion."""
        assert self._finish_reason is not None, "the generation still runs"
        return CompletionOutput(
            self._index,
            "".join(self._text),
            self._token_ids,
            self._finish_reason,
            self._stop_reason,
            self._logprobs,
        )

    def _push_text(self, piece: str) -> None:
        text, matched = self._stop.push(piece)
        self._show(text, matched)

    def _end_at_once(self, reason: FinishReason) -> None:
        if self._detokenizer is not None:
            # The token that ended it is no text.
            shown = self._token_ids if reason == "length" else self._token_ids[:-1]
            self._text.append(self._detokenizer.push(shown) + self._detokenizer.flush())
        self._settle(reason)

    def _end(self, reason: FinishReason) -> None:
        assert self._detokenizer is not None
        self._push_text(self._detokenizer.flush())
        if not self.finished:
            text, matched = self._stop.flush()
            self._show(text, matched)
        if not self.finished:
            self._settle(reason)

    def _settle(self, reason: FinishReason) -> None:
        self._finish_reason = reason
        if reason == "stop" and self._token_ids[-1] in self._params.stop_token_ids:
            self._stop_reason = self._token_ids[-1]

    def _show(self, text: str, matched: str | None) -> None:
        if text:
            self._text.append(text)
        if matched is not None:
            self._finish_reason = "stop"
            self._stop_reason = matched
