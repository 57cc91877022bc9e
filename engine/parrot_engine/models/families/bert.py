"""BERT (MiniLM, E5, BGE, GTE, …): vectors, and scores of pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parrot_engine.models.encoder_config import EncoderConfig, ScoreHead, read_encoder


def read_config(raw: Mapping[str, Any]) -> EncoderConfig:
    """Positions count from 0; the pooled first token gives a pair's score."""
    return read_encoder(
        raw, prefix="bert.", first_position=0, score_head=ScoreHead("pooler.dense", "classifier")
    )
