"""One prompt and its continuations: submits primitives, collects events, makes outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from parrot_engine.exceptions import GenerationError
from parrot_engine.llm.session import Session
from parrot_engine.protocol import (
    Event,
    Failed,
    Fill,
    Filled,
    FinishReason,
    FreeContext,
    Generate,
    Generated,
    SamplingParams,
    TokenLogprobs,
)
from parrot_engine.text import OutputText, Tokenizer

#: A text or token ids.
Prompt: TypeAlias = str | Sequence[int]

#: Called with new tokens of a request, from any of its continuations.
OnTokens: TypeAlias = Callable[[Sequence[int]], None]


def tokenizer_of(tokenizer: Tokenizer | None) -> Tokenizer:
    """Return the tokenizer; raises `ValueError` if there is none."""
    if tokenizer is None:
        raise ValueError("this LLM has no tokenizer: prompts are token ids, and so are outputs")
    return tokenizer


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    #: Number among the continuations of the prompt.
    index: int
    #: Text without special tokens and stop string; empty without detokenization.
    text: str
    #: All generated tokens, including an end-of-text or stop id; with a stop string those up to the
    #: token that completed it.
    token_ids: list[int]
    finish_reason: FinishReason
    #: The stop string or stop id that ended it; None for end of text and for `length`.
    stop_reason: str | int | None = None
    #: One entry per token, if requested.
    logprobs: list[TokenLogprobs] | None = None


class Completion:
    """Collects the events of one `Generate`.

    Args:
        tokenizer: None for tokens without text.
        prompt_token_ids: the prompt, whose text the completion's text continues.
        params: of the `Generate`, with stop strings.
        index: its number among the continuations of the prompt.

    Raises:
        ValueError: there are stop strings, but no text to search.
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
        """Return true once it has ended; it ignores further tokens."""
        return self._finish_reason is not None

    @property
    def stopped_by_string(self) -> bool:
        """Return true if it ended by a stop string, which the engine does not see."""
        return self._stop_string is not None

    def push(self, event: Generated) -> bool:
        """Add new tokens unless it has finished; return true once it has."""
        if self._finish_reason is not None:
            return True
        self._token_ids += event.token_ids
        if self._logprobs is not None and event.logprobs is not None:
            self._logprobs += event.logprobs
        reason = event.finish_reason
        self._finish_reason = "stop" if reason == "closed" else reason
        if self._output is not None and self._params.stop:
            self._detokenize(self._output, event.token_ids)
        elif self._output is not None and self._finish_reason is not None:
            # Detokenizing all tokens at once costs less.
            self._detokenize(self._output, self._token_ids)
        return self._finish_reason is not None

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


@dataclass(frozen=True, slots=True)
class RequestOutput:
    #: None if the prompt was given as token ids.
    prompt: str | None
    prompt_token_ids: list[int]
    #: `n` outputs by index.
    outputs: list[CompletionOutput]
    #: Tokens of the prompt from the prefix cache.
    cached_tokens: int
    #: One entry per token of the prompt, if requested; None for the first.
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class Request:
    """One running prompt; made and started by `LLM.generate` and `LLM.submit`."""

    def __init__(
        self,
        session: Session,
        tokenizer: Tokenizer | None,
        prompt: Prompt,
        params: SamplingParams,
        n: int,
        *,
        adapter_id: str = "",
        prompt_logprobs: int | None = None,
        detokenize: bool = True,
        on_tokens: OnTokens | None = None,
        on_end: Callable[[Request], None] | None = None,
    ) -> None:
        """Tokenize the prompt without submitting it.

        Raises:
            ValueError: it has no tokens, or a text needs a tokenizer and there is none.
        """
        self._session = session
        if isinstance(prompt, str):
            self._text: str | None = prompt
            self._token_ids = tokenizer_of(tokenizer).encode(prompt)
        else:
            self._text, self._token_ids = None, list(prompt)
        if not self._token_ids:
            raise ValueError("a prompt has no tokens")
        self._params = params
        self._adapter_id = adapter_id
        self._prompt_logprobs = prompt_logprobs
        self._on_tokens, self._on_end = on_tokens, on_end
        self._filled: Filled | None = None
        self._failure: Failed | None = None
        shown = tokenizer if detokenize else None
        self._completions = [
            Completion(shown, self._token_ids, params, index=index) for index in range(n)
        ]
        self._root = 0
        self._targets: dict[int, Completion] = {}

    @property
    def finished(self) -> bool:
        """Return true once all continuations have ended, or one has failed."""
        return self._failure is not None or (self._filled is not None and not self._targets)

    def start(self) -> None:
        self._root = self._session.new_id()
        fill = Fill(
            self._root,
            self._token_ids,
            adapter=self._adapter_id,
            prompt_logprobs=self._prompt_logprobs,
        )
        if len(self._completions) == 1:
            self._targets = {self._root: self._completions[0]}
            self._session.submit(self._handle, fill, Generate(self._root, self._params))
            return
        self._targets = {self._session.new_id(): completion for completion in self._completions}
        generates = [
            Generate(target, self._seeded(index), parent_context_id=self._root)
            for index, target in enumerate(self._targets)
        ]
        self._session.submit(self._handle, fill, *generates, FreeContext(self._root))

    def cancel(self) -> None:
        """Free all running contexts; does nothing once finished."""
        if not self.finished:
            self._session.free(self._root, *self._targets)

    def output(self) -> RequestOutput:
        """Return the result of a finished request.

        Raises:
            GenerationError: it failed.
        """
        if self._failure is not None:
            raise GenerationError(self._failure)
        assert self._filled is not None, "the request still runs"
        return RequestOutput(
            self._text,
            self._token_ids,
            [completion.output() for completion in self._completions],
            self._filled.cached_tokens,
            self._filled.prompt_logprobs,
        )

    def _seeded(self, index: int) -> SamplingParams:
        if self._params.seed is None:
            return self._params
        return replace(self._params, seed=(self._params.seed + index) % 2**64)

    def _handle(self, event: Event) -> None:
        if isinstance(event, Generated):
            is_finished = self._targets[event.context_id].push(event)
            if self._on_tokens is not None:
                self._on_tokens(event.token_ids)
            if not is_finished:
                return
            del self._targets[event.context_id]
            self._session.free(event.context_id)
        elif isinstance(event, Filled):
            self._filled = event
            if event.context_id not in self._targets:
                self._session.ignore(event.context_id)
        elif isinstance(event, Failed):
            self._failure = event
            self._session.free(self._root, *self._targets)
        if self._on_end is not None and self.finished:
            self._on_end(self)
