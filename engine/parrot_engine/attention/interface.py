"""The interface between models and attention back ends.

A step has two halves: `plan`, once, on the CPU, turns the rows of a batch into index tensors;
`forward`, once a layer, on the device, writes the new keys and values into the paged cache and
attends. The plan is an argument, never a global, and holds nothing about values, so that plans
can be made while the previous step still runs.

The KV cache is one tensor `[layers, 2, num_blocks, kv_heads, block_size, head_dim]`, keys at 0
and values at 1: a (block, head) tile is contiguous. A back end sees one layer of it at a time. A
quantized cache has rows of scales behind those of a tile's keys (`attention.storage`).

Does not know models, weights or tokens' meaning.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

from parrot_engine.batch import BatchRow


class AttentionShape(NamedTuple):
    """The sizes that plans and kernels depend on; the same for all layers."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int


class Rotation(NamedTuple):
    """The elements of a head that the rotary embedding rotates together."""

    #: So many, the first ones of a head.
    size: int
    #: Neighbours; else elements that are `size` / 2 apart.
    interleaved: bool = False


class HeadNorms(NamedTuple):
    """RMSNorm of q and k heads: weights `[head_dim]`, and what keeps the root from zero."""

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

        `query` is `[num_tokens, num_heads, head_dim]`, `key` and `value` are
        `[num_tokens, num_kv_heads, head_dim]`, already rotated, of one dtype with `layer_kv`
        `[2, num_blocks, num_kv_heads, block_size, head_dim]` unless that is quantized. `window`
        must be one of those that the back end was made for. Query heads are grouped: head h reads
        KV head `h // (num_heads // num_kv_heads)`. `sinks` `[num_heads]` are scores that stand
        beside those of the keys and have no value. Returns `[num_tokens, num_heads * head_dim]`.
        """


class AttentionBackend(LayerAttention[PlanT]):
    """Causal attention of the rows of a batch over a paged cache.

    Exact at any length: a token sees the keys of its own context at its own and earlier
    positions (the last `window` of them in a windowed layer), never padding, whatever stands in
    unused slots or blocks of the cache, NaN included.
    """

    #: Keys that rows of all plans so far did not read for themselves, as they share them with rows
    #: that did: in one layer, the one in which they share most.
    read_once_tokens: int = 0

    @abstractmethod
    def plan(self, rows: Sequence[BatchRow]) -> PlanT:
        """Lay out one step.

        Rows are as in `StepBatch`; the tokens that `forward` gets are theirs, one row after the
        other. Blocks that a row writes belong to it alone.
        """

    def share_prefixes(self, enabled: bool) -> bool:
        """Return True if plans made from now on have rows read the keys they share only once.

        They do from the beginning; otherwise the same kernels read every row's keys for itself,
        which is for measuring. Returns whether this back end has that choice.
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
        """Do as `forward` does, from the output of the fused projection.

        `qkv` is `[num_tokens, (num_heads + 2 x num_kv_heads) x head_dim]`, heads of q, k and v in
        this order, neither normalised nor rotated. `cos` and `sin` are those of the tokens'
        positions, `head_dim / 2` values a token, contiguous: those of the pairs that `rotation`
        names, then cos 1 and sin 0 for the rest of a head.
        """
