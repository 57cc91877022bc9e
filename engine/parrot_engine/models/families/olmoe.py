"""OLMoE: mixtures of experts, and norms over all heads of q and k."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parrot_engine.exceptions import UnsupportedModelError
from parrot_engine.models.config import ModelConfig, architecture_of, read_common, read_experts


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """All layers are mixtures; by default the factors add up to less than 1."""
    if raw.get("clip_qkv") is not None:
        raise UnsupportedModelError("clipped q, k and v", architecture=architecture_of(raw))
    raw = {"rms_norm_eps": 1e-5, **raw}
    attention_bias = bool(raw.get("attention_bias", False))
    config = read_common(
        raw, qkv_bias=attention_bias, o_bias=attention_bias, default_max_position=4096
    )
    experts = read_experts(
        raw,
        count="num_experts",
        size="intermediate_size",
        normalize=bool(raw.get("norm_topk_prob", False)),
    )
    return replace(config, experts=experts, projection_norm=True)
