"""An encoder with rotary embeddings, norms before its branches, and windows: ModernBERT.

Tokens are flat, as in `decoder.py`. Names are those of checkpoints (arXiv 2412.13663).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from parrot_engine.attention.interface import LayerAttention
from parrot_engine.models.config import RopeConfig
from parrot_engine.models.encoder import LayerNorm, Table, activate, apply
from parrot_engine.models.encoder_config import EncoderActivation
from parrot_engine.models.ops import Angles, Rotary, rotate
from parrot_engine.models.parts import Linear, TensorSpec

_PREFIX = "model."


@dataclass(frozen=True, slots=True)
class RotaryEncoderConfig:
    """The shape of one such encoder."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    norm_eps: float
    norm_bias: bool
    attention_bias: bool
    mlp_bias: bool
    activation: EncoderActivation
    #: Length of the longest text.
    max_tokens: int
    #: Per layer, the number of tokens visible on one side, the token itself included; None: all.
    windows: tuple[int | None, ...]
    #: Rotary embedding of layers that see everything, and of those with a window.
    full_rope: RopeConfig
    window_rope: RopeConfig
    #: The checkpoint's dtype as named in `config.json`.
    dtype: str | None
    #: True for cross-encoders, whose head is a product, an activation, a norm and a product.
    scores: bool
    head_bias: bool
    head_activation: EncoderActivation


class _Embeddings(nn.Module):
    def __init__(self, config: RotaryEncoderConfig, spec: TensorSpec) -> None:
        super().__init__()
        self.tok_embeddings = Table(config.vocab_size, config.hidden_size, spec)
        self.norm = _norm(config, spec)

    def forward(self, token_ids: Tensor) -> Tensor:
        normed: Tensor = self.norm(self.tok_embeddings(token_ids))
        return normed


class _Attention(nn.Module):
    def __init__(self, config: RotaryEncoderConfig, layer: int, spec: TensorSpec) -> None:
        super().__init__()
        size, bias = config.hidden_size, config.attention_bias
        self._heads = (3, config.num_heads, size // config.num_heads)
        self._window = config.windows[layer]
        self.Wqkv = Linear(size, {"Wqkv": 3 * size}, bias=bias, spec=spec)
        self.Wo = Linear(size, {"Wo": size}, bias=bias, spec=spec)

    def forward(
        self, x: Tensor, angles: Angles, attention: LayerAttention[Any], plan: Any
    ) -> Tensor:
        heads = apply(self.Wqkv, x).unflatten(1, self._heads)
        query, key, value = heads.unbind(1)
        attended = attention.forward(
            rotate(query, angles),
            rotate(key, angles),
            value,
            x,
            plan,
            window=self._window,
            scale=self._heads[2] ** -0.5,
        )
        return apply(self.Wo, attended)


class _GatedMLP(nn.Module):
    def __init__(self, config: RotaryEncoderConfig, spec: TensorSpec) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.Wi = Linear(size, {"Wi": 2 * inner}, bias=config.mlp_bias, spec=spec)
        self.Wo = Linear(inner, {"Wo": size}, bias=config.mlp_bias, spec=spec)
        self._activation = config.activation

    def forward(self, x: Tensor) -> Tensor:
        inner, gate = apply(self.Wi, x).chunk(2, dim=-1)
        return apply(self.Wo, activate(inner, self._activation) * gate)


class _Layer(nn.Module):
    """Attention, then a gated MLP; the first layer reads embeddings that are already normalised."""

    def __init__(self, config: RotaryEncoderConfig, layer: int, spec: TensorSpec) -> None:
        super().__init__()
        self.attn_norm = _norm(config, spec) if layer else None
        self.attn = _Attention(config, layer, spec)
        self.mlp_norm = _norm(config, spec)
        self.mlp = _GatedMLP(config, spec)
        self._has_window = config.windows[layer] is not None

    def forward(
        self,
        hidden: Tensor,
        angles: tuple[Angles, Angles],
        attention: LayerAttention[Any],
        plan: Any,
    ) -> Tensor:
        normed = hidden if self.attn_norm is None else self.attn_norm(hidden)
        hidden = hidden + self.attn(normed, angles[self._has_window], attention, plan)
        out: Tensor = hidden + self.mlp(self.mlp_norm(hidden))
        return out


class _Body(nn.Module):
    """Embeddings and layers; see `EncoderBody`."""

    def __init__(self, config: RotaryEncoderConfig, spec: TensorSpec) -> None:
        super().__init__()
        self.embeddings = _Embeddings(config, spec)
        self.layers = nn.ModuleList(
            _Layer(config, layer, spec) for layer in range(config.num_layers)
        )
        self.final_norm = _norm(config, spec)
        head_dim = config.hidden_size // config.num_heads
        self._full = Rotary(config.full_rope, head_dim, spec.device)
        self._windowed = Rotary(config.window_rope, head_dim, spec.device)
        self._dtype = spec.dtype

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        types: Tensor,
        attention: LayerAttention[Any],
        plan: Any,
    ) -> Tensor:
        del types
        full, windowed = self._full, self._windowed
        angles = full.angles(positions, self._dtype), windowed.angles(positions, self._dtype)
        hidden = self.embeddings(token_ids)
        for layer in self.layers:
            hidden = layer(hidden, angles, attention, plan)
        normed: Tensor = self.final_norm(hidden)
        return normed


class _Head(nn.Module):
    def __init__(self, config: RotaryEncoderConfig, spec: TensorSpec) -> None:
        super().__init__()
        size = config.hidden_size
        self.dense = Linear(size, {"dense": size}, bias=config.head_bias, spec=spec)
        self.norm = _norm(config, spec)
        self._activation = config.head_activation

    def forward(self, pooled: Tensor) -> Tensor:
        normed: Tensor = self.norm(activate(apply(self.dense, pooled), self._activation))
        return normed


class RotaryEncoder(nn.Module):
    """An encoder; a cross-encoder has the head too. See `Encoder`."""

    def __init__(self, config: RotaryEncoderConfig, spec: TensorSpec) -> None:
        super().__init__()
        self.config = config
        self.body = _Body(config, spec)
        if config.scores:
            self.head = _Head(config, spec)
            self.classifier = Linear(config.hidden_size, {"classifier": 1}, bias=True, spec=spec)

    def score(self, pooled: Tensor) -> Tensor:
        """Score pairs; see `Encoder.score`."""
        return apply(self.classifier, self.head(pooled))

    def stored_name(self, name: str) -> str | None:
        """Map a stored name; see `Encoder.stored_name`."""
        name = name.removeprefix(_PREFIX)
        if name.startswith(("embeddings.", "layers.", "final_norm.")):
            return f"body.{name}"
        return name if self.config.scores and name.startswith(("head.", "classifier.")) else None


def _norm(config: RotaryEncoderConfig, spec: TensorSpec) -> LayerNorm:
    return LayerNorm(config.hidden_size, config.norm_eps, spec, bias=config.norm_bias)
