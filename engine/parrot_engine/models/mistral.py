"""Mistral 7B and its successors of the same architecture (v0.2, v0.3, Nemo, Small)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parrot_engine.exceptions import UnsupportedModelError
from parrot_engine.models.config import ModelConfig, architecture_of, read_common


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Like Llama without biases, with one window for all layers (null: none)."""
    window = raw.get("sliding_window", 4096)
    layer_types = set(raw.get("layer_types") or ())
    if layer_types - {"sliding_attention" if window is not None else "full_attention"}:
        raise UnsupportedModelError("layer types that alternate", architecture=architecture_of(raw))
    num_layers = raw.get("num_hidden_layers")
    return read_common(
        raw,
        windows=(window,) * num_layers if isinstance(num_layers, int) else None,
        default_kv_heads=8,
        default_max_position=131_072,
    )
