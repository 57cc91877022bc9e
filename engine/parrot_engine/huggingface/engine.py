"""The huggingface engine: the builtin engine's step loop over a model of transformers.

For models that the builtin engine does not know. Contexts, queues, priorities, failures, sampling
and grammars are those of the builtin engine. Where the model lets its attention be replaced
(`probe.py`), so are batches, prefix caching, forks and speculation: `packed_model.py`.

Other models run one context at a time (`ContextEngine`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from parrot_engine.batch import Runner
from parrot_engine.engine.builtin_engine import BuiltinEngine, load_grammars
from parrot_engine.engine.grammar import GrammarCompiler
from parrot_engine.huggingface.context_runner import ContextRunner
from parrot_engine.huggingface.loading import load_huggingface_runner
from parrot_engine.kv_cache.host_copies import BlockCopies
from parrot_engine.kv_cache.host_rates import load_copies
from parrot_engine.protocol import EngineStats, StepResult
from parrot_engine.settings import BuiltinSettings, HuggingFaceSettings


class HuggingFaceEngine(BuiltinEngine):
    """A transformers model over paged KV; implements `parrot_engine.protocol.Engine`."""

    def __init__(
        self,
        runner: Runner,
        settings: BuiltinSettings,
        *,
        model: str,
        grammars: GrammarCompiler | None = None,
        copies: BlockCopies | None = None,
    ) -> None:
        """Initialise a `BuiltinEngine` of kind `huggingface`."""
        super().__init__(runner, settings, model=model, grammars=grammars, copies=copies)
        self._info = replace(self._info, kind="huggingface")

    @classmethod
    def load(  # type: ignore[override]
        cls,
        folder: Path,
        settings: HuggingFaceSettings,
        *,
        model: str,
        tokenizer_json: str | None = None,
    ) -> HuggingFaceEngine:
        """Do as `BuiltinEngine.load` does, with a model of transformers; read safetensors only.

        Raises:
            CheckpointError: transformers cannot load it.
            SettingsError: device, dtype or cache size cannot be had.
        """
        runner = load_huggingface_runner(folder, settings)
        grammars = None if tokenizer_json is None else load_grammars(tokenizer_json, runner)
        if isinstance(runner, ContextRunner):
            return ContextEngine(runner, settings, model=model, grammars=grammars)
        copies, paged = load_copies(runner, settings)
        return HuggingFaceEngine(runner, paged, model=model, grammars=grammars, copies=copies)


class ContextEngine(HuggingFaceEngine):
    """A transformers model, one context at a time, with transformers' own caches.

    The past key values of one context are one block of the pool, as long as the longest context: a
    fork copies them when either side goes on, and idle contexts give theirs up when there are too
    many and compute them again when needed. No shared prefixes, and a forward pass is of one
    context: the result never depends on what else is in the batch.
    """

    def __init__(
        self,
        runner: ContextRunner,
        settings: BuiltinSettings,
        *,
        model: str,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """Take a loaded runner; of the settings those count that are not about paged KV."""
        super().__init__(
            runner,
            BuiltinSettings(
                block_size=runner.block_size,
                max_batch_size=settings.max_batch_size,
                max_batch_tokens=settings.max_batch_tokens,
                max_waiting=settings.max_waiting,
                max_contexts=settings.max_contexts,
                prefix_caching=False,
                overlap="off",
                seed=settings.seed,
            ),
            model=model,
            grammars=grammars,
        )
        self._past = runner
        # Its blocks are nothing that a scheduler could count with.
        self._info = replace(self._info, num_blocks=0, block_size=0)

    def step(self) -> StepResult:
        """Do a step of the builtin engine, then drop past key values that no context holds."""
        result = super().step()
        self._past.retain(self._pool.references)
        return result

    def stats(self) -> EngineStats:
        return replace(super().stats(), free_blocks=0)
