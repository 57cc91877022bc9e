"""Granite 3, dense: Llama with factors on embedding, branches and logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parrot_engine.models.config import ModelConfig
from parrot_engine.models.families import llama


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Scores of attention have a factor of their own instead of 1 / sqrt(head_dim)."""
    return replace(
        llama.read_config(raw),
        attention_scale=float(raw.get("attention_multiplier", 1.0)),
        embedding_scale=float(raw.get("embedding_multiplier", 1.0)),
        residual_scale=float(raw.get("residual_multiplier", 1.0)),
        logits_scale=1.0 / float(raw.get("logits_scaling", 1.0)),
    )
