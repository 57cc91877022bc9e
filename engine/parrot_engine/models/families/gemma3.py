"""Gemma 3, text alone: like Gemma 2, with norms of q and k instead of soft caps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parrot_engine.exceptions import CheckpointError
from parrot_engine.models.config import ModelConfig, architecture_of, positive_number, read_rope
from parrot_engine.models.families.gemma2 import read_gemma


def read_text_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the text part of a checkpoint that may also have a vision model (4B, 12B, 27B)."""
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        raise CheckpointError(f"config.json: `text_config` must be an object, found {text!r}")
    shared = ("architectures", "dtype", "torch_dtype", "quantization_config")
    given = {key: raw[key] for key in shared if raw.get(key) is not None}
    # Keys missing in old files have the class's values, not the usual defaults of `text_config`.
    sizes = {"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4}
    return replace(read_config({**sizes, **text, **given}), is_part=True)


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Layers with a window have a separate rotary embedding."""
    by_type = raw.get("rope_parameters") or {}
    if not isinstance(by_type, Mapping) or not all(
        value is None or isinstance(value, Mapping) for value in by_type.values()
    ):
        raise CheckpointError(
            f"config.json: rope parameters must be an object for each type of layer: {by_type!r}"
        )
    full = {**(by_type.get("full_attention") or {}), **(raw.get("rope_scaling") or {})}
    local = dict(by_type.get("sliding_attention") or {})
    full.setdefault("rope_theta", raw.get("rope_theta") or 1e6)
    local.setdefault("rope_theta", raw.get("rope_local_base_freq") or 1e4)
    given = {**raw, "rope_scaling": None}
    config = read_gemma(
        {**given, "rope_parameters": full},
        full_attention_every=int(positive_number(raw, "sliding_window_pattern", 6)),
    )
    local_rope = read_rope(
        {**given, "rope_parameters": local},
        architecture_of(raw),
        config.max_position,
        config.head_dim,
    )
    ropes = tuple(config.rope if window is None else local_rope for window in config.windows)
    return replace(config, qk_norm=True, layer_ropes=ropes)
