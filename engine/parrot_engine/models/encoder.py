"""A transformer encoder: BERT and similar models, which see a whole text at once and generate
nothing.

Tokens are flat, as in `decoder.py`. Names are those of checkpoints; families differ in the first
position and in the head that scores a pair of texts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parrot_engine.attention.packed import PackedAttention, PackedPlan
from parrot_engine.models.encoder_config import EncoderActivation, EncoderConfig
from parrot_engine.models.ops import Angles, Rotary, rotate
from parrot_engine.models.parts import Linear, TensorSpec
from parrot_engine.models.relative_bias import biases


class LayerNorm(nn.Module):
    """Normalises the last axis, with a weight and usually a bias."""

    def __init__(self, size: int, eps: float, spec: TensorSpec, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = spec.empty(size)
        self.bias = spec.empty(size) if bias else None
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self._eps)


class Table(nn.Module):
    """A table with one row per number."""

    def __init__(self, rows: int, size: int, spec: TensorSpec) -> None:
        super().__init__()
        self.weight = spec.empty(rows, size)

    def forward(self, numbers: Tensor) -> Tensor:
        """Return rows `[..., size]`."""
        return F.embedding(numbers, self.weight)


class Embeddings(nn.Module):
    """The normalised sum of the embeddings of tokens, positions and token types."""

    def __init__(self, config: EncoderConfig, spec: TensorSpec) -> None:
        super().__init__()
        self.word_embeddings = Table(config.vocab_size, config.hidden_size, spec)
        self.position_embeddings = None
        if config.rope is None:
            self.position_embeddings = Table(config.num_positions, config.hidden_size, spec)
        self.token_type_embeddings = None
        if config.num_token_types:
            self.token_type_embeddings = Table(config.num_token_types, config.hidden_size, spec)
        self.LayerNorm = LayerNorm(config.hidden_size, config.norm_eps, spec)

    def forward(self, token_ids: Tensor, positions: Tensor, types: Tensor) -> Tensor:
        """Return `[num_tokens, hidden_size]`."""
        summed = self.word_embeddings(token_ids)
        if self.position_embeddings is not None:
            summed = summed + self.position_embeddings(positions)
        if self.token_type_embeddings is not None:
            summed += self.token_type_embeddings(types)
        normed: Tensor = self.LayerNorm(summed)
        return normed


class _Projected(nn.Module):
    """A product, added to its residual input and normalised."""

    def __init__(self, in_size: int, config: EncoderConfig, spec: TensorSpec) -> None:
        super().__init__()
        self.dense = Linear(in_size, {"dense": config.hidden_size}, bias=config.bias, spec=spec)
        self.LayerNorm = LayerNorm(config.hidden_size, config.norm_eps, spec)

    def forward(self, x: Tensor, onto: Tensor) -> Tensor:
        normed: Tensor = self.LayerNorm(apply(self.dense, x) + onto)
        return normed


class Positions(NamedTuple):
    """The positions of tokens in the layers' form."""

    #: Angles of the heads' rotation.
    angles: Angles | None
    #: Attention biases by distance.
    bias: Tensor | None


class EncoderAttention(nn.Module):
    """Self-attention and its output product."""

    def __init__(self, config: EncoderConfig, spec: TensorSpec) -> None:
        super().__init__()
        size = config.hidden_size
        self._heads = (3, config.num_heads, size // config.num_heads)
        parts = {"Wqkv": 3 * size} if config.gated else {"query": size, "key": size, "value": size}
        qkv = Linear(size, parts, bias=config.bias, spec=spec)
        named = nn.Module()
        named.add_module("qkv", qkv)
        self.add_module("self", named)
        #: The product again, under a usable name; the tuple keeps torch from registering it twice.
        self._qkv = (qkv,)
        self.output = _Projected(size, config, spec)

    def forward(
        self, hidden: Tensor, attention: PackedAttention, plan: PackedPlan, where: Positions
    ) -> Tensor:
        """Return `[num_tokens, hidden_size]`, the shape of `hidden`."""
        query, key, value = apply(self._qkv[0], hidden).unflatten(1, self._heads).unbind(1)
        if where.angles is not None:
            query, key = rotate(query, where.angles), rotate(key, where.angles)
        attended = attention.forward(
            query,
            key,
            value,
            hidden,
            plan,
            window=None,
            scale=self._heads[2] ** -0.5,
            bias=where.bias,
        )
        out: Tensor = self.output(attended, hidden)
        return out


class _Inner(nn.Module):
    def __init__(self, config: EncoderConfig, spec: TensorSpec) -> None:
        super().__init__()
        size = config.intermediate_size
        parts = {"gate": size, "up": size} if config.gated else {"dense": size}
        self.dense = Linear(config.hidden_size, parts, bias=config.bias, spec=spec)
        self._gated, self._activation = config.gated, config.activation

    def forward(self, x: Tensor) -> Tensor:
        inner = apply(self.dense, x)
        if not self._gated:
            return activate(inner, self._activation)
        gate, up = inner.chunk(2, dim=-1)
        return activate(gate, self._activation) * up


class EncoderLayer(nn.Module):
    """Attention, then MLP, each added and normalised (arXiv 1810.04805)."""

    def __init__(self, config: EncoderConfig, spec: TensorSpec) -> None:
        super().__init__()
        self.attention = EncoderAttention(config, spec)
        self.intermediate = _Inner(config, spec)
        self.output = _Projected(config.intermediate_size, config, spec)

    def forward(
        self, hidden: Tensor, attention: PackedAttention, plan: PackedPlan, where: Positions
    ) -> Tensor:
        """Return `[num_tokens, hidden_size]`, the shape of `hidden`."""
        hidden = self.attention(hidden, attention, plan, where)
        out: Tensor = self.output(self.intermediate(hidden), hidden)
        return out


class _Layers(nn.Module):
    def __init__(self, config: EncoderConfig, spec: TensorSpec) -> None:
        super().__init__()
        self.layer = nn.ModuleList(EncoderLayer(config, spec) for _ in range(config.num_layers))
        self.relative_attention_bias = None
        if config.num_buckets:
            self.relative_attention_bias = Table(config.num_buckets, config.num_heads, spec)


class EncoderBody(nn.Module):
    """Embeddings and layers."""

    def __init__(self, config: EncoderConfig, spec: TensorSpec) -> None:
        super().__init__()
        self.embeddings = Embeddings(config, spec)
        self.encoder = _Layers(config, spec)
        self._rotary = None
        if config.rope is not None:
            head_dim = config.hidden_size // config.num_heads
            self._rotary = Rotary(config.rope, head_dim, spec.device)
        self._dtype = spec.dtype
        self._first_position = config.first_position
        self._last_type = max(0, config.num_token_types - 1)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        types: Tensor,
        attention: PackedAttention,
        plan: PackedPlan,
    ) -> Tensor:
        """Return hidden states `[num_tokens, hidden_size]`.

        All arguments are `[num_tokens]`, sequences concatenated; `positions` count from 0 in each,
        `types` are 1 in the second text of a pair.
        """
        # A model with one token type does not distinguish the texts of a pair by it.
        types = types.clamp_max(self._last_type)
        hidden = self.embeddings(token_ids, positions + self._first_position, types)
        table, bias = self.encoder.relative_attention_bias, None
        if table is not None:
            bias = biases(table.weight, plan.longest)
        angles = None if self._rotary is None else self._rotary.angles(positions, self._dtype)
        where = Positions(angles, bias)
        for layer in self.encoder.layer:
            hidden = layer(hidden, attention, plan, where)
        return hidden


class Encoder(nn.Module):
    """An encoder; a cross-encoder has the head too."""

    def __init__(self, config: EncoderConfig, spec: TensorSpec) -> None:
        super().__init__()
        self.config = config
        self.body = EncoderBody(config, spec)
        self._head: tuple[Linear, Linear] | None = None
        if config.score_head is not None:
            size = config.hidden_size
            dense = self._add_product(config.score_head.dense, size, spec)
            self._head = dense, self._add_product(config.score_head.out, 1, spec)

    def _add_product(self, name: str, out_size: int, spec: TensorSpec) -> Linear:
        parent, _, last = name.rpartition(".")
        linear = Linear(self.config.hidden_size, {last: out_size}, bias=True, spec=spec)
        owner: nn.Module = self
        if parent:
            owner = self._modules.setdefault(parent, nn.Module()) or self
        owner.add_module(last, linear)
        return linear

    def score(self, pooled: Tensor) -> Tensor:
        """Return one score per pair, `[num_pairs, 1]`, from the hidden states of the first
        tokens.
        """
        assert self._head is not None, "an encoder without a head"
        dense, out = self._head
        return apply(out, torch.tanh(apply(dense, pooled)))

    def stored_name(self, name: str) -> str | None:
        """Return this model's name of a checkpoint's tensor; None for an unused one.

        Old checkpoints call weight and bias of norms gamma and beta.
        """
        name = name.removeprefix(self.config.prefix)
        if name.endswith("position_ids"):
            return None
        for theirs, ours in self.config.names:
            name = name.replace(theirs, ours)
        name = name.replace("LayerNorm.gamma", "LayerNorm.weight")
        name = name.replace("LayerNorm.beta", "LayerNorm.bias")
        if name.startswith(("embeddings.", "encoder.")):
            return f"body.{name}"
        head = self.config.score_head
        return name if head is not None and name.rpartition(".")[0] in head else None


def apply(linear: Linear, x: Tensor) -> Tensor:
    """Compute x W^T + b with unquantised weights."""
    return F.linear(x, linear.weight, linear.bias)


def activate(x: Tensor, activation: EncoderActivation) -> Tensor:
    """Apply an encoder's activation."""
    if activation in ("relu", "silu"):
        return F.relu(x) if activation == "relu" else F.silu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
