"""A context of an `LLM`: tokens that stay in the engine, grow and fork."""

from __future__ import annotations

from typing import Self

from parrot_engine.llm.request import Completion, CompletionOutput, Prompt, tokenizer_of
from parrot_engine.llm.session import Session, raise_failure
from parrot_engine.protocol import Event, Fill, Filled, Generate, Generated, SamplingParams
from parrot_engine.text import Tokenizer


class LLMContext:
    """A sequence of tokens that stays in the engine between calls.

    A method that raises or is interrupted frees the context; its forks remain.
    """

    def __init__(
        self, session: Session, tokenizer: Tokenizer | None, context_id: int, token_ids: list[int]
    ) -> None:
        """Initialise a context; `LLM.context` and `fork` do this."""
        self._session = session
        self._tokenizer = tokenizer
        self.id = context_id
        #: All filled and generated tokens.
        self.token_ids = token_ids
        self._open = True

    @property
    def text(self) -> str:
        """Return the text of all filled and generated tokens.

        Raises:
            ValueError: the LLM has no tokenizer.
        """
        return tokenizer_of(self._tokenizer).decode(self.token_ids)

    def fill(self, prompt: Prompt, *, prompt_logprobs: int | None = None) -> Filled:
        """Append a text or token ids.

        A text is tokenized separately; only an empty context gets the special tokens of a
        beginning. If a word may span two texts, join them before filling.

        Raises:
            GenerationError: it does not fit.
            ValueError: `prompt` is a text, but the LLM has no tokenizer.
        """
        self._check_open()
        if isinstance(prompt, str):
            tokenizer = tokenizer_of(self._tokenizer)
            token_ids = tokenizer.encode(prompt, add_special_tokens=not self.token_ids)
        else:
            token_ids = list(prompt)
        try:
            filled = self._session.call(Fill(self.id, token_ids, prompt_logprobs=prompt_logprobs))
        except BaseException:
            self._open = False
            raise
        self.token_ids.extend(token_ids)
        return filled

    def generate(self, params: SamplingParams | None = None) -> CompletionOutput:
        """Extend the context by sampled tokens, including those of a stop string.

        Raises:
            GenerationError: the context is empty, or a parameter cannot be honoured.
        """
        self._check_open()
        params = params if params is not None else self._session.default_params()
        completion = Completion(self._tokenizer, self.token_ids, params)
        # NOTE: the engine does not see stop strings, and may have generated further tokens when one
        # is found. So it runs on a fork, which then either replaces the context or is freed.
        target = self._session.new_id() if params.stop else self.id
        try:
            self._run(Generate(target, params, None if target == self.id else self.id), completion)
        except BaseException:
            self._open = False
            self._session.free(self.id, target)
            raise
        self._session.ignore(target)
        output = completion.output()
        if completion.stopped_by_string:
            self._session.free(target)
            self.fill(output.token_ids)
        else:
            if target != self.id:
                self._session.free(self.id)
                self.id = target
            self.token_ids.extend(output.token_ids)
        return output

    def fork(self) -> LLMContext:
        """Return another context that begins with all tokens of this one and shares their KV."""
        self._check_open()
        new_id = self._session.new_id()
        child = LLMContext(self._session, self._tokenizer, new_id, list(self.token_ids))
        self._session.call(Fill(child.id, [], parent_context_id=self.id))
        return child

    def free(self) -> None:
        """Free the context. May be called twice."""
        if self._open:
            self._open = False
            self._session.free(self.id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()

    def _run(self, generate: Generate, completion: Completion) -> None:
        def handle(event: Event) -> None:
            raise_failure(event)
            if isinstance(event, Generated):
                completion.push(event)

        self._session.submit(handle, generate)
        while not completion.finished:
            self._session.step()

    def _check_open(self) -> None:
        if not self._open:
            raise ValueError(f"context {self.id} was freed or failed")
