"""Granite 3, dense: Llama with factors on embedding, branches and logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parrot_engine.models.config import ModelConfig, positive_number
from parrot_engine.models.families import llama


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Attention scores have a factor of their own instead of 1 / sqrt(head_dim)."""
    return replace(
        llama.read_config(raw),
        attention_scale=positive_number(raw, "attention_multiplier", 1.0),
        embedding_scale=positive_number(raw, "embedding_multiplier", 1.0),
        residual_scale=positive_number(raw, "residual_multiplier", 1.0),
        logits_scale=1.0 / positive_number(raw, "logits_scaling", 1.0),
    )
