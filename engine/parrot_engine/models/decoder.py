"""A pre-norm decoder-only transformer, and the parts that its families share.

The parts are switched by the flags of `ModelConfig`; their names are those of the checkpoints.
Modules hold weights and list which tensors of a checkpoint each weight is made of (`WeightPart`).
They are created empty, on the device and in the dtype of a `TensorSpec`, and filled by the loader.
Tokens are flat: `[num_tokens, ...]`, no batch axis, no padding. Nothing here knows sequences,
blocks or sampling.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parrot_engine.attention.interface import AttentionBackend, FusedAttention, HeadNorms
from parrot_engine.kernels.selection import Kernels
from parrot_engine.models.config import ModelConfig
from parrot_engine.models.ops import Affine, Angles, Norm, Ops, Residual, Rotary, rotate
from parrot_engine.models.sharding import Collective, Shard


class LayerInputs(NamedTuple):
    """The part of a step that all layers share."""

    #: Of the rotary embedding, for the positions of the step's tokens.
    angles: Angles
    attention: AttentionBackend[Any]
    #: Made by `attention.plan` for the step's rows.
    plan: Any


class TensorSpec(NamedTuple):
    """Device and dtype of weights, and the kernels and ranks that compute with them."""

    device: torch.device
    dtype: torch.dtype
    kernels: Kernels = "torch"
    #: Of the ranks that hold a model together; None where one holds it all.
    collective: Collective | None = None

    def empty(self, *shape: int) -> nn.Parameter:
        data = torch.empty(*shape, device=self.device, dtype=self.dtype)
        return nn.Parameter(data, requires_grad=False)

    def ops(self) -> Ops:
        """The operations of these kernels; imports triton only where it is used."""
        if self.kernels == "triton":
            from parrot_engine.models.triton_ops import TritonOps

            return TritonOps(collective=self.collective)
        return Ops(self.collective)


class WeightPart(NamedTuple):
    """A tensor of the checkpoint and the part of a weight (along its first axis) it fills."""

    name: str
    target: Tensor


class Linear(nn.Module):
    """x W^T + b over one or several projections of the checkpoint, stacked by output.

    `parts` maps each projection's name to its output size; stacking makes one matrix product of
    q, k and v, and one of gate and up.
    """

    def __init__(
        self, in_size: int, parts: dict[str, int], *, bias: bool, spec: TensorSpec
    ) -> None:
        super().__init__()
        self.parts = parts
        out_size = sum(parts.values())
        self.weight = spec.empty(out_size, in_size)
        self.bias = spec.empty(out_size) if bias else None

    @property
    def affine(self) -> Affine:
        return Affine(self.weight, self.bias)

    def weight_parts(self, prefix: str) -> Iterator[WeightPart]:
        """See `weight_parts` of this module; names replace the last component of `prefix`."""
        parent = prefix.rpartition(".")[0]
        start = 0
        for name, size in self.parts.items():
            path = f"{parent}.{name}" if parent else name
            yield WeightPart(f"{path}.weight", self.weight[start : start + size])
            if self.bias is not None:
                yield WeightPart(f"{path}.bias", self.bias[start : start + size])
            start += size


class Embedding(nn.Module):
    """Token embedding, one row a token id."""

    def __init__(self, config: ModelConfig, spec: TensorSpec) -> None:
        super().__init__()
        self.weight = spec.empty(config.vocab_size, config.hidden_size)

    def forward(self, token_ids: Tensor) -> Tensor:
        """`[num_tokens]` to `[num_tokens, hidden_size]`."""
        return F.embedding(token_ids, self.weight)


class RMSNorm(nn.Module):
    """Root mean square norm with a learned scale (arXiv 1910.07467), over the last axis."""

    def __init__(self, size: int, eps: float, spec: TensorSpec) -> None:
        super().__init__()
        self.weight = spec.empty(size)
        self.eps = eps

    @property
    def norm(self) -> Norm:
        return Norm(self.weight, self.eps)

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as `x`, whose rows may be apart; accumulates in float32."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention between its two products; optional norm of q and k heads."""

    def __init__(self, config: ModelConfig, layer: int, spec: TensorSpec) -> None:
        super().__init__()
        self._num_heads, self._num_kv_heads = config.num_heads, config.num_kv_heads
        self._head_dim = config.head_dim
        self._window = config.windows[layer]
        self._scale = config.head_dim**-0.5
        q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self.qkv_proj = Linear(
            config.hidden_size,
            {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size},
            bias=config.qkv_bias,
            spec=spec,
        )
        self.o_proj = Linear(q_size, {"o_proj": config.hidden_size}, bias=config.o_bias, spec=spec)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps, spec) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps, spec) if config.qk_norm else None

    def forward(self, qkv: Tensor, layer_kv: Tensor, step: LayerInputs) -> Tensor:
        """What the heads attend to, `[num_tokens, heads x head_dim]`, for the output of `qkv_proj`.

        The new K and V go to `layer_kv`.
        """
        if isinstance(step.attention, FusedAttention):
            return self._attend_fused(qkv, layer_kv, step, step.attention)
        return self._attend(qkv, layer_kv, step)

    def _attend_fused(
        self, qkv: Tensor, layer_kv: Tensor, step: LayerInputs, attention: FusedAttention[Any]
    ) -> Tensor:
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        return attention.forward_fused(
            qkv,
            step.angles.cos,
            step.angles.sin,
            norms,
            layer_kv,
            step.plan,
            window=self._window,
            scale=self._scale,
        )

    def _attend(self, qkv: Tensor, layer_kv: Tensor, step: LayerInputs) -> Tensor:
        heads = qkv.view(qkv.shape[0], -1, self._head_dim)
        rotated_heads = self._num_heads + self._num_kv_heads
        query_key, value = heads[:, :rotated_heads], heads[:, rotated_heads:]
        if self.q_norm is not None and self.k_norm is not None:
            query = self.q_norm(query_key[:, : self._num_heads])
            key = self.k_norm(query_key[:, self._num_heads :])
            query_key = torch.cat((query, key), dim=1)
        # One rotation for q and k: half the calls.
        query_key = rotate(query_key, step.angles)
        return step.attention.forward(
            query_key[:, : self._num_heads],
            query_key[:, self._num_heads :],
            value,
            layer_kv,
            step.plan,
            window=self._window,
            scale=self._scale,
        )


class GatedMLP(nn.Module):
    """Weights of down(act(gate(x)) * up(x)), gate and up stacked (arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig, spec: TensorSpec) -> None:
        super().__init__()
        size = config.intermediate_size
        self.gate_up_proj = Linear(
            config.hidden_size,
            {"gate_proj": size, "up_proj": size},
            bias=config.mlp_bias,
            spec=spec,
        )
        self.down_proj = Linear(
            size, {"down_proj": config.hidden_size}, bias=config.mlp_bias, spec=spec
        )


class DecoderLayer(nn.Module):
    """Pre-norm residual layer: attention, then MLP."""

    def __init__(self, config: ModelConfig, layer: int, spec: TensorSpec) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps, spec)
        self.self_attn = Attention(config, layer, spec)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps, spec)
        self.mlp = GatedMLP(config, spec)
        self._activation = config.activation
        self._ops = spec.ops()

    def forward(self, residual: Residual, layer_kv: Tensor, step: LayerInputs) -> Residual:
        """The residual stream behind this layer."""
        ops, attention, mlp = self._ops, self.self_attn, self.mlp
        qkv, hidden = ops.norm_linear(
            residual, self.input_layernorm.norm, attention.qkv_proj.affine
        )
        attended = attention(qkv, layer_kv, step)
        residual = ops.linear_onto(hidden, attended, attention.o_proj.affine)
        activated, hidden = ops.norm_gated(
            residual, self.post_attention_layernorm.norm, mlp.gate_up_proj.affine, self._activation
        )
        return ops.linear_onto(hidden, activated, mlp.down_proj.affine)


class DecoderBody(nn.Module):
    """Embedding, layers and final norm: `model.*` in a checkpoint."""

    def __init__(self, config: ModelConfig, spec: TensorSpec) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config, spec)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, spec) for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, spec)


class Decoder(nn.Module):
    """A causal language model; its head is the embedding where the two are tied."""

    def __init__(self, config: ModelConfig, spec: TensorSpec) -> None:
        super().__init__()
        self.config = config
        self.model = DecoderBody(config, spec)
        self._collective = spec.collective
        #: Token ids whose logits are computed here.
        self._head_rows = (Shard() if spec.collective is None else spec.collective.shard).rows(
            config.vocab_size
        )
        num_rows = self._head_rows.stop - self._head_rows.start
        self.lm_head = (
            None
            if config.tie_embeddings
            else Linear(config.hidden_size, {"lm_head": num_rows}, bias=False, spec=spec)
        )
        self._rotary = Rotary(config.rope, config.head_dim, spec.device)
        self._dtype = spec.dtype
        self._ops = spec.ops()

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_cache: Tensor,
        attention: AttentionBackend[Any],
        plan: Any,
    ) -> Tensor:
        """Hidden states `[num_tokens, hidden_size]` before the final norm.

        `token_ids` and `positions` are `[num_tokens]`, row after row of the batch that `plan`
        was made for; `kv_cache` is as in `attention.interface` and is written to.
        """
        step = LayerInputs(self._rotary.angles(positions, self._dtype), attention, plan)
        residual = Residual(self.model.embed_tokens(token_ids))
        for layer, layer_kv in zip(self.model.layers, kv_cache.unbind(0), strict=True):
            residual = layer(residual, layer_kv, step)
        return self._ops.total(residual)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """`[rows, vocab_size]` in float32 for hidden states of `forward`; `out` where given."""
        if self.lm_head is None:
            head = Affine(self.model.embed_tokens.weight[self._head_rows])
        else:
            head = self.lm_head.affine
        if self._collective is None:
            return self._ops.logits(hidden, self.model.norm.norm, head, out)
        part = self._ops.logits(hidden, self.model.norm.norm, head)
        return gather_logits(self._collective, part, self.config.vocab_size, out)


def gather_logits(
    collective: Collective, part: Tensor, vocab_size: int, out: Tensor | None = None
) -> Tensor:
    """`[rows, vocab_size]` from the parts that the ranks computed, `[rows, share of it]`."""
    share = collective.shard.share(vocab_size)
    if part.shape[1] < share:
        part = F.pad(part, (0, share - part.shape[1]))
    parts = collective.all_gather(part).transpose(0, 1)
    if out is None or share * len(parts[0]) != vocab_size:
        whole = parts.reshape(len(parts), -1)[:, :vocab_size]
        return whole.contiguous() if out is None else out.copy_(whole)
    out.view(parts.shape).copy_(parts)
    return out


def weight_parts(module: nn.Module) -> Iterator[WeightPart]:
    """Every weight of a module tree with the checkpoint's name for it, tied ones once."""
    for path, child in module.named_modules():
        if isinstance(child, Linear):
            yield from child.weight_parts(path)
        else:
            for name, parameter in child.named_parameters(prefix=path, recurse=False):
                yield WeightPart(name, parameter)
