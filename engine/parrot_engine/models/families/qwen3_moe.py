"""Qwen3 with mixtures of experts (30B-A3B, 235B-A22B, Coder)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parrot_engine.models.config import (
    ModelConfig,
    positive_number,
    read_common,
    read_experts,
    window_of_all_layers,
)


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Norms on q and k heads; mixtures in every n-th layer, except listed ones."""
    if not raw.get("use_sliding_window"):
        raw = {**raw, "sliding_window": None}
    attention_bias = bool(raw.get("attention_bias", False))
    config = read_common(
        raw,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        qk_norm=True,
        windows=window_of_all_layers(raw, default_window=4096),
        default_kv_heads=4,
        default_max_position=32_768,
    )
    step = int(positive_number(raw, "decoder_sparse_step", 1))
    dense = set(raw.get("mlp_only_layers") or ())
    dense |= {layer for layer in range(config.num_layers) if (layer + 1) % step}
    # Configurations older than transformers 5 say `num_experts`.
    raw = {"num_local_experts": raw.get("num_experts"), **raw}
    experts = read_experts(
        raw,
        count="num_local_experts",
        size="moe_intermediate_size",
        normalize=bool(raw.get("norm_topk_prob", False)),
        dense_layers=dense,
    )
    return replace(config, experts=experts)
