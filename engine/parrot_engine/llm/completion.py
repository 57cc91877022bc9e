"""One continuation of a prompt: its tokens, its text, and why it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parrot_engine.protocol import FinishReason, Generated, SamplingParams, TokenLogprobs
from parrot_engine.text import OutputText, Tokenizer


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
    """Collects the events of one Generate.

    Args:
        tokenizer: None for tokens without text.
        prompt_token_ids: the prompt, whose text the completion's text continues.
        params: of the Generate; stop strings apply.
        index: its number among the continuations of the prompt.

    Raises:
        ValueError: stop strings, but no text to find them in.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        index: int = 0,
    ) -> None:
        if params.stop and tokenizer is None:
            raise ValueError("stop strings need text: leave them out, or have tokens detokenized")
        self._params = params
        self._index = index
        self._output: OutputText | None = None
        if tokenizer is not None:
            self._output = OutputText(tokenizer, prompt_token_ids, params.stop)
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self._finish_reason: FinishReason | None = None
        self._stop_string: str | None = None

    @property
    def finished(self) -> bool:
        """Whether it ended: further tokens are not part of it."""
        return self._finish_reason is not None

    @property
    def stopped_by_string(self) -> bool:
        """Whether it ended by a stop string, of which the engine knows nothing."""
        return self._stop_string is not None

    def push(self, event: Generated) -> None:
        """Take new tokens; does nothing once finished."""
        if self.finished:
            return
        self._token_ids += event.token_ids
        if self._logprobs is not None and event.logprobs is not None:
            self._logprobs += event.logprobs
        self._finish_reason = event.finish_reason
        if self._output is None:
            return
        if self._params.stop:
            self._detokenize(self._output, event.token_ids)
        elif self.finished:
            # Nobody reads along: all text at once costs less.
            self._detokenize(self._output, self._token_ids)

    def output(self) -> CompletionOutput:
        assert self._finish_reason is not None, "the generation still runs"
        stop_reason: str | int | None = self._stop_string
        if (
            stop_reason is None
            and self._finish_reason == "stop"
            and self._token_ids[-1] in self._params.stop_token_ids
        ):
            stop_reason = self._token_ids[-1]
        return CompletionOutput(
            self._index,
            "".join(self._text),
            self._token_ids,
            self._finish_reason,
            stop_reason,
            self._logprobs,
        )

    def _detokenize(self, output: OutputText, token_ids: Sequence[int]) -> None:
        delta = output.push(token_ids, self._finish_reason)
        self._text.append(delta.text)
        self._finish_reason, self._stop_string = delta.finish_reason, delta.stop_string
        end = len(self._token_ids) - len(token_ids) + delta.num_tokens
        del self._token_ids[end:]
        if self._logprobs is not None:
            del self._logprobs[end:]
