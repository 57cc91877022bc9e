"""NomicBERT (nomic-embed-text, arctic-embed-m-long, …): vectors; BERT with rotated heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parrot_engine.exceptions import CheckpointError, PoolingModelError
from parrot_engine.models.config import architecture_of, read_rope
from parrot_engine.models.encoder_config import EncoderConfig, ScoreHead, read_encoder, size_of

#: Its names, and BERT's names for the same tensors.
_NAMES = (
    ("emb_ln.", "embeddings.LayerNorm."),
    ("encoder.layers.", "encoder.layer."),
    (".attn.Wqkv.", ".attention.self.Wqkv."),
    (".attn.out_proj.", ".attention.output.dense."),
    (".norm1.", ".attention.output.LayerNorm."),
    (".mlp.fc11.", ".intermediate.up."),
    (".mlp.fc12.", ".intermediate.gate."),
    (".mlp.fc2.", ".output.dense."),
    (".norm2.", ".output.LayerNorm."),
)
#: Keys in the code published with the first checkpoints, by transformers' keys.
_KEYS = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "layer_norm_eps": "layer_norm_epsilon",
    "rope_theta": "rotary_emb_base",
}
#: Options of that code, and their supported values.
_SWITCHES: dict[str, tuple[Any, ...]] = {
    "activation_function": ("swiglu", None),
    "causal": (False, None),
    "mlp_fc1_bias": (False, None),
    "mlp_fc2_bias": (False, None),
    "moe_every_n_layers": (0, -1, None),
    "parallel_block": (False, None),
    "prenorm": (False, None),
    "qkv_proj_bias": (False, None),
    "rotary_emb_fraction": (1.0, None),
    "rotary_emb_interleaved": (False, None),
    "rotary_emb_scale_base": (None,),
    "scale_attn_by_inverse_layer_idx": (False, None),
    "use_rms_norm": (False, None),
}
_THETA = 1000.0


def read_config(raw: Mapping[str, Any]) -> EncoderConfig:
    """Texts end at pretraining's length, because later positions need other angles."""
    architecture = architecture_of(raw)
    for key, known in _SWITCHES.items():
        if raw.get(key) not in known:
            raise PoolingModelError(f"{key}: {raw[key]!r}", architecture)
    given = {own: raw[key] for own, key in _KEYS.items() if key in raw}
    raw = {"rope_theta": _THETA, "hidden_act": "silu", **given, **raw}
    if "max_position_embeddings" not in raw:
        trained = raw.get("max_trained_positions") or size_of(raw, "n_positions")
        raw["max_position_embeddings"] = min(trained, size_of(raw, "n_positions"))
    config = read_encoder(
        raw, prefix="", first_position=0, score_head=ScoreHead("dense", "classifier")
    )
    head_dim = config.hidden_size // config.num_heads
    if head_dim % 2 or raw.get("head_dim") not in (None, head_dim):
        raise CheckpointError(f"config.json: heads of {raw.get('head_dim', head_dim)} elements")
    rope = read_rope(raw, architecture, config.num_positions, head_dim)
    return replace(config, rope=rope, gated=True, bias=False, names=_NAMES)
