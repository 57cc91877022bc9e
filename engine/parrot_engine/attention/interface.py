"""The interface between models and attention back ends.

A step has two halves. `plan`, once on the CPU, turns the rows of a batch into index tensors.
`forward`, once per layer on the device, writes the new keys and values into the paged cache and
attends. The plan is an argument, never a global, and independent of values, so plans can be made
while the previous step still runs.

The KV cache is one tensor `[layers, 2, num_blocks, kv_heads, block_size, head_dim]`, keys at 0 and
values at 1: a (block, head) tile is contiguous. A back end sees one layer at a time. A quantized
cache has rows of scales behind those of a tile's keys (`attention.storage`).

Independent of models, weights and the meaning of tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

from parrot_engine.batch import BatchRow


class AttentionShape(NamedTuple):
    """The sizes that plans and kernels depend on, equal for all layers."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int


class Rotation(NamedTuple):
    """The elements of a head that the rotary embedding rotates together."""

    #: Number of rotated elements, the first ones of a head.
    size: int
    #: True: pairs are neighbours; False: elements `size` / 2 apart.
    interleaved: bool = False


class HeadNorms(NamedTuple):
    """RMSNorm of q and k heads: weights `[head_dim]`, and the epsilon under the root."""

    query: Tensor
    key: Tensor
    eps: float


PlanT = TypeVar("PlanT")


class LayerAttention(ABC, Generic[PlanT]):
    """The attention of one layer."""

    @abstractmethod
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layer_kv: Tensor,
        plan: PlanT,
        *,
        window: int | None,
        scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write K and V of the step's tokens into `layer_kv`, then attend.

        `query` is `[num_tokens, num_heads, head_dim]`, `key` and `value` are `[num_tokens,
        num_kv_heads, head_dim]`, already rotated, of one dtype with `layer_kv` `[2, num_blocks,
        num_kv_heads, block_size, head_dim]` unless that is quantized. `window` must be one that the
        back end was made for. Query heads are grouped: head h reads KV head `h // (num_heads //
        num_kv_heads)`. `sinks` `[num_heads]` are additional scores without values. Returns
        `[num_tokens, num_heads * head_dim]`.
        """


class AttentionBackend(LayerAttention[PlanT]):
    """Causal attention of the rows of a batch over a paged cache.

    Exact at any length: a token sees the keys of its own context at its own and earlier positions
    (the last `window` of them in a windowed layer). It never sees padding, even if unused slots or
    blocks of the cache contain NaN.
    """

    #: Keys that rows did not read themselves because other rows read them, over all plans so far.
    #: Counted in the layers with the most sharing.
    read_once_tokens: int = 0

    @abstractmethod
    def plan(self, rows: Sequence[BatchRow]) -> PlanT:
        """Lay out one step.

        Rows are as in `StepBatch`; `forward` gets their tokens, one row after the other. Blocks
        that a row writes belong to it alone.
        """

    def share_prefixes(self, enabled: bool) -> bool:
        """Choose whether plans read keys shared by rows only once; return false if this back end
        cannot.

        Sharing is on initially. Without it the same kernels read every row's keys separately, for
        measurements.
        """
        del enabled
        return False


class FusedAttention(AttentionBackend[PlanT]):
    """A back end that normalises and rotates heads on their way into the cache."""

    @abstractmethod
    def forward_fused(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        norms: HeadNorms | None,
        layer_kv: Tensor,
        plan: PlanT,
        *,
        rotation: Rotation,
        window: int | None,
        scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Do the work of `forward`, starting from the output of the fused projection.

        `qkv` is `[num_tokens, (num_heads + 2 x num_kv_heads) x head_dim]`: heads of q, k and v in
        this order, neither normalised nor rotated. `cos` and `sin` belong to the tokens' positions:
        contiguous, `head_dim / 2` values per token. They cover the pairs that `rotation` names,
        then cos 1 and sin 0 for the rest of a head.
        """
