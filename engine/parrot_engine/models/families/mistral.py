"""Mistral 7B and its successors of the same architecture (v0.2, v0.3, Nemo, Small)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parrot_engine.models.config import ModelConfig, read_common, window_of_all_layers


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Like Llama without biases, with one window for all layers."""
    return read_common(
        raw,
        windows=window_of_all_layers(raw, default_window=4096),
        default_kv_heads=8,
        default_max_position=131_072,
    )
