"""The class `LLM`: a model, loaded or given, and what can be asked of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeAlias, cast

from parrot_engine.factory import EngineKind, EngineOptions, load_engine
from parrot_engine.hub import DEMO_MODEL
from parrot_engine.llm.context import LLMContext
from parrot_engine.llm.request import Prompt, Request, RequestOutput
from parrot_engine.llm.session import Session
from parrot_engine.protocol import Engine, EngineInfo, EngineStats, Fill, SamplingParams
from parrot_engine.text import Tokenizer

#: Called after each finished prompt with (finished, in all).
Progress: TypeAlias = Callable[[int, int], None]


class LLM:
    """Generates text with one model.

    Closing it, or leaving it as a context manager, gives the model's memory back.
    """

    def __init__(
        self, model: str | None = None, *, kind: EngineKind = "auto", **options: Any
    ) -> None:
        """Load a model.

        Args:
            model: a folder with a checkpoint, a hub id (downloaded when it is not there), or None
                for the small demo model that comes with the package.
            kind: `builtin`, `huggingface`, or `auto`: the builtin engine where it knows the
                model, else the huggingface engine, with a warning in the log.
            options: the other fields of `parrot_engine.factory.EngineOptions`, such as `device`,
                `dtype` and `kv_cache_bytes`. What the chosen engine does not know is ignored.

        Raises:
            ModelError: there is no such model, or no engine of this kind can run it.
            SettingsError: an option is out of range or does not fit the machine.
            TypeError: there is no such option.
        """
        name = model if model is not None else DEMO_MODEL
        loaded = load_engine(EngineOptions(name, kind=kind, **options))
        self._begin(loaded.engine, Tokenizer(loaded.text))

    @classmethod
    def of(cls, engine: Engine, tokenizer: Tokenizer) -> Self:
        """An LLM on any engine; nobody else may drive it, and closing the LLM closes it."""
        llm = cls.__new__(cls)
        llm._begin(engine, tokenizer)
        return llm

    def _begin(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._session = Session(engine)

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
        return self._session.default_params()

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
            Request(self._session, self._tokenizer, prompt, chosen, n, prompt_logprobs)
            for prompt, chosen in self._pair(prompts, params)
        ]
        waiting = iter(requests)
        upcoming = next(waiting, None)
        running: list[Request] = []
        window = max(4, 2 * self.info.max_batch_size)
        finished = 0
        try:
            while upcoming is not None or running:
                while upcoming is not None and (not running or (len(running) + 1) * n <= window):
                    # Entered first: an interrupt after this frees what was submitted.
                    running.append(upcoming)
                    upcoming.start()
                    upcoming = next(waiting, None)
                self._session.step()
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
        context = LLMContext(self._session, self._tokenizer, self._session.new_id(), [])
        self._session.call(Fill(context.id, []))
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


def _several(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, be it of one."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping) or not isinstance(prompts, Sequence):
        raise TypeError("prompts must be a text, a list of token ids, or a list of such")
    if prompts and all(isinstance(item, int) for item in prompts):
        return [cast("Sequence[int]", prompts)]
    return list(cast("Sequence[Prompt]", prompts))
