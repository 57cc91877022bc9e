"""Forward passes of a transformers model, one context each, and their past key values.

A KV block of this runner is the past key values of a whole context in transformers' own cache; its
block size is the longest context.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from parrot_engine.batch import BatchRow, RowOutcome, Runner, StepBatch
from parrot_engine.exceptions import CheckpointError
from parrot_engine.models.checkpoint import read_optional_json
from parrot_engine.models.config import GenerationDefaults, read_generation_defaults
from parrot_engine.models.loader import resolve_device, resolve_dtype
from parrot_engine.runner.model_runner import InFlightStep
from parrot_engine.runner.sampler import StepLogits
from parrot_engine.settings import HuggingFaceSettings

_log = logging.getLogger(__name__)

#: Taken when neither settings nor configuration name a length.
_FALLBACK_CONTEXT_TOKENS = 2048


def load_huggingface_runner(folder: Path, settings: HuggingFaceSettings) -> HuggingFaceRunner:
    """A runner for the checkpoint in `folder`; reads safetensors only.

    Raises:
        CheckpointError: transformers cannot load it.
        SettingsError: device or dtype cannot be had.
    """
    device = resolve_device(settings.device)
    if device.type == "cpu":
        torch.set_num_threads(settings.num_threads)
    config = read_optional_json(folder / "config.json") or {}
    defaults = read_generation_defaults(
        config, read_optional_json(folder / "generation_config.json")
    )
    stored = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(folder),
            dtype=resolve_dtype(settings.dtype, stored, device),
            trust_remote_code=settings.trust_remote_code,
            use_safetensors=True,
            local_files_only=True,
        )
    except Exception as error:
        # transformers raises nearly everything here: OSError, ValueError, KeyError, …
        raise CheckpointError(f"transformers cannot load {folder}: {error}") from error
    return HuggingFaceRunner(model.to(device).eval(), defaults, settings)


@dataclass(slots=True)
class _Past:
    cache: DynamicCache
    num_tokens: int = 0
    #: The model's prediction behind the last of them, float32 `[1, vocab_size]`.
    logits: Tensor | None = None


class HuggingFaceRunner(Runner):
    """Executes steps with a transformers model."""

    def __init__(
        self, model: PreTrainedModel, defaults: GenerationDefaults, settings: HuggingFaceSettings
    ) -> None:
        """Take a loaded model.

        Args:
            model: in evaluation mode, on its device.
            defaults: the checkpoint's rules for ending and sampling.
            settings: limits.
        """
        config = model.config.get_text_config()
        longest = getattr(config, "max_position_embeddings", None) or _FALLBACK_CONTEXT_TOKENS
        if settings.max_context_tokens is not None:
            longest = min(longest, settings.max_context_tokens)
        self.model = model
        self.vocab_size = int(config.vocab_size)
        self.eos_token_ids = defaults.eos_token_ids
        self.max_position = self.block_size = longest
        self.architecture = type(model).__name__
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.device = str(model.device)
        self.num_blocks = settings.max_cached_contexts
        self.default_sampling = defaults.sampling
        self._past: dict[int, _Past] = {}

    @property
    def num_cached(self) -> int:
        """Contexts that hold past key values."""
        return len(self._past)

    @torch.inference_mode()
    def launch(self, batch: StepBatch) -> HuggingFaceStep:
        """Compute a step; a row that fails leaves the others as they are."""
        for source, target in batch.copies:
            self._past[target] = copy.deepcopy(self._past[source])
        logits: list[Tensor] = []
        failed: set[int] = set()
        for index, row in enumerate(batch.rows):
            block = int(row.block_table[0])
            num_logits = {"none": 0, "last": 1, "all": len(row.token_ids)}[row.logits]
            try:
                computed = self._compute(row, block)
            except Exception:
                _log.exception("a forward pass of %d tokens failed", len(row.token_ids))
                self._past.pop(block, None)
                failed.add(index)
                computed = torch.zeros(num_logits, self.vocab_size, device=self.model.device)
            logits.append(computed[len(computed) - num_logits :])
        return HuggingFaceStep(batch, torch.cat(logits), failed)

    def _compute(self, row: BatchRow, block: int) -> Tensor:
        """The logits of a row's tokens, float32; of the last one alone where no others matter."""
        if row.start == 0:
            self._past[block] = _Past(DynamicCache(config=self.model.config))
        past = self._past[block]
        # A row may begin with the last token computed, whose logits are needed once more.
        num_known = past.num_tokens - row.start
        token_ids = row.token_ids[num_known:]
        known = [past.logits] if num_known and past.logits is not None else []
        if not token_ids:
            return torch.cat(known)
        output = self.model(
            input_ids=torch.tensor([token_ids], device=self.model.device),
            past_key_values=past.cache,
            use_cache=True,
            logits_to_keep=0 if row.logits == "all" else 1,
        )
        logits: Tensor = output.logits[0].float()
        past.cache = output.past_key_values
        past.num_tokens += len(token_ids)
        past.logits = logits[-1:].clone()
        return torch.cat([*known, logits])

    def retain(self, references: Callable[[int], int]) -> None:
        """Drop the past key values of blocks that nothing refers to."""
        for block in [block for block in self._past if references(block) == 0]:
            del self._past[block]

    def close(self) -> None:
        self._past.clear()


class HuggingFaceStep(InFlightStep):
    """A computed step, of which single rows may have failed."""

    def __init__(self, batch: StepBatch, logits: Tensor, failed: Collection[int]) -> None:
        super().__init__(batch, StepLogits(logits), logits.device, "torch")
        self._failed = failed

    def outcome(self) -> list[RowOutcome]:
        return [
            RowOutcome(has_failed=True) if index in self._failed else outcome
            for index, outcome in enumerate(super().outcome())
        ]
