"""Gemma 2: soft caps, norms on both sides, every other layer with a window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parrot_engine.exceptions import UnsupportedModelError
from parrot_engine.models.config import (
    LayerNorms,
    ModelConfig,
    architecture_of,
    positive_number,
    read_common,
    windows_by_layer,
)

_NORMS = LayerNorms(
    behind_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    behind_mlp="post_feedforward_layernorm",
)


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Stored weights of norms are 1 less than the scale."""
    raw = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, **raw}
    return read_gemma({"max_position_embeddings": 8192, **raw}, full_attention_every=2)


def read_gemma(raw: Mapping[str, Any], *, full_attention_every: int) -> ModelConfig:
    """Read the settings Gemma 2 and 3 share; `layer_types` overrides which layers have windows."""
    if raw.get("use_bidirectional_attention"):
        raise UnsupportedModelError("attention to later tokens", architecture=architecture_of(raw))
    raw = {"sliding_window": 4096, "tie_word_embeddings": True, **raw}
    # `hidden_act` of old files differs from the activation that the models compute.
    raw["hidden_act"] = raw.get("hidden_activation") or "gelu_pytorch_tanh"
    attention_bias = bool(raw.get("attention_bias", False))
    config = read_common(
        raw,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        default_kv_heads=4,
        default_head_dim=256,
        default_max_position=131_072,
    )
    types = raw.get("layer_types") or [
        "sliding_attention" if (layer + 1) % full_attention_every else "full_attention"
        for layer in range(config.num_layers)
    ]
    windows = {**raw, "layer_types": types, "use_sliding_window": True}
    return replace(
        config,
        windows=windows_by_layer(windows, default_window=None),
        norms=_NORMS,
        norm_offset=1.0,
        attention_scale=positive_number(raw, "query_pre_attn_scalar", 256) ** -0.5,
        embedding_scale=float(config.hidden_size) ** 0.5,
        attention_softcap=_cap(raw, "attn_logit_softcapping"),
        logits_softcap=_cap(raw, "final_logit_softcapping"),
    )


def _cap(raw: Mapping[str, Any], key: str) -> float | None:
    return None if raw.get(key) is None else positive_number(raw, key, 1.0)
