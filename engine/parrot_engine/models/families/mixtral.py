"""Mixtral: Mistral with mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parrot_engine.models.config import (
    ExpertNames,
    ModelConfig,
    read_common,
    read_experts,
    window_of_all_layers,
)

_NAMES = ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2")


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """All layers are mixtures whose factors add up to 1."""
    raw = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None, **raw}
    config = read_common(
        raw,
        windows=window_of_all_layers(raw, default_window=None),
        default_kv_heads=8,
        default_max_position=131_072,
    )
    experts = read_experts(
        raw, count="num_local_experts", size="intermediate_size", normalize=True, names=_NAMES
    )
    return replace(config, experts=experts)
