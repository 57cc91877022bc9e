"""The huggingface engine: the builtin engine's step loop over a runner of transformers.

For models that the builtin engine does not know. Contexts, queues, priorities, failures, sampling
and grammars are those of the builtin engine. The past key values of one context are one block of
its pool, as long as the longest context: a fork copies them when either side goes on, and idle
contexts give theirs up when there are too many and compute them again when needed. Slow beside the
builtin engine: no shared prefixes, and a forward pass is of one context. So the result never
depends on what else is in the batch.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from parrot_engine.engine.builtin_engine import BuiltinEngine, load_grammars
from parrot_engine.engine.grammar import GrammarCompiler
from parrot_engine.huggingface.runner import HuggingFaceRunner, load_huggingface_runner
from parrot_engine.protocol import EngineStats, StepResult
from parrot_engine.settings import BuiltinSettings, HuggingFaceSettings


class HuggingFaceEngine(BuiltinEngine):
    """Contexts as past key values; implements `parrot_engine.protocol.Engine`."""

    def __init__(
        self,
        runner: HuggingFaceRunner,
        settings: HuggingFaceSettings,
        *,
        model: str,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """Take a loaded runner.

        Args:
            runner: with `settings.max_cached_contexts` blocks.
            settings: limits.
            model: name under which the model is served.
            grammars: for its vocabulary; without them generations with a grammar are refused.
        """
        super().__init__(
            runner,
            BuiltinSettings(
                block_size=runner.block_size,
                max_batch_size=settings.max_batch_size,
                max_batch_tokens=settings.max_batch_tokens,
                max_waiting=settings.max_contexts,
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
        self._info = replace(self._info, kind="huggingface", num_blocks=0, block_size=0)

    @classmethod
    def load(  # type: ignore[override]
        cls,
        folder: Path,
        settings: HuggingFaceSettings,
        *,
        model: str,
        tokenizer_json: str | None = None,
    ) -> HuggingFaceEngine:
        """As `BuiltinEngine.load`, with the model from transformers; reads safetensors only.

        Raises:
            CheckpointError: transformers cannot load it.
            SettingsError: device or dtype cannot be had.
        """
        runner = load_huggingface_runner(folder, settings)
        grammars = None if tokenizer_json is None else load_grammars(tokenizer_json, runner)
        return cls(runner, settings, model=model, grammars=grammars)

    def step(self) -> StepResult:
        """As the builtin engine's; past key values that no context holds any more are dropped."""
        result = super().step()
        self._past.retain(self._pool.references)
        return result

    def stats(self) -> EngineStats:
        return replace(super().stats(), free_blocks=0)
