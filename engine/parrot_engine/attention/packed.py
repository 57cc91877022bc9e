"""Attention of concatenated whole sequences, without padding and without KV.

Serves results that a model computes once: vectors and scores of texts. On a GPU one torch kernel
reads all sequences of a step (`torch.nn.attention.varlen`). Elsewhere, and in float32, each run of
sequences of equal length is one call of `scaled_dot_product_attention`, so batches sorted by length
need few calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from parrot_engine.attention.interface import LayerAttention

#: Largest head size of torch's kernel.
_MAX_HEAD_DIM = 256


class Run(NamedTuple):
    """Consecutive sequences of one length."""

    #: Index of their first token in the step.
    begin: int
    num_sequences: int
    length: int


class PackedPlan(NamedTuple):
    """Positions of a step's sequences."""

    runs: list[Run]
    #: int32 `[num_sequences + 1]`, on the device: start of each sequence, and the end of the last.
    starts: Tensor
    longest: int


class PackedAttention(LayerAttention[PackedPlan]):
    """Each token sees its own sequence: all tokens, or itself and earlier ones.

    A layer's window counts the visible tokens to the left, including the token itself. If later
    tokens are visible too, the same number counts to the right.
    """

    def __init__(self, device: torch.device, *, causal: bool) -> None:
        self._device = device
        self._causal = causal
        self._varlen = _varlen_kernel() if device.type == "cuda" else None

    def plan(self, lengths: Sequence[int]) -> PackedPlan:
        """Lay out the sequences of a step, each with at least one token."""
        runs, starts = [], [0]
        for length, group in groupby(lengths):
            count = len(list(group))
            runs.append(Run(starts[-1], count, length))
            begin = starts[-1]
            starts += range(begin + length, begin + length * count + 1, length)
        tensor = torch.tensor(starts, dtype=torch.int32, device=self._device)
        return PackedPlan(runs, tensor, max(lengths))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layer_kv: Tensor,
        plan: PackedPlan,
        *,
        window: int | None,
        scale: float,
        sinks: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Do the work of `LayerAttention.forward`; `layer_kv` is neither read nor written.

        `bias` `[heads, longest, longest]` is added to the scores of each sequence; then there is no
        window, and all tokens see each other.
        """
        del layer_kv
        assert sinks is None, "models with sinks have no vectors here"
        assert bias is None or (window is None and not self._causal)
        if (
            self._varlen is not None
            and len(plan.runs) > 1
            and bias is None
            and query.itemsize == 2
            and query.shape[-1] <= _MAX_HEAD_DIM
        ):
            left = -1 if window is None else window - 1
            out = self._varlen(
                query,
                key,
                value,
                plan.starts,
                plan.starts,
                plan.longest,
                plan.longest,
                scale=scale,
                window_size=(left, 0 if self._causal else left),
            )
            return out.flatten(1)
        parts = [self._attend(query, key, value, run, window, scale, bias) for run in plan.runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        run: Run,
        window: int | None,
        scale: float,
        bias: Tensor | None,
    ) -> Tensor:
        begin, count, length = run
        end = begin + count * length

        def by_sequence(heads: Tensor) -> Tensor:
            return heads[begin:end].unflatten(0, (count, length)).transpose(1, 2)

        mask = None if bias is None else bias[:, :length, :length]
        if window is not None and window < length:
            near = torch.ones(length, length, dtype=torch.bool, device=query.device)
            mask = near.triu(1 - window).tril(0 if self._causal else window - 1)
        out = F.scaled_dot_product_attention(
            by_sequence(query),
            by_sequence(key),
            by_sequence(value),
            attn_mask=mask,
            is_causal=self._causal and mask is None,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out.transpose(1, 2).reshape(end - begin, -1)


def _varlen_kernel() -> Callable[..., Tensor] | None:
    """Return torch's kernel, which supports grouped key heads; None in versions without windows."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    if not {"scale", "window_size"} <= known.keys():
        return None
    # Versions without the option support fewer key heads by themselves.
    return partial(varlen_attn, enable_gqa=True) if "enable_gqa" in known else varlen_attn
