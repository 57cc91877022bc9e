"""MPNet (all-mpnet-base-v2, multi-qa-mpnet, …): vectors; attention has biases by distance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parrot_engine.models.encoder_config import EncoderConfig, ScoreHead, read_encoder, size_of

#: Its names, and BERT's names for the same tensors.
_NAMES = (
    (".attention.attn.q.", ".attention.self.query."),
    (".attention.attn.k.", ".attention.self.key."),
    (".attention.attn.v.", ".attention.self.value."),
    (".attention.attn.o.", ".attention.output.dense."),
    (".attention.LayerNorm.", ".attention.output.LayerNorm."),
)


def read_config(raw: Mapping[str, Any]) -> EncoderConfig:
    """Read BERT without token types; positions count as in RoBERTa."""
    config = read_encoder(
        {**raw, "type_vocab_size": 1},
        prefix="mpnet.",
        first_position=2,
        score_head=ScoreHead("classifier.dense", "classifier.out_proj"),
    )
    count = size_of({"relative_attention_num_buckets": 32, **raw}, "relative_attention_num_buckets")
    return replace(config, num_token_types=0, names=_NAMES, num_buckets=count)
