"""The class `LLM`: a model and its generations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeAlias, cast

from parrot_engine.exceptions import AdapterError
from parrot_engine.llm.context import LLMContext
from parrot_engine.llm.pooling import encode_pairs, pool, prepared_text
from parrot_engine.llm.request import OnTokens, Prompt, Request, RequestOutput, tokenizer_of
from parrot_engine.llm.session import Session
from parrot_engine.loading.factory import EngineKind, EngineOptions, load_engine, load_engine_alone
from parrot_engine.loading.hub import DEMO_MODEL
from parrot_engine.protocol import (
    AdapterInfo,
    AdapterLoading,
    Engine,
    EngineInfo,
    EngineStats,
    Fill,
    PoolingInfo,
    PrefixSharing,
    SamplingParams,
)
from parrot_engine.text import Tokenizer
from parrot_engine.text.tokenizer import PoolingTokens

#: Called after each finished prompt with the number of finished prompts and of all.
Progress: TypeAlias = Callable[[int, int], None]


class LLM:
    """Generates text with one model.

    `close`, or the end of its `with` block, frees the model's memory.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        kind: EngineKind = "auto",
        skip_tokenizer: bool = False,
        **options: Any,
    ) -> None:
        """Load a model.

        Args:
            model: a folder with a checkpoint, a hub id (downloaded if missing), or None
                for the small demo model that comes with the package.
            kind: `builtin`, `huggingface`, or `auto`: the builtin engine where it supports the
                model, otherwise the huggingface engine, with a warning in the log.
            skip_tokenizer: do not read the model's tokenizer, which may be missing. Prompts are
                then token ids, and outputs have no text.
            options: the other fields of `parrot_engine.loading.factory.EngineOptions`, such as
                `device`, `dtype`, `kv_cache_bytes` and `dummy_weights`. Options that the chosen
                engine does not have are ignored.

        Raises:
            ModelError: there is no such model, or no engine of this kind can run it.
            SettingsError: an option is out of range or does not fit the machine.
            TypeError: there is no such option.
        """
        name = model if model is not None else DEMO_MODEL
        chosen = EngineOptions(name, kind=kind, **options)
        if skip_tokenizer:
            self._begin(load_engine_alone(chosen), None)
        else:
            loaded = load_engine(chosen)
            self._begin(loaded.engine, Tokenizer(loaded.text))

    @classmethod
    def of(cls, engine: Engine, tokenizer: Tokenizer | None) -> Self:
        """Make an LLM from any engine, with or without a tokenizer.

        Only the LLM may drive the engine; closing it closes the engine.
        """
        llm = cls.__new__(cls)
        llm._begin(engine, tokenizer)
        return llm

    def _begin(self, engine: Engine, tokenizer: Tokenizer | None) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._session = Session(engine)

    @property
    def info(self) -> EngineInfo:
        """Return limits, vocabulary and sampling defaults of the model."""
        return self._engine.info

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the model's own tokenizer.

        Raises:
            ValueError: it was skipped.
        """
        return tokenizer_of(self._tokenizer)

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def share_prefixes(self, enabled: bool) -> bool:
        """Let attention read keys shared by prompts once (the default) or once per prompt.

        For measurements: outputs are equal within rounding. Takes effect between calls of
        `generate`.

        Returns:
            True if this engine has the choice: the builtin engine with Triton kernels on one
            device.
        """
        return isinstance(self._engine, PrefixSharing) and self._engine.share_prefixes(enabled)

    @property
    def adapters(self) -> list[AdapterInfo]:
        """Return the loaded LoRA adapters."""
        return self._engine.adapters if isinstance(self._engine, AdapterLoading) else []

    def load_adapter(self, name: str, path: str) -> AdapterInfo:
        """Load the LoRA adapter in a PEFT folder; replaces one of the same name.

        Raises:
            AdapterError: it cannot be served, or this LLM was made without `adapters` and
                `max_loras`.
        """
        if not isinstance(self._engine, AdapterLoading):
            raise AdapterError(f"{name}: this engine takes no adapters")
        self._engine.add_adapter(self._engine.read_adapter(name, path))
        return next(adapter for adapter in self.adapters if adapter.name == name)

    def unload_adapter(self, name: str) -> None:
        """Stop using an adapter for new prompts; does nothing for an unknown name."""
        if isinstance(self._engine, AdapterLoading):
            self._engine.remove_adapter(name)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def default_params(self) -> SamplingParams:
        """Return `SamplingParams` with the checkpoint's own defaults."""
        return self._session.default_params()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        adapter: str | Sequence[str | None] | None = None,
        prompt_logprobs: int | None = None,
        detokenize: bool = True,
        progress: Progress | None = None,
    ) -> list[RequestOutput]:
        """Generate continuations of prompts, batched together.

        Args:
            prompts: one text or list of token ids, or several.
            params: for all prompts, or one for each; None means `default_params`.
            n: continuations per prompt, as forks that share its KV. With a seed, the i-th uses
                `seed + i`.
            adapter: name of the LoRA adapter for all prompts, or one for each; None for the base.
            prompt_logprobs: report log-probabilities of the prompts, with this many alternatives.
            detokenize: also return texts of the generated tokens.
            progress: called after each finished prompt.

        Returns:
            One output per prompt, in their order.

        Raises:
            GenerationError: a prompt failed, for example because it is too long. All other prompts
                are cancelled; the LLM remains usable.
            ValueError: a prompt without tokens, `n` below 1, another number of params or adapters
                than of prompts, an unknown adapter, or a text without a tokenizer.
        """
        if n < 1:
            raise ValueError(f"n must be at least 1, not {n}")
        ended: list[Request] = []
        requests = [
            Request(
                self._session,
                self._tokenizer,
                prompt,
                chosen,
                n,
                adapter_id=self._session.adapter_id(name),
                prompt_logprobs=prompt_logprobs,
                detokenize=detokenize,
                on_end=ended.append,
            )
            for prompt, chosen, name in self._each(prompts, params, adapter)
        ]
        waiting = iter(requests)
        upcoming = next(waiting, None)
        running: set[Request] = set()
        window = max(4, 2 * self.info.max_batch_size)
        finished = 0
        outputs: dict[Request, RequestOutput] = {}
        try:
            while upcoming is not None or running:
                while upcoming is not None and (not running or (len(running) + 1) * n <= window):
                    # Added first, so that an interrupt from here on frees submitted primitives.
                    running.add(upcoming)
                    upcoming.start()
                    upcoming = next(waiting, None)
                self._session.step()
                for request in ended:
                    running.remove(request)
                    outputs[request] = request.output()
                    finished += 1
                    if progress is not None:
                        progress(finished, len(requests))
                ended.clear()
        finally:
            for request in running:
                request.cancel()
        return [outputs[request] for request in requests]

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        detokenize: bool = True,
        on_tokens: OnTokens | None = None,
    ) -> Request:
        """Start a prompt without waiting; `step` runs it.

        Args:
            prompt: a text or token ids.
            params: None means `default_params`.
            adapter: name of the LoRA adapter; None for the base.
            detokenize: also return the text of the generated tokens.
            on_tokens: called with new tokens.

        Returns:
            A request with `finished`, `output()` (which raises `GenerationError` after a failure)
            and `cancel()`.

        Raises:
            ValueError: the prompt has no tokens, the adapter is unknown, or a text is given or
                wanted without a tokenizer.
        """
        request = Request(
            self._session,
            self._tokenizer,
            prompt,
            params if params is not None else self.default_params(),
            1,
            adapter_id=self._session.adapter_id(adapter),
            detokenize=detokenize,
            on_tokens=on_tokens,
        )
        request.start()
        return request

    def step(self) -> None:
        """Run one step of the engine: some tokens for every submitted prompt."""
        self._session.step()

    def context(self, *, adapter: str | None = None) -> LLMContext:
        """Return an empty context; it and its forks use the LoRA adapter of this name.

        Raises:
            ValueError: the adapter is not loaded.
        """
        context = LLMContext(self._session, self._tokenizer, self._session.new_id(), [])
        self._session.call(Fill(context.id, [], adapter=self._session.adapter_id(adapter)))
        return context

    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        prompt_name: str | None = None,
        dimensions: int | None = None,
    ) -> list[list[float]]:
        """Return the vector of each text, pooled and normalised by the checkpoint's files.

        Args:
            texts: one text or list of token ids, or several. Token ids are used unchanged.
            prompt_name: the checkpoint's prompt that precedes each text; None: its default.
            dimensions: number of leading components of each vector; None: all.

        Raises:
            GenerationError: a text is too long, or its vector is not finite.
            ValueError: the model makes no vectors, or has no such prompt.
        """
        info = self._pooling("embed")
        sequences = [
            self.tokenizer.encode_for_pooling([(prepared_text(info, text, prompt_name), None)])[0]
            if isinstance(text, str)
            else PoolingTokens(list(text), None)
            for text in _several(texts)
        ]
        return pool(self._session, sequences, dimensions)

    def score(
        self, pairs: Sequence[tuple[str, str]], *, instruction: str | None = None
    ) -> list[float]:
        """Return a reranker's score for each pair: how well the document answers the query.

        Args:
            pairs: queries and documents.
            instruction: the purpose of the search, if the model takes one; None: its default.

        Raises:
            GenerationError: a pair is too long, or its score is not finite.
            ValueError: the model makes no scores, or takes no instruction.
        """
        sequences = encode_pairs(self.tokenizer, self._pooling("score"), pairs, instruction)
        return [values[0] for values in pool(self._session, sequences)]

    def _pooling(self, task: str) -> PoolingInfo:
        info = self.info.pooling
        if info is None or info.task != task:
            wanted = "vectors" if task == "embed" else "scores"
            raise ValueError(f"{self.info.model} ({self.info.architecture}) makes no {wanted}")
        return info

    def close(self) -> None:
        """Free the model's memory. May be called twice."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _each(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        adapters: str | Sequence[str | None] | None,
    ) -> list[tuple[Prompt, SamplingParams, str | None]]:
        several = _several(prompts)
        if params is None:
            params = self.default_params()
        each = [params] * len(several) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(several):
            raise ValueError(f"{len(several)} prompts, but {len(each)} params")
        named: list[str | None]
        if adapters is None or isinstance(adapters, str):
            named = [adapters] * len(several)
        else:
            named = list(adapters)
        if len(named) != len(several):
            raise ValueError(f"{len(several)} prompts, but {len(named)} adapters")
        return list(zip(several, each, named, strict=True))


def _several(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping) or not isinstance(prompts, Sequence):
        raise TypeError("prompts must be a text, a list of token ids, or a list of such")
    if prompts and all(isinstance(item, int) for item in prompts):
        return [cast("Sequence[int]", prompts)]
    return list(cast("Sequence[Prompt]", prompts))
