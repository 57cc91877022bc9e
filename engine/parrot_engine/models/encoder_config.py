"""The configuration of an encoder, normalised and typed; unknown features are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from parrot_engine.exceptions import CheckpointError, PoolingModelError
from parrot_engine.models.config import RopeConfig, architecture_of, positive_number

EncoderActivation: TypeAlias = Literal["gelu", "gelu_tanh", "relu", "silu"]

_ACTIVATIONS: dict[str, EncoderActivation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
}

_SCORES_PAIRS = "ForSequenceClassification"


class ScoreHead(NamedTuple):
    """Names of the two products that compute a pair's score from its first token."""

    dense: str
    out: str


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """The shape of one encoder."""

    architecture: str
    #: Prefix of its tensors' names in checkpoints with a head.
    prefix: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    norm_eps: float
    activation: EncoderActivation
    #: Rows of the position table, if there is one, and the row of a text's first token.
    num_positions: int
    first_position: int
    #: 0: there are no token types.
    num_token_types: int
    #: The checkpoint's dtype as named in `config.json`.
    dtype: str | None
    #: Head of cross-encoders.
    score_head: ScoreHead | None = None
    #: Parts of the checkpoint's names, and BERT's names for them.
    names: tuple[tuple[str, str], ...] = ()
    #: Buckets of attention biases by distance; 0: there are no biases.
    num_buckets: int = 0
    #: Rotary embedding of heads; None: positions have a table.
    rope: RopeConfig | None = None
    #: True: the MLP is down(act(gate(x)) * up(x)), and query, key and value are one tensor.
    gated: bool = False
    #: True: products in layers have biases.
    bias: bool = True

    @property
    def max_tokens(self) -> int:
        """Return the length of the longest text."""
        return self.num_positions - self.first_position


def read_encoder(
    raw: Mapping[str, Any], *, prefix: str, first_position: int, score_head: ScoreHead
) -> EncoderConfig:
    """Read a family's configuration from the common keys and its own.

    Raises:
        CheckpointError: values are missing or impossible.
        PoolingModelError: an option changes the computation in an unknown way.
    """
    architecture = architecture_of(raw)
    positions = raw.get("position_embedding_type", "absolute")
    if positions != "absolute":
        raise PoolingModelError(f"position embeddings of type {positions!r}", architecture)
    if raw.get("is_decoder") or raw.get("add_cross_attention"):
        raise PoolingModelError("an encoder that is made a decoder", architecture)
    hidden_size, num_heads = size_of(raw, "hidden_size"), size_of(raw, "num_attention_heads")
    if hidden_size % num_heads:
        raise CheckpointError(f"config.json: {hidden_size} is no multiple of {num_heads} heads")
    num_positions = size_of(raw, "max_position_embeddings")
    if num_positions <= first_position:
        raise CheckpointError(f"config.json: {num_positions} positions hold no text")
    dtype = raw.get("dtype") or raw.get("torch_dtype")
    return EncoderConfig(
        architecture=architecture,
        prefix=prefix,
        vocab_size=size_of(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=size_of(raw, "intermediate_size"),
        num_layers=size_of(raw, "num_hidden_layers"),
        num_heads=num_heads,
        norm_eps=positive_number(raw, "layer_norm_eps", 1e-12),
        activation=read_activation(raw, "hidden_act"),
        num_positions=num_positions,
        first_position=first_position,
        num_token_types=size_of(raw, "type_vocab_size"),
        dtype=dtype if isinstance(dtype, str) else None,
        score_head=score_head if check_one_label(raw) else None,
    )


def check_one_label(raw: Mapping[str, Any]) -> bool:
    """Return true if a model scores pairs, that is, classifies with one label.

    Raises:
        PoolingModelError: it has several labels.
    """
    architecture = architecture_of(raw)
    if not architecture.endswith(_SCORES_PAIRS):
        return False
    given = raw.get("id2label")
    labels = len(given) if isinstance(given, Mapping) else int(raw.get("num_labels") or 2)
    if labels != 1:
        raise PoolingModelError(
            f"a classifier of {labels} labels (a cross-encoder for reranking has one)", architecture
        )
    return True


def read_activation(raw: Mapping[str, Any], key: str) -> EncoderActivation:
    """Read an activation; GELU by default.

    Raises:
        PoolingModelError: the activation is unknown.
    """
    activation = raw.get(key, "gelu")
    if activation not in _ACTIVATIONS:
        raise PoolingModelError(f"activation {activation!r}", architecture_of(raw))
    return _ACTIVATIONS[activation]


def size_of(raw: Mapping[str, Any], key: str) -> int:
    """Read a positive integer; raises `CheckpointError` for anything else."""
    value = positive_number({key: raw.get(key, 0)}, key, 0)
    if value != int(value):
        raise CheckpointError(f"config.json: `{key}` must be a positive integer, found {value!r}")
    return int(value)
