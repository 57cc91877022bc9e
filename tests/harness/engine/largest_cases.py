"""Rows of logits among which a largest one is hard to get right."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_INF, _NAN = math.inf, math.nan


def awkward_logits(vocab_size: int, seed: int) -> Tensor:
    """Float32 `[.., vocab_size]` of at least 200 columns: ties, zeros of either sign, NaN, inf."""
    generator = torch.Generator().manual_seed(seed)
    rows = list(torch.randn(4, vocab_size, generator=generator))
    last = vocab_size - 1

    def row(base: float, **at: float) -> None:
        values = torch.full((vocab_size,), base)
        for place, value in at.items():
            values[last if place == "last" else int(place[1:])] = value
        rows.append(values)

    row(-1.0, c150=3.0, c20=3.0, last=3.0)
    row(-1.0, c7=-0.0, c9=0.0)
    row(-1.0, c7=0.0, c9=-0.0)
    row(-_INF)
    row(-_INF, last=-3e38)
    row(-_INF, c3=_INF, last=_INF)
    row(1.0, last=_NAN)
    row(_INF, c100=_NAN, c120=-_NAN)
    row(-_INF, c11=_NAN)
    row(-2.0)
    row(-3e38, c5=-1e-45, c6=-2e-38)
    row(0.0, c8=1e-45)
    # Few different values: ties everywhere, across parts too.
    rows += list(torch.randint(-3, 3, (4, vocab_size), generator=generator).float())
    return torch.stack(rows)
