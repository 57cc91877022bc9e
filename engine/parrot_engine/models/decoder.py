"""A decoder-only transformer.

The flags of `ModelConfig` switch its parts; their names are those of checkpoints. Tokens are flat:
`[num_tokens, ...]`, without batch axis or padding. Nothing here depends on sequences, blocks or
sampling.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from parrot_engine.attention.interface import LayerAttention
from parrot_engine.models.config import ModelConfig
from parrot_engine.models.experts import SparseMLP
from parrot_engine.models.lora import AdapterRows
from parrot_engine.models.ops import PLAIN, Affine, Branch, Norm, Ops, Residual, Rotary
from parrot_engine.models.parts import Embedding, Linear, RMSNorm, TensorSpec
from parrot_engine.models.self_attention import Attention, LayerInputs
from parrot_engine.models.sharding import Collective, Shard


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), gate and up stacked (arXiv 2002.05202)."""

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
        self._activation = config.activation

    def forward(
        self,
        residual: Residual,
        norm: Norm | None,
        branch: Branch,
        ops: Ops,
        adapters: AdapterRows | None = None,
    ) -> Residual:
        """Return the residual stream after the MLP, which reads its norm."""
        activated, hidden = ops.norm_gated(
            residual, norm, self.gate_up_proj.adapted(adapters), self._activation
        )
        return ops.linear_onto(hidden, activated, self.down_proj.adapted(adapters), branch)


class DecoderLayer(nn.Module):
    """Attention, then MLP or a mixture of experts, each added to the residual stream.

    Norms come before or after either of them, or both.
    """

    def __init__(self, config: ModelConfig, layer: int, spec: TensorSpec) -> None:
        super().__init__()
        norms = config.norms
        self._before_attention = self._norm(norms.before_attention, config, spec)
        self.self_attn = Attention(config, layer, spec)
        behind_attention = self._norm(norms.behind_attention, config, spec)
        self._before_mlp = self._norm(norms.before_mlp, config, spec)
        self.mlp: GatedMLP | SparseMLP
        if config.experts is not None and layer in config.experts.layers:
            self.mlp = SparseMLP(config.experts, config.hidden_size, spec)
        else:
            self.mlp = GatedMLP(config, spec)
        behind_mlp = self._norm(norms.behind_mlp, config, spec)
        self._attention_branch = _branch(behind_attention, config)
        self._mlp_branch = _branch(behind_mlp, config)
        self._ops = spec.ops()

    def _norm(self, name: str | None, config: ModelConfig, spec: TensorSpec) -> Norm | None:
        """Return the norm of this name, if there is one; its weight stays in place."""
        if name is None:
            return None
        norm = RMSNorm(config.hidden_size, config.norm_eps, spec, config.norm_offset)
        self.add_module(name, norm)
        return norm.norm

    def forward(self, residual: Residual, layer_kv: Tensor, step: LayerInputs) -> Residual:
        """Return the residual stream after this layer."""
        ops, attention, adapters = self._ops, self.self_attn, step.adapters
        qkv, hidden = ops.norm_linear(
            residual, self._before_attention, attention.qkv_proj.adapted(adapters)
        )
        attended = attention(qkv, layer_kv, step)
        residual = ops.linear_onto(
            hidden, attended, attention.o_proj.adapted(adapters), self._attention_branch
        )
        return self.mlp.forward(residual, self._before_mlp, self._mlp_branch, ops, adapters)


def _branch(norm: Norm | None, config: ModelConfig) -> Branch:
    plain = norm is None and config.residual_scale == 1.0
    return PLAIN if plain else Branch(norm, config.residual_scale)


class DecoderBody(nn.Module):
    """Embedding, layers and final norm: `model.*` in a checkpoint."""

    def __init__(self, config: ModelConfig, spec: TensorSpec) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config, spec)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, spec) for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, spec, config.norm_offset)


class Decoder(nn.Module):
    """A causal language model; with tied weights its head is the embedding."""

    def __init__(self, config: ModelConfig, spec: TensorSpec) -> None:
        super().__init__()
        self.config = config
        self.model = DecoderBody(config, spec)
        self._collective = spec.collective
        #: Token ids whose logits this rank computes.
        self._head_rows = (Shard() if spec.collective is None else spec.collective.shard).rows(
            config.vocab_size
        )
        num_rows = self._head_rows.stop - self._head_rows.start
        self.lm_head = (
            None
            if config.tie_embeddings
            else Linear(
                config.hidden_size,
                {"lm_head": num_rows},
                bias=False,
                spec=spec._replace(packed=False),
            )
        )
        self._rotaries = [Rotary(rope, config.head_dim, spec.device) for rope in config.ropes]
        self._dtype = spec.dtype
        self._ops = spec.ops()

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_cache: Tensor,
        attention: LayerAttention[Any],
        plan: Any,
        adapters: AdapterRows | None = None,
    ) -> Tensor:
        """Return hidden states `[num_tokens, hidden_size]` before the final norm.

        `token_ids` and `positions` are `[num_tokens]`, in the rows' order of `plan`; `kv_cache` has
        the form of `attention.interface` and is written to. `adapters` names the tokens with an
        adapter.
        """
        angles = tuple(rotary.angles(positions, self._dtype) for rotary in self._rotaries)
        step = LayerInputs(angles, attention, plan, adapters)
        residual = Residual(self.model.embed_tokens(token_ids))
        for layer, layer_kv in zip(self.model.layers, kv_cache.unbind(0), strict=True):
            residual = layer(residual, layer_kv, step)
        return self._ops.total(residual)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return `[rows, vocab_size]` in float32 for hidden states of `forward`, in `out` if
        given.
        """
        if self.lm_head is None:
            head = Affine(self.model.embed_tokens.weight[self._head_rows])
        else:
            head = self.lm_head.affine
        if self._collective is None:
            logits = self._ops.logits(hidden, self.model.norm.norm, head, out)
        else:
            part = self._ops.logits(hidden, self.model.norm.norm, head)
            logits = gather_logits(self._collective, part, self.config.vocab_size, out)
        if self.config.logits_scale != 1.0:
            logits *= self.config.logits_scale
        if (cap := self.config.logits_softcap) is not None:
            logits.div_(cap).tanh_().mul_(cap)
        return logits


def gather_logits(
    collective: Collective, part: Tensor, vocab_size: int, out: Tensor | None = None
) -> Tensor:
    """Gather `[rows, vocab_size]` from the ranks' parts, `[rows, share of it]`."""
    share = collective.shard.share(vocab_size)
    if part.shape[1] < share:
        part = F.pad(part, (0, share - part.shape[1]))
    parts = collective.all_gather(part).transpose(0, 1)
    if out is None or share * len(parts[0]) != vocab_size:
        whole = parts.reshape(len(parts), -1)[:, :vocab_size]
        return whole.contiguous() if out is None else out.copy_(whole)
    out.view(parts.shape).copy_(parts)
    return out
