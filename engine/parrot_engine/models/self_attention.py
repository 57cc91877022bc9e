"""Self-attention of a decoder layer, between its input and output products."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parrot_engine.attention.interface import FusedAttention, HeadNorms, LayerAttention, Rotation
from parrot_engine.models.config import ModelConfig
from parrot_engine.models.lora import AdapterRows
from parrot_engine.models.ops import Angles, rotate
from parrot_engine.models.parts import Linear, RMSNorm, Stacked, TensorSpec, WeightPart


class LayerInputs(NamedTuple):
    """The inputs of a step that all layers share."""

    #: Angles for the positions of the step's tokens, per rotary embedding of the model.
    angles: tuple[Angles, ...]
    attention: LayerAttention[Any]
    #: Made by `attention.plan` for the step's rows.
    plan: Any
    #: Tokens with adapters; None if there are none.
    adapters: AdapterRows | None = None


class Attention(Stacked):
    """Grouped-query attention between its two products, with optional norms of q and k heads."""

    def __init__(self, config: ModelConfig, layer: int, spec: TensorSpec) -> None:
        super().__init__()
        self._num_heads, self._num_kv_heads = config.num_heads, config.num_kv_heads
        self._head_dim = config.head_dim
        self._window = config.windows[layer]
        self._scale = config.attention_scale or config.head_dim**-0.5
        self._rope = config.rope_of(layer)
        rope = config.ropes[self._rope]
        size = config.head_dim if rope.rotary_dim is None else rope.rotary_dim
        self._rotation = Rotation(size, rope.interleaved)
        q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self.qkv_proj = Linear(
            config.hidden_size,
            {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size},
            bias=config.qkv_bias,
            spec=spec,
        )
        self.o_proj = Linear(q_size, {"o_proj": config.hidden_size}, bias=config.o_bias, spec=spec)
        self.q_norm = self.k_norm = None
        self._norms_projections = config.projection_norm
        if config.qk_norm or config.projection_norm:
            sizes = (q_size, kv_size) if config.projection_norm else (config.head_dim,) * 2
            self.q_norm, self.k_norm = (
                RMSNorm(size, config.norm_eps, spec, config.norm_offset) for size in sizes
            )

        #: Per head, a score without a value beside those of the keys.
        self.sinks = spec.empty(config.num_heads) if config.sinks else None

    def weight_parts(self, prefix: str) -> Iterator[WeightPart]:
        """Yield the sinks, the only weights held by this module itself."""
        if self.sinks is not None:
            yield WeightPart(f"{prefix}.sinks", self.sinks)

    def forward(self, qkv: Tensor, layer_kv: Tensor, step: LayerInputs) -> Tensor:
        """Return the heads' output, `[num_tokens, heads x head_dim]`, from the output of
        `qkv_proj`.

        Writes the new K and V to `layer_kv`.
        """
        if self._norms_projections:
            qkv = self._normalize(qkv)
        if isinstance(step.attention, FusedAttention):
            return self._attend_fused(qkv, layer_kv, step, step.attention)
        return self._attend(qkv, layer_kv, step)

    def _normalize(self, qkv: Tensor) -> Tensor:
        assert self.q_norm is not None
        assert self.k_norm is not None
        sizes = [heads * self._head_dim for heads in (self._num_heads, *(self._num_kv_heads,) * 2)]
        query, key, value = qkv.split(sizes, dim=1)
        return torch.cat((self.q_norm(query), self.k_norm(key), value), dim=1)

    def _head_norms(self) -> tuple[RMSNorm, RMSNorm] | None:
        """Return the norms of single heads, if there are any."""
        if self._norms_projections or self.q_norm is None or self.k_norm is None:
            return None
        return self.q_norm, self.k_norm

    def _attend_fused(
        self, qkv: Tensor, layer_kv: Tensor, step: LayerInputs, attention: FusedAttention[Any]
    ) -> Tensor:
        norms = None
        if (head_norms := self._head_norms()) is not None:
            query, key = head_norms
            norms = HeadNorms(query.weight, key.weight, query.eps)
        cos, sin = step.angles[self._rope]
        return attention.forward_fused(
            qkv,
            cos,
            sin,
            norms,
            layer_kv,
            step.plan,
            rotation=self._rotation,
            window=self._window,
            scale=self._scale,
            sinks=self.sinks,
        )

    def _attend(self, qkv: Tensor, layer_kv: Tensor, step: LayerInputs) -> Tensor:
        heads = qkv.view(qkv.shape[0], -1, self._head_dim)
        rotated_heads = self._num_heads + self._num_kv_heads
        query_key, value = heads[:, :rotated_heads], heads[:, rotated_heads:]
        if (head_norms := self._head_norms()) is not None:
            q_norm, k_norm = head_norms
            query = q_norm(query_key[:, : self._num_heads])
            key = k_norm(query_key[:, self._num_heads :])
            query_key = torch.cat((query, key), dim=1)
        # One rotation for q and k takes half the calls.
        query_key = rotate(query_key, step.angles[self._rope], self._rotation)
        return step.attention.forward(
            query_key[:, : self._num_heads],
            query_key[:, self._num_heads :],
            value,
            layer_kv,
            step.plan,
            window=self._window,
            scale=self._scale,
            sinks=self.sinks,
        )
