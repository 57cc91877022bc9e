"""SmolLM3: Llama whose every fourth layer does not rotate heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parrot_engine.exceptions import CheckpointError
from parrot_engine.models.config import NO_ROPE, ModelConfig, positive_number, windows_by_layer
from parrot_engine.models.families import llama


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """`no_rope_layers` has a 0 for each layer without rotation; windows follow `layer_types`."""
    raw = {"rope_theta": 2e6, "tie_word_embeddings": True, "num_key_value_heads": 4, **raw}
    config = llama.read_config({"max_position_embeddings": 32_768, **raw})
    interval = int(positive_number(raw, "no_rope_layer_interval", 4))
    rotates = raw.get("no_rope_layers") or [
        int((layer + 1) % interval != 0) for layer in range(config.num_layers)
    ]
    if not isinstance(rotates, list) or len(rotates) != config.num_layers:
        raise CheckpointError(
            f"config.json: `no_rope_layers` must list {config.num_layers} layers, found {rotates!r}"
        )
    ropes = tuple(config.rope if rotated else NO_ROPE for rotated in rotates)
    # Without `layer_types`, the layers without rotation have the windows.
    types = raw.get("layer_types") or [
        "full_attention" if rotated or raw.get("sliding_window") is None else "sliding_attention"
        for rotated in rotates
    ]
    windows = windows_by_layer({**raw, "layer_types": types}, default_window=None)
    return replace(config, layer_ropes=ropes, windows=windows)
