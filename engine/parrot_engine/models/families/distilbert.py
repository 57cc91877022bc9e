"""DistilBERT (multi-qa-distilbert, msmarco-distilbert, …): vectors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parrot_engine.exceptions import PoolingModelError
from parrot_engine.models.config import architecture_of
from parrot_engine.models.encoder_config import EncoderConfig, ScoreHead, read_encoder

#: Its names, and BERT's names for the same tensors.
_NAMES = (
    ("transformer.layer.", "encoder.layer."),
    (".attention.q_lin.", ".attention.self.query."),
    (".attention.k_lin.", ".attention.self.key."),
    (".attention.v_lin.", ".attention.self.value."),
    (".attention.out_lin.", ".attention.output.dense."),
    (".sa_layer_norm.", ".attention.output.LayerNorm."),
    (".ffn.lin1.", ".intermediate.dense."),
    (".ffn.lin2.", ".output.dense."),
    (".output_layer_norm.", ".output.LayerNorm."),
)
_KEYS = {
    "hidden_size": "dim",
    "intermediate_size": "hidden_dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "hidden_act": "activation",
}


def read_config(raw: Mapping[str, Any]) -> EncoderConfig:
    """Read BERT without token types, under other names."""
    if raw.get("sinusoidal_pos_embds"):
        raise PoolingModelError("sinusoidal positions", architecture_of(raw))
    given = {own: raw[key] for own, key in _KEYS.items() if key in raw}
    config = read_encoder(
        {**raw, **given, "type_vocab_size": 1},
        prefix="distilbert.",
        first_position=0,
        score_head=ScoreHead("pre_classifier", "classifier"),
    )
    return replace(config, num_token_types=0, names=_NAMES)
