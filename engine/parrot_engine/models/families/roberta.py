"""RoBERTa and XLM-R (multilingual E5, BGE-M3, BGE rerankers, …): vectors, and scores of pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parrot_engine.models.encoder_config import EncoderConfig, ScoreHead, read_encoder


def read_config(raw: Mapping[str, Any]) -> EncoderConfig:
    """Positions start after the padding token's id, as in fairseq."""
    padding = raw.get("pad_token_id")
    return read_encoder(
        raw,
        prefix="roberta.",
        first_position=(1 if padding is None else int(padding)) + 1,
        score_head=ScoreHead("classifier.dense", "classifier.out_proj"),
    )
