"""Reference of a draw from one row of logits in float64, and rows that are hard to draw from."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

#: By how much of the whole sums may differ from those of the reference.
SLACK = 2e-6


class Wish(NamedTuple):
    """How a row is drawn from."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None


def may_yield(logits: Tensor, wish: Wish, point: float, token: int) -> bool:
    """Tell whether a draw at `point` may yield `token`, but for the rounding of sums.

    Among the tokens that are as likely as the last one kept all are kept.
    """
    distances = logits.max() - logits
    weights = (-distances.double() / wish.temperature).exp()
    order = distances.argsort(stable=True)
    kept = torch.ones(len(logits), dtype=torch.bool)
    if wish.top_k is not None and wish.top_k < len(logits):
        kept &= distances <= distances[order[wish.top_k - 1]]
    choices = [kept]
    if wish.top_p is not None and wish.top_p < 1:
        ranked = torch.where(kept, weights, 0.0)[order]
        before = ranked.cumsum(0) - ranked
        choices = []
        # Where the sum meets the share within rounding either side of it is right.
        for share in (wish.top_p - SLACK, wish.top_p, wish.top_p + SLACK):
            count = max(1, int((before < share * ranked.sum()).sum()))
            choices.append(kept & (distances <= distances[order[count - 1]]))
    if wish.min_p is not None:
        floor = torch.tensor(-math.log(wish.min_p) * wish.temperature).float()
        choices = [kept & (distances <= floor) for kept in choices]
    return any(_holds(torch.where(kept, weights, 0.0), point, token) for kept in choices)


def _holds(weights: Tensor, point: float, token: int) -> bool:
    end = weights.cumsum(0)
    total = float(end[-1])
    begin = float(end[token] - weights[token])
    is_at = begin / total - SLACK <= point <= float(end[token]) / total + SLACK
    return is_at and float(weights[token]) > 0


def hard_rows(vocab_size: int, seed: int) -> Tensor:
    """Float32 `[n, vocab_size]`, each with something to draw: ties, gaps, every scale."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(4, vocab_size, generator=generator)
    middle, last = vocab_size // 2, vocab_size - 1
    one, ends, far = torch.full((3, vocab_size), -math.inf)
    one[middle] = -7.0
    ends[0] = ends[last] = 1.5
    far[:] = -3e38
    far[last] = 3e38
    equal = torch.full((vocab_size,), 0.1)
    sparse = torch.where(normal[1] > 0, normal[1], -math.inf)
    sparse[middle] = 1.0
    # Distances a factor of 1.5 apart, over all of float32's range.
    powers = -(1.5 ** torch.linspace(-200.0, 200.0, vocab_size))
    close = torch.full((vocab_size,), 1.0).nextafter(torch.tensor(2.0))
    close[::3] = 1.0
    ties = torch.randint(-3, 3, (2, vocab_size), generator=generator).float()
    others = torch.stack([one, ends, far, equal, sparse, powers, close])
    return torch.cat([normal * torch.tensor([[0.02], [1.0], [4.0], [30.0]]), others, ties])


def unfit_rows(vocab_size: int) -> Tensor:
    """Float32 `[3, vocab_size]` from which nothing can be drawn."""
    rows = torch.zeros(3, vocab_size)
    rows[0, vocab_size // 2] = math.nan
    rows[1] = -math.inf
    rows[2, -1] = math.inf
    return rows
