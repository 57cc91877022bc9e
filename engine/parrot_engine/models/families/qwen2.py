"""Qwen2 and Qwen2.5, dense."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parrot_engine.models.config import ModelConfig, read_common, windows_by_layer


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Biases on q, k and v only; optional windows on the upper layers."""
    return read_common(
        raw,
        qkv_bias=True,
        windows=windows_by_layer(raw, default_window=4096),
        default_kv_heads=32,
        default_max_position=32_768,
    )
