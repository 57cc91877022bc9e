"""Loads a checkpoint into a runner of a transformers model over paged KV."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from parrot_engine.exceptions import CheckpointError
from parrot_engine.huggingface.packed_model import PackedModel
from parrot_engine.huggingface.probe import UnpagedModelError
from parrot_engine.huggingface.self_check import check_graphs, pack_checked
from parrot_engine.models.checkpoint import read_optional_json
from parrot_engine.models.config import GenerationDefaults, read_generation_defaults
from parrot_engine.models.loader import resolve_dtype
from parrot_engine.runner.loader import prepare_device, runner_of
from parrot_engine.runner.model_runner import ModelRunner
from parrot_engine.settings import HuggingFaceSettings

_log = logging.getLogger(__name__)

#: Used if the configuration gives no length.
_FALLBACK_CONTEXT_TOKENS = 2048


class _Loaded(NamedTuple):
    model: PreTrainedModel
    defaults: GenerationDefaults


def load_huggingface_runner(folder: Path, settings: HuggingFaceSettings) -> ModelRunner:
    """Return a runner for the checkpoint in `folder`; reads safetensors only.

    Sets torch's thread count for the process when the device is the CPU, and the thread's current
    device when it is a GPU.

    Raises:
        CheckpointError: transformers cannot load it, or its KV cannot be paged.
        SettingsError: device, dtype or cache size is unavailable.
    """
    device, kernels = prepare_device(settings)
    model, defaults = _load(folder, settings, device)
    config = model.config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None) or _FALLBACK_CONTEXT_TOKENS

    def small_runner(packed: PackedModel, num_blocks: int) -> ModelRunner:
        return ModelRunner(
            packed,
            defaults,
            num_blocks=num_blocks,
            block_size=settings.block_size,
            device=device,
            dtype=model.dtype,
            kv_cache_dtype=settings.kv_cache_dtype,
            kernels=kernels,
        )

    name = type(model).__name__
    try:
        packed = pack_checked(model, longest, settings.block_size, small_runner)
    except UnpagedModelError as error:
        raise CheckpointError(f"{name} cannot run over paged keys and values: {error}") from error
    _log.info("%s runs over paged keys and values", name)
    runner = runner_of(packed, defaults, settings, device, model.dtype, kernels, tries_graphs=True)
    if device.type == "cuda" and settings.cuda_graphs != "off":
        check_graphs(runner, small_runner(packed, 1))
    return runner


def _load(folder: Path, settings: HuggingFaceSettings, device: torch.device) -> _Loaded:
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
            # Some versions use SDPA, which ignores soft caps.
            attn_implementation="eager" if _caps_scores(config) else None,
        )
    except Exception as error:
        # transformers raises almost every exception here: OSError, ValueError, KeyError, …
        raise CheckpointError(f"transformers cannot load {folder}: {error}") from error
    return _Loaded(model.to(device).eval(), defaults)


def _caps_scores(config: Mapping[str, Any]) -> bool:
    text = config.get("text_config") or config
    return text.get("attn_logit_softcapping") is not None
