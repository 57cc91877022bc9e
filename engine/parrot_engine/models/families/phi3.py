"""Phi-3, Phi-3.5 and Phi-4 (mini as well) without mixtures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parrot_engine.models.config import (
    ModelConfig,
    fused_gate_up,
    fused_qkv,
    read_common,
    window_of_all_layers,
)


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """q, k and v are one product in the checkpoint, gate and up another; one window for all
    layers.
    """
    raw = {"rms_norm_eps": 1e-5, "sliding_window": None, **raw}
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    kind = scaling.get("rope_type") or scaling.get("type")
    if kind in ("su", "yarn"):
        # Earlier names of LongRoPE.
        raw["rope_scaling"] = {**scaling, "rope_type": "longrope"}
    config = read_common(
        raw,
        windows=window_of_all_layers(raw, default_window=None),
        default_max_position=4096,
        default_partial_rotary=1.0,
    )
    return replace(config, fused=(fused_qkv(config), fused_gate_up(config)))
