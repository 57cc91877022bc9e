"""Operations whose result for a token does not depend on the other tokens of a step.

A library chooses a product's kernel by the number of rows, and kernels add up columns in different
orders. Here every product has the same number of rows, so cuBLAS always uses the same kernel.
Norms, activations and heads are computed row by row anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parrot_engine.models.ops import Affine, Norm
from parrot_engine.models.triton_ops import TritonOps

#: Rows multiplied at a time; fewer are padded with zeros. On an H200 reading a weight takes about
#: as long as multiplying it with this many rows.
_ROWS = 128


class InvariantOps(TritonOps):
    """Triton's operations, with products of a single size."""

    def _tuning(self, *_: Any, **__: Any) -> None:
        """Leave all products to torch."""

    def linear(self, x: Tensor, linear: Affine) -> Tensor:
        multiply = super().linear
        return _by_rows(x, lambda rows: multiply(rows, linear))

    def _wide(
        self, x: Tensor, linear: Affine, norm: Norm | None = None, out: Tensor | None = None
    ) -> Tensor:
        multiply = super()._wide
        wide = _by_rows(x, lambda rows: multiply(rows, linear, norm))
        return wide if out is None else out.copy_(wide)


def _by_rows(x: Tensor, multiply: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `multiply` (`[rows, in]` to `[rows, out]`) to `_ROWS` rows of `x` at a time."""
    count = len(x)
    if not count:
        return multiply(x)
    filled = x.new_zeros((-(-count // _ROWS) * _ROWS, x.shape[1]))
    filled[:count] = x
    return torch.cat([multiply(rows) for rows in filled.split(_ROWS)])[:count]
