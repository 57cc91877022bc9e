"""Forward passes over contexts, and the past key values that they leave behind.

A pass is of one context and at most a chunk of its tokens. How many contexts keep their past key
values is bounded; what was dropped is computed again when it is needed.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from parrot_engine.engine.contexts import PendingFill
from parrot_engine.exceptions import CheckpointError, PrimitiveError
from parrot_engine.huggingface.contexts import Context
from parrot_engine.huggingface.settings import HuggingFaceSettings
from parrot_engine.models.checkpoint import read_optional_json
from parrot_engine.models.config import GenerationDefaults, read_generation_defaults
from parrot_engine.models.loader import resolve_device, resolve_dtype
from parrot_engine.runner.sampler import prompt_logprobs


class LoadedModel(NamedTuple):
    """A model on its device, and what its checkpoint says about ending and sampling."""

    model: PreTrainedModel
    defaults: GenerationDefaults


def load_model(folder: Path, settings: HuggingFaceSettings) -> LoadedModel:
    """The checkpoint in `folder`, in evaluation mode; reads safetensors only.

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
    return LoadedModel(model.to(device).eval(), defaults)


def score(fill: PendingFill, logits: Tensor | None, targets: list[int]) -> None:
    """Note the log-probabilities of tokens of a Fill that asked for them.

    Args:
        fill: gets one more score a target.
        logits: `[targets or more, vocab_size]`, or `[vocab_size]` for one target: of the tokens
            before each.
        targets: the next tokens of the Fill that have none yet.

    Raises:
        PrimitiveError: the logits hold a NaN.
    """
    count = fill.prompt_logprobs
    if logits is None or count is None or not targets:
        return
    rows = logits.reshape(-1, logits.shape[-1])[: len(targets)]
    scores = prompt_logprobs(rows, targets, count)
    if any(score.logprob != score.logprob for score in scores):
        raise PrimitiveError(
            "numerical_error", "the model's logits are not finite for this context"
        )
    fill.scores.extend(scores)


class Forward:
    def __init__(self, model: PreTrainedModel, *, chunk_tokens: int, max_cached: int) -> None:
        """Take a loaded model.

        Args:
            model: in evaluation mode, on its device.
            chunk_tokens: tokens of one pass.
            max_cached: contexts that keep their past key values after `shrink`.
        """
        self.model = model
        self._device = model.device
        self._chunk_tokens = chunk_tokens
        self._max_cached = max_cached
        #: Every context with past key values, least recently used first.
        self._cached: OrderedDict[Context, None] = OrderedDict()

    @property
    def num_cached(self) -> int:
        """Contexts that hold past key values."""
        return len(self._cached)

    def advance(self, context: Context, *, all_logits: bool = False) -> Tensor:
        """One pass over tokens without past key values, of which there must be some.

        Args:
            all_logits: of every token of the pass; else of the last only.

        Returns:
            Float32 logits `[1 or tokens, vocab_size]`; the last row is also left at the context.
        """
        if context.cache is None:
            context.cache = DynamicCache(config=self.model.config)
        start = context.computed
        chunk = context.token_ids[start : start + self._chunk_tokens]
        output = self.model(
            input_ids=torch.tensor([chunk], device=self._device),
            past_key_values=context.cache,
            use_cache=True,
            logits_to_keep=0 if all_logits else 1,
        )
        logits: Tensor = output.logits[0].float()
        context.cache = output.past_key_values
        context.computed = start + len(chunk)
        context.logits = logits[-1].clone()
        self._touch(context)
        return logits

    def fork(self, parent: Context, child: Context) -> None:
        """Give a child what the parent has computed."""
        if parent.cache is not None and parent.computed:
            child.cache = copy.deepcopy(parent.cache)
            child.computed, child.logits = parent.computed, parent.logits
            self._touch(child)

    def drop(self, context: Context) -> None:
        """Give up the past key values of a context, if it has any."""
        context.cache, context.computed, context.logits = None, 0, None
        self._cached.pop(context, None)

    def shrink(self, is_busy: Callable[[Context], bool]) -> int:
        """Drop what was used longest ago until few enough are left, busy contexts last.

        Returns:
            How many contexts lost their past key values.
        """
        dropped = 0
        for idle_only in (True, False):
            for context in list(self._cached):
                if len(self._cached) <= self._max_cached:
                    return dropped
                if not idle_only or not is_busy(context):
                    self.drop(context)
                    dropped += 1
        return dropped

    def _touch(self, context: Context) -> None:
        self._cached[context] = None
        self._cached.move_to_end(context)
