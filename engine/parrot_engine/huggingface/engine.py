"""The huggingface engine: the builtin engine's step loop over a model of transformers.

It runs models that the builtin engine does not support. Contexts, queues, priorities, failures,
sampling, grammars, batches, prefix caching, forks and speculation are the builtin engine's;
`packed_model.py` replaces the model's attention. `probe.py` and `self_check.py` refuse models for
which that is impossible.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from parrot_engine.batch import Runner
from parrot_engine.engine.builtin_engine import BuiltinEngine, load_grammars
from parrot_engine.engine.grammar import GrammarCompiler
from parrot_engine.huggingface.loading import load_huggingface_runner
from parrot_engine.kv_cache.host_copies import BlockCopies
from parrot_engine.kv_cache.host_rates import load_copies
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
        """Load a model of transformers, from safetensors only; see `BuiltinEngine.load`.

        Raises:
            CheckpointError: transformers cannot load it, or its KV cannot be paged.
            SettingsError: device, dtype or cache size is unavailable.
        """
        runner = load_huggingface_runner(folder, settings)
        grammars = None if tokenizer_json is None else load_grammars(tokenizer_json, runner)
        copies, paged = load_copies(runner, settings)
        return HuggingFaceEngine(runner, paged, model=model, grammars=grammars, copies=copies)
