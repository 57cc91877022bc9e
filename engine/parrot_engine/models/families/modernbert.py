"""ModernBERT (GTE, Nomic, …): vectors, and scores of pairs; windows in two layers of three."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parrot_engine.exceptions import CheckpointError
from parrot_engine.models.config import RopeConfig, architecture_of, read_rope
from parrot_engine.models.encoder_config import check_one_label, read_activation, size_of
from parrot_engine.models.rotary_encoder import RotaryEncoderConfig

_FULL, _WINDOW = "full_attention", "sliding_attention"


def read_config(raw: Mapping[str, Any]) -> RotaryEncoderConfig:
    """Positions are rotated; layers with a window use another theta."""
    architecture = architecture_of(raw)
    hidden_size, num_heads = size_of(raw, "hidden_size"), size_of(raw, "num_attention_heads")
    if hidden_size % (2 * num_heads):
        raise CheckpointError(f"config.json: {hidden_size} is no multiple of {num_heads} pairs")
    num_layers, longest = size_of(raw, "num_hidden_layers"), size_of(raw, "max_position_embeddings")
    every = size_of({"global_attn_every_n_layers": 3, **raw}, "global_attn_every_n_layers")
    kinds = raw.get("layer_types") or [
        _WINDOW if layer % every else _FULL for layer in range(num_layers)
    ]
    if len(kinds) != num_layers or set(kinds) - {_FULL, _WINDOW}:
        raise CheckpointError(f"config.json: `layer_types` are {kinds!r}")
    window = size_of({"local_attention": 128, **raw}, "local_attention") // 2 + 1

    def rope(kind: str, key: str, default: float) -> RopeConfig:
        given = (raw.get("rope_parameters") or {}).get(kind) or {
            "rope_theta": raw.get(key) or default
        }
        return read_rope(
            {"rope_parameters": given}, architecture, longest, hidden_size // num_heads
        )

    dtype = raw.get("dtype") or raw.get("torch_dtype")
    return RotaryEncoderConfig(
        architecture=architecture,
        vocab_size=size_of(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=size_of(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        norm_eps=float(raw.get("norm_eps", 1e-5)),
        norm_bias=bool(raw.get("norm_bias", False)),
        attention_bias=bool(raw.get("attention_bias", False)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        activation=read_activation(raw, "hidden_activation"),
        max_tokens=longest,
        windows=tuple(window if kind == _WINDOW else None for kind in kinds),
        full_rope=rope(_FULL, "global_rope_theta", 160_000.0),
        window_rope=rope(_WINDOW, "local_rope_theta", 10_000.0),
        dtype=dtype if isinstance(dtype, str) else None,
        scores=check_one_label(raw),
        head_bias=bool(raw.get("classifier_bias", False)),
        head_activation=read_activation(raw, "classifier_activation"),
    )
