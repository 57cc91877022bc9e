"""The configuration of an encoder, normalised and typed; what is not understood is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from parrot_engine.exceptions import CheckpointError, PoolingModelError
from parrot_engine.models.config import architecture_of, positive_number

EncoderActivation: TypeAlias = Literal["gelu", "gelu_tanh", "relu"]

_ACTIVATIONS: dict[str, EncoderActivation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}

_SCORES_PAIRS = "ForSequenceClassification"


class ScoreHead(NamedTuple):
    """Names of the two products that make a score of the first token of a pair."""

    dense: str
    out: str


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """The shape of one encoder."""

    architecture: str
    #: Of the names of its tensors where there is a head.
    prefix: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    norm_eps: float
    activation: EncoderActivation
    #: Rows of the table of positions, and the one of a text's first token.
    num_positions: int
    first_position: int
    num_token_types: int
    #: dtype of the checkpoint as `config.json` names it.
    dtype: str | None
    #: Of cross-encoders.
    score_head: ScoreHead | None = None

    @property
    def max_tokens(self) -> int:
        """Longest text."""
        return self.num_positions - self.first_position


def read_encoder(
    raw: Mapping[str, Any], *, prefix: str, first_position: int, score_head: ScoreHead
) -> EncoderConfig:
    """The configuration of a family from what all share, plus the family's own.

    Raises:
        CheckpointError: values are missing or impossible.
        PoolingModelError: a switch changes the computation in a way that is not known here.
    """
    architecture = architecture_of(raw)
    positions = raw.get("position_embedding_type", "absolute")
    if positions != "absolute":
        raise PoolingModelError(f"position embeddings of type {positions!r}", architecture)
    if raw.get("is_decoder") or raw.get("add_cross_attention"):
        raise PoolingModelError("an encoder that is made a decoder", architecture)
    activation = raw.get("hidden_act", "gelu")
    if activation not in _ACTIVATIONS:
        raise PoolingModelError(f"activation {activation!r}", architecture)
    hidden_size, num_heads = _size(raw, "hidden_size"), _size(raw, "num_attention_heads")
    if hidden_size % num_heads:
        raise CheckpointError(f"config.json: {hidden_size} is no multiple of {num_heads} heads")
    scores = architecture.endswith(_SCORES_PAIRS)
    if scores and (labels := _num_labels(raw)) != 1:
        raise PoolingModelError(
            f"a classifier of {labels} labels (a cross-encoder for reranking has one)", architecture
        )
    num_positions = _size(raw, "max_position_embeddings")
    if num_positions <= first_position:
        raise CheckpointError(f"config.json: {num_positions} positions hold no text")
    dtype = raw.get("dtype") or raw.get("torch_dtype")
    return EncoderConfig(
        architecture=architecture,
        prefix=prefix,
        vocab_size=_size(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_size(raw, "intermediate_size"),
        num_layers=_size(raw, "num_hidden_layers"),
        num_heads=num_heads,
        norm_eps=positive_number(raw, "layer_norm_eps", 1e-12),
        activation=_ACTIVATIONS[activation],
        num_positions=num_positions,
        first_position=first_position,
        num_token_types=_size(raw, "type_vocab_size"),
        dtype=dtype if isinstance(dtype, str) else None,
        score_head=score_head if scores else None,
    )


def _num_labels(raw: Mapping[str, Any]) -> int:
    labels = raw.get("id2label")
    return len(labels) if isinstance(labels, Mapping) else int(raw.get("num_labels") or 2)


def _size(raw: Mapping[str, Any], key: str) -> int:
    value = positive_number({key: raw.get(key, 0)}, key, 0)
    if value != int(value):
        raise CheckpointError(f"config.json: `{key}` must be a positive integer, found {value!r}")
    return int(value)
