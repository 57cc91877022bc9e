"""A pre-norm decoder-only transformer, assembled from the shared blocks.

Maps token ids and positions to hidden states, and hidden states to logits; knows nothing of
sequences, blocks or sampling. The names of its parts are those of the checkpoints.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from parrot_engine.attention.interface import AttentionBackend
from parrot_engine.models.blocks import DecoderLayer, LayerInputs, Linear, RMSNorm, TensorSpec
from parrot_engine.models.config import ModelConfig
from parrot_engine.models.ops import Affine, Residual
from parrot_engine.models.rope import Rotary
from parrot_engine.models.sharding import Collective, Shard


class Embedding(nn.Module):
    """Token embedding, one row a token id."""

    def __init__(self, config: ModelConfig, spec: TensorSpec) -> None:
        super().__init__()
        self.weight = spec.empty(config.vocab_size, config.hidden_size)

    def forward(self, token_ids: Tensor) -> Tensor:
        """`[num_tokens]` to `[num_tokens, hidden_size]`."""
        return F.embedding(token_ids, self.weight)


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
        return residual.total()

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """`[rows, vocab_size]` in float32 for hidden states of `forward`; `out` where given."""
        if self.lm_head is None:
            head = Affine(self.model.embed_tokens.weight[self._head_rows])
        else:
            head = self.lm_head.affine
        if self._collective is None:
            return self._ops.logits(hidden, self.model.norm.norm, head, out)
        part = self._ops.logits(hidden, self.model.norm.norm, head)
        return _gather_logits(self._collective, part, self.config.vocab_size, out)


def _gather_logits(
    collective: Collective, part: Tensor, vocab_size: int, out: Tensor | None = None
) -> Tensor:
    """`[rows, vocab_size]` from the parts that the ranks computed, `[rows, share of it]`."""
    share = collective.shard.share(vocab_size)
    if part.shape[1] < share:
        part = F.pad(part, (0, share - part.shape[1]))
    parts = collective.all_gather(part).transpose(0, 1)
    if out is None or share * len(parts[0]) != vocab_size:
        whole = parts.reshape(len(parts), -1)[:, :vocab_size]
        return whole if out is None else out.copy_(whole)
    out.view(parts.shape).copy_(parts)
    return out
