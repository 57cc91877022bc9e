"""Attention biases by distance: T5's buckets (arXiv 1910.10683), for both directions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: Larger distances share the last bucket of their direction.
_FAR = 128


def buckets(length: int, num_buckets: int, device: torch.device) -> Tensor:
    """Return the bucket of each pair of positions, `[length, length]`: of queries, then of keys.

    One half of the buckets is for keys after the query, the other for those before. Within each,
    the first half has one bucket per distance, and the ranges of the others grow logarithmically.
    """
    places = torch.arange(length, device=device)
    ahead = places[None, :] - places[:, None]
    half = num_buckets // 2
    exact, distance = half // 2, ahead.abs()
    growth = torch.log(distance.clamp_min(1).float() / exact) / math.log(_FAR / exact)
    far = (exact + (growth * (half - exact)).long()).clamp_max(half - 1)
    return (ahead > 0).long() * half + torch.where(distance < exact, distance, far)


def biases(table: Tensor, length: int) -> Tensor:
    """Return `[heads, length, length]` from a table `[num_buckets, heads]`."""
    return table[buckets(length, len(table), table.device)].permute(2, 0, 1)
