"""GLM-4 of 2025 (GLM-4-0414, GLM-Z1): norms on both sides, half of a head is rotated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parrot_engine.models.config import LayerNorms, ModelConfig, fused_gate_up, read_common

_NORMS = LayerNorms(behind_attention="post_self_attn_layernorm", behind_mlp="post_mlp_layernorm")


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Neighbouring elements of a head are rotated together; gate and up are one product."""
    config = read_common(
        {"rms_norm_eps": 1.5625e-7, **raw},
        qkv_bias=bool(raw.get("attention_bias", True)),
        default_kv_heads=2,
        default_head_dim=128,
        default_max_position=131_072,
        default_partial_rotary=0.5,
    )
    return replace(
        config,
        rope=replace(config.rope, interleaved=True),
        norms=_NORMS,
        fused=(fused_gate_up(config),),
    )
