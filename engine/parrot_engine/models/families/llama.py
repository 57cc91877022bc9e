"""Llama 2 and 3.x, and what shares their architecture (SmolLM2, Yi, TinyLlama, …)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parrot_engine.models.config import ModelConfig, read_common


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Plain pre-norm decoder; `attention_bias` puts biases on all four projections."""
    attention_bias = bool(raw.get("attention_bias", False))
    return read_common(
        raw,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        default_max_position=2048,
    )
