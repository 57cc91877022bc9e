"""One prompt of a `generate` call: submitted, heard of, put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from parrot_engine.completion import Completion, CompletionOutput
from parrot_engine.llm.session import Session, raise_failure
from parrot_engine.protocol import (
    Event,
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
    """One prompt of a `generate` call, on its way."""

    def __init__(
        self,
        session: Session,
        tokenizer: Tokenizer,
        prompt: Prompt,
        params: SamplingParams,
        n: int,
        prompt_logprobs: int | None,
    ) -> None:
        """Tokenize the prompt; submits nothing yet.

        Raises:
            ValueError: it has no tokens.
        """
        self._session = session
        self._text = prompt if isinstance(prompt, str) else None
        self._token_ids = tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not self._token_ids:
            raise ValueError("a prompt has no tokens")
        self._params = params
        self._prompt_logprobs = prompt_logprobs
        self._filled: Filled | None = None
        self._completions = [
            Completion(tokenizer, self._token_ids, params, index=index) for index in range(n)
        ]
        self._root = 0
        self._targets: dict[int, Completion] = {}

    @property
    def finished(self) -> bool:
        """Whether everything has been heard of."""
        return self._filled is not None and not self._targets

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
        """Free all contexts."""
        self._session.free(self._root, *self._targets)

    def output(self) -> RequestOutput:
        """The outcome, once finished."""
        assert self._filled is not None
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
        raise_failure(event)
        if isinstance(event, Filled):
            self._filled = event
            if event.context_id not in self._targets:
                self._session.ignore(event.context_id)
        elif isinstance(event, Generated):
            completion = self._targets[event.context_id]
            completion.push(event)
            if completion.finished:
                del self._targets[event.context_id]
                self._session.free(event.context_id)
