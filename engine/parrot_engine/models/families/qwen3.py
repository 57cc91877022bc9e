"""Qwen3, dense."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parrot_engine.models.config import ModelConfig, read_common, windows_by_layer


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Norms on q and k heads; `attention_bias` puts biases on all four projections."""
    attention_bias = bool(raw.get("attention_bias", False))
    return read_common(
        raw,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        qk_norm=True,
        windows=windows_by_layer(raw, default_window=4096),
        default_kv_heads=32,
        default_head_dim=128,
        default_max_position=32_768,
    )
