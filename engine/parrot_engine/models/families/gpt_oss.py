"""gpt-oss (20B, 120B; MXFP4 or plain): bounded mixtures, sinks, every other layer with a window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parrot_engine.models.config import (
    ExpertNames,
    ModelConfig,
    positive_number,
    read_common,
    read_experts,
    windows_by_layer,
)

_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Experts are plain or in MXFP4, which is read as bfloat16; other quantisation is refused."""
    raw = {"rms_norm_eps": 1e-5, "sliding_window": 128, **raw}
    quantization = raw.get("quantization_config")
    if isinstance(quantization, Mapping) and quantization.get("quant_method") == "mxfp4":
        raw["quantization_config"] = None
        raw.setdefault("dtype", raw.get("torch_dtype") or "bfloat16")
    if not (raw.get("rope_parameters") or raw.get("rope_scaling")):
        raw["rope_parameters"] = _ROPE
    attention_bias = bool(raw.get("attention_bias", True))
    config = read_common(
        {"rope_theta": 150_000.0, **raw},
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        default_kv_heads=8,
        default_head_dim=64,
        default_max_position=131_072,
    )
    types = raw.get("layer_types") or [
        "full_attention" if layer % 2 else "sliding_attention" for layer in range(config.num_layers)
    ]
    windows = {**raw, "layer_types": types, "use_sliding_window": True}
    experts = read_experts(
        raw,
        count="num_local_experts",
        size="intermediate_size",
        normalize=True,
        names=ExpertNames(router="router"),
    )
    return replace(
        config,
        windows=windows_by_layer(windows, default_window=None),
        sinks=True,
        experts=replace(
            experts,
            bias=True,
            alpha=positive_number(raw, "swiglu_alpha", 1.702),
            limit=positive_number(raw, "swiglu_limit", 7.0),
            stacked=True,
        ),
    )
