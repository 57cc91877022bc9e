"""A model in this process, without any server.

    llm = LLM()                                   # the bundled demo model
    llm.generate("Once upon a time", SamplingParams(max_tokens=20))[0].outputs[0].text

    with llm.context() as story:
        story.fill("Once upon a time")
        endings = [story.fork().generate() for _ in range(3)]

Synchronous and not thread-safe: the engine runs while a call waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from types import TracebackType
from typing import Any, Self, TypeAlias, cast

from parrot_engine.completion import Completion, CompletionOutput
from parrot_engine.exceptions import EngineStateError, GenerationError
from parrot_engine.protocol import (
    Engine,
    EngineInfo,
    EngineStats,
    Event,
    Failed,
    Fill,
    Filled,
    FreeContext,
    Generate,
    Generated,
    Primitive,
    SamplingParams,
    TokenLogprobs,
)
from parrot_engine.text import Tokenizer, load_text_assets

#: A text, or the token ids of one.
Prompt: TypeAlias = str | Sequence[int]

#: Called after each finished prompt with (finished, in all).
Progress: TypeAlias = Callable[[int, int], None]


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


class LLM:
    """Generates text with one model.

    Closing it, or leaving it as a context manager, gives the model's memory back.
    """

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        """Load a model into the builtin engine.

        Args:
            model: a folder with a checkpoint, a hub id (downloaded when it is not there), or None
                for the small demo model that comes with the package.
            settings: the fields of `parrot_engine.builtin.settings.BuiltinSettings`.

        Raises:
            ModelError: there is no such model, or the builtin engine cannot run it.
            SettingsError: a setting is out of range or does not fit the machine.
            TypeError: there is no such setting.
        """
        from parrot_engine.builtin.engine import BuiltinEngine
        from parrot_engine.builtin.settings import BuiltinSettings
        from parrot_engine.hub import DEMO_MODEL, resolve_model, served_name

        name = model if model is not None else DEMO_MODEL
        values = BuiltinSettings(**settings)
        folder = resolve_model(name)
        tokenizer = Tokenizer(load_text_assets(folder))
        engine = BuiltinEngine.load(folder, values, model=served_name(name))
        self._begin(engine, tokenizer)

    @classmethod
    def of(cls, engine: Engine, tokenizer: Tokenizer) -> Self:
        """An LLM on any engine; nobody else may drive it, and closing the LLM closes it."""
        llm = cls.__new__(cls)
        llm._begin(engine, tokenizer)
        return llm

    def _begin(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._ids = count(1)
        self._handlers: dict[int, Callable[[Event], None]] = {}

    @property
    def info(self) -> EngineInfo:
        """Limits, vocabulary, and sampling defaults of the model."""
        return self._engine.info

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's own tokenizer."""
        return self._tokenizer

    def stats(self) -> EngineStats:
        """Counters and gauges of the engine."""
        return self._engine.stats()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def default_params(self) -> SamplingParams:
        """`SamplingParams` with what the checkpoint itself recommends."""
        chosen: dict[str, Any] = dict(self.info.default_sampling)
        if "top_k" in chosen:
            chosen["top_k"] = int(chosen["top_k"])
        return replace(SamplingParams(), **chosen)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        prompt_logprobs: int | None = None,
        progress: Progress | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts, all in one stream of batches.

        Args:
            prompts: one text or list of token ids, or several.
            params: for all prompts, or one each; None takes `default_params`.
            n: continuations per prompt, by forks that share its KV. With a seed the i-th draws
                from `seed + i`.
            prompt_logprobs: report log-probabilities of the prompts, with this many alternatives.
            progress: told after each finished prompt.

        Returns:
            One output a prompt, in their order.

        Raises:
            GenerationError: a prompt failed, for example because it is too long. Everything else
                under way is cancelled; the LLM can be used again.
            ValueError: no tokens in a prompt, `n` below 1, or not as many params as prompts.
        """
        if n < 1:
            raise ValueError(f"n must be at least 1, not {n}")
        requests = [
            _Request(self, prompt, chosen, n, prompt_logprobs)
            for prompt, chosen in self._pair(prompts, params)
        ]
        waiting = iter(requests)
        upcoming = next(waiting, None)
        running: list[_Request] = []
        window = max(4, 2 * self.info.max_batch_size)
        finished = 0
        try:
            while upcoming is not None or running:
                while upcoming is not None and (not running or (len(running) + 1) * n <= window):
                    # Entered first: an interrupt after this frees what was submitted.
                    running.append(upcoming)
                    upcoming.start()
                    upcoming = next(waiting, None)
                self._step()
                for request in [request for request in running if request.finished]:
                    running.remove(request)
                    finished += 1
                    if progress is not None:
                        progress(finished, len(requests))
        finally:
            for request in running:
                request.cancel()
        return [request.output() for request in requests]

    def context(self) -> LLMContext:
        """A new, empty context."""
        context = LLMContext(self, next(self._ids), [])
        self._call(Fill(context.id, []))
        return context

    def close(self) -> None:
        """Give the model's memory back. May be called twice."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # For requests and contexts

    def _pair(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[tuple[Prompt, SamplingParams]]:
        several = _several(prompts)
        if params is None:
            params = self.default_params()
        each = [params] * len(several) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(several):
            raise ValueError(f"{len(several)} prompts, but {len(each)} params")
        return list(zip(several, each, strict=True))

    def _submit(self, handler: Callable[[Event], None] | None, *primitives: Primitive) -> None:
        for primitive in primitives:
            if isinstance(primitive, FreeContext):
                continue
            if handler is not None:
                self._handlers[primitive.context_id] = handler
        self._engine.submit(primitives)

    def _free(self, *context_ids: int) -> None:
        for context_id in context_ids:
            self._handlers.pop(context_id, None)
        self._engine.submit([FreeContext(context_id) for context_id in context_ids])

    def _step(self) -> None:
        """One step of the engine; hands out its events."""
        result = self._engine.step()
        for event in result.events:
            handler = self._handlers.get(event.context_id)
            if handler is not None:
                handler(event)
        if not result.has_work and not result.events and self._handlers:
            raise EngineStateError("engine", "it has nothing to do, but answers are missing")

    def _call(self, fill: Fill) -> Filled:
        """Run a single Fill to its end."""
        answer: list[Filled] = []

        def handle(event: Event) -> None:
            _raise_failure(event)
            if isinstance(event, Filled):
                answer.append(event)

        self._submit(handle, fill)
        try:
            while not answer:
                self._step()
        except BaseException:
            self._free(fill.context_id)
            raise
        del self._handlers[fill.context_id]
        return answer[0]


class LLMContext:
    """A sequence of tokens that stays in the engine between calls.

    A method that raises, or is interrupted, gives the context up. Its forks live on.
    """

    def __init__(self, llm: LLM, context_id: int, token_ids: list[int]) -> None:
        """Made by `LLM.context` and `fork`."""
        self._llm = llm
        self.id = context_id
        #: Everything filled and generated so far.
        self.token_ids = token_ids
        self._open = True

    @property
    def text(self) -> str:
        """Everything filled and generated so far."""
        return self._llm.decode(self.token_ids)

    def fill(self, prompt: Prompt, *, prompt_logprobs: int | None = None) -> Filled:
        """Append a text or token ids.

        A text is tokenized on its own, with the special tokens of a beginning only in an empty
        context. Where a word could join two texts, join them before filling.

        Raises:
            GenerationError: it does not fit.
        """
        self._check_open()
        if isinstance(prompt, str):
            token_ids = self._llm.encode(prompt, add_special_tokens=not self.token_ids)
        else:
            token_ids = list(prompt)
        try:
            filled = self._llm._call(
                Fill(self.id, token_ids, prompt_logprobs=prompt_logprobs),
            )
        except BaseException:
            self._open = False
            raise
        self.token_ids.extend(token_ids)
        return filled

    def generate(self, params: SamplingParams | None = None) -> CompletionOutput:
        """Extend the context by sampled tokens, those of a stop string included.

        Raises:
            GenerationError: the context is empty, or a parameter cannot be honoured.
        """
        self._check_open()
        params = params if params is not None else self._llm.default_params()
        completion = Completion(self._llm.tokenizer, self.token_ids, params)
        # NOTE: the engine knows no stop strings and may be ahead when one is found; so it runs on
        # a fork, which then either takes the context's place or is thrown away.
        target = next(self._llm._ids) if params.stop else self.id
        try:
            self._run(Generate(target, params, None if target == self.id else self.id), completion)
        except BaseException:
            self._open = False
            self._llm._free(self.id, target)
            raise
        self._llm._handlers.pop(target, None)
        output = completion.output()
        if completion.stopped_by_string:
            self._llm._free(target)
            self.fill(output.token_ids)
        else:
            if target != self.id:
                self._llm._free(self.id)
                self.id = target
            self.token_ids.extend(output.token_ids)
        return output

    def fork(self) -> LLMContext:
        """Another context that begins with all tokens of this one and shares their KV."""
        self._check_open()
        child = LLMContext(self._llm, next(self._llm._ids), list(self.token_ids))
        self._llm._call(Fill(child.id, [], parent_context_id=self.id))
        return child

    def free(self) -> None:
        """Forget the context. May be called twice."""
        if self._open:
            self._open = False
            self._llm._free(self.id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.free()

    def _run(self, generate: Generate, completion: Completion) -> None:
        def handle(event: Event) -> None:
            _raise_failure(event)
            if isinstance(event, Generated):
                completion.push(event)

        self._llm._submit(handle, generate)
        while not completion.finished:
            self._llm._step()

    def _check_open(self) -> None:
        if not self._open:
            raise ValueError(f"context {self.id} was freed or failed")


class _Request:
    """One prompt of a `generate` call, on its way."""

    def __init__(
        self, llm: LLM, prompt: Prompt, params: SamplingParams, n: int, prompt_logprobs: int | None
    ) -> None:
        self._llm = llm
        self._text = prompt if isinstance(prompt, str) else None
        self._token_ids = llm.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not self._token_ids:
            raise ValueError("a prompt has no tokens")
        self._params = params
        self._prompt_logprobs = prompt_logprobs
        self._filled: Filled | None = None
        self._completions = [
            Completion(llm.tokenizer, self._token_ids, params, index=index) for index in range(n)
        ]
        self._root = 0
        self._targets: dict[int, Completion] = {}

    @property
    def finished(self) -> bool:
        """Whether everything has been heard of."""
        return self._filled is not None and not self._targets

    def start(self) -> None:
        """Submit the prompt and its generations."""
        ids = self._llm._ids
        self._root = next(ids)
        fill = Fill(self._root, self._token_ids, prompt_logprobs=self._prompt_logprobs)
        if len(self._completions) == 1:
            self._targets = {self._root: self._completions[0]}
            self._llm._submit(self._handle, fill, Generate(self._root, self._params))
            return
        self._targets = {next(ids): completion for completion in self._completions}
        generates = [
            Generate(target, self._seeded(index), parent_context_id=self._root)
            for index, target in enumerate(self._targets)
        ]
        self._llm._submit(self._handle, fill, *generates, FreeContext(self._root))

    def cancel(self) -> None:
        """Free all contexts."""
        self._llm._free(self._root, *self._targets)

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
        _raise_failure(event)
        if isinstance(event, Filled):
            self._filled = event
            if event.context_id not in self._targets:
                self._llm._handlers.pop(event.context_id, None)
        elif isinstance(event, Generated):
            completion = self._targets[event.context_id]
            completion.push(event)
            if completion.finished:
                del self._targets[event.context_id]
                self._llm._free(event.context_id)


def _raise_failure(event: Event) -> None:
    if isinstance(event, Failed):
        raise GenerationError(event)


def _several(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, be it of one."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping) or not isinstance(prompts, Sequence):
        raise TypeError("prompts must be a text, a list of token ids, or a list of such")
    if prompts and all(isinstance(item, int) for item in prompts):
        return [cast("Sequence[int]", prompts)]
    return list(cast("Sequence[Prompt]", prompts))
