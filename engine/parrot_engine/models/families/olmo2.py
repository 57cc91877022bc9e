"""OLMo 2: norms behind attention and MLP, and over all heads of q and k."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parrot_engine.models.config import LayerNorms, ModelConfig, read_common

_NORMS = LayerNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """`attention_bias` puts biases on all four projections."""
    attention_bias = bool(raw.get("attention_bias", False))
    config = read_common(
        {"rms_norm_eps": 1e-5, **raw},
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        default_max_position=2048,
    )
    return replace(config, norms=_NORMS, projection_norm=True)
