"""One prompt: submitted, heard of, put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from parrot_engine.exceptions import GenerationError
from parrot_engine.llm.completion import Completion, CompletionOutput
from parrot_engine.llm.session import Session
from parrot_engine.protocol import (
    Event,
    Failed,
    Fill,
    Filled,
    FreeContext,
    Generate,
    Generated,
    SamplingParams,
    TokenLogprobs,
)
from parrot_engine.text import Tokenizer

#: A text, or the token ids of one.
Prompt: TypeAlias = str | Sequence[int]

#: Told of new tokens of a request as they come, whichever continuation they belong to.
OnTokens: TypeAlias = Callable[[Sequence[int]], None]


def tokenizer_of(tokenizer: Tokenizer | None) -> Tokenizer:
    """The tokenizer, where it is needed.

    Raises:
        ValueError: there is none.
    """
    if tokenizer is None:
        raise ValueError("this LLM has no tokenizer: prompts are token ids, and so are outputs")
    return tokenizer


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its continuations."""

    #: None when the prompt was given as token ids.
    prompt: str | None
    prompt_token_ids: list[int]
    #: `n` of them, by index.
    outputs: list[CompletionOutput]
    #: Tokens of the prompt that were found in the prefix cache.
    cached_tokens: int
    #: One entry a token of the prompt when asked for; None for the first.
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class Request:
    """One prompt on its way; made and started by `LLM.generate` and `LLM.submit`."""

    def __init__(
        self,
        session: Session,
        tokenizer: Tokenizer | None,
        prompt: Prompt,
        params: SamplingParams,
        n: int,
        *,
        prompt_logprobs: int | None = None,
        detokenize: bool = True,
        on_tokens: OnTokens | None = None,
        on_end: Callable[[Request], None] | None = None,
    ) -> None:
        """Tokenize the prompt; submits nothing yet.

        Raises:
            ValueError: it has no tokens, or there is no tokenizer for what is asked.
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
        """Whether everything has been heard of, or it failed."""
        return self._failure is not None or (self._filled is not None and not self._targets)

    def start(self) -> None:
        """Submit the prompt and its generations."""
        self._root = self._session.new_id()
        fill = Fill(self._root, self._token_ids, prompt_logprobs=self._prompt_logprobs)
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
        """Give up what is still to come. Does nothing once finished."""
        if not self.finished:
            self._free()

    def output(self) -> RequestOutput:
        """The outcome, once finished.

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

    def _free(self) -> None:
        self._session.free(self._root, *self._targets)

    def _handle(self, event: Event) -> None:
        if isinstance(event, Generated):
            completion = self._targets[event.context_id]
            completion.push(event)
            if self._on_tokens is not None:
                self._on_tokens(event.token_ids)
            if not completion.finished:
                return
            del self._targets[event.context_id]
            self._session.free(event.context_id)
        elif isinstance(event, Filled):
            self._filled = event
            if event.context_id not in self._targets:
                self._session.ignore(event.context_id)
        else:
            self._failure = event
            self._free()
        if self._on_end is not None and self.finished:
            self._on_end(self)
