"""A quantised weight as numbers: codes, scales, zero points; independent of its storage in
files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class QuantizedWeight(NamedTuple):
    """A matrix (codes - zeros) x scales, `[out, in]`; each scale covers a block of it.

    A slice, or a stack of several, may need smaller blocks than its sources.
    """

    #: `[out, in]`: float8_e4m3fn, or int8 within the range of `bits`.
    codes: Tensor
    #: `[blocks of rows, blocks of columns]`, as stored.
    scales: Tensor
    #: Rows and columns per block; the last of each may be smaller.
    block: tuple[int, int]
    #: int16, in the shape of `scales`; None: all are 0.
    zeros: Tensor | None = None
    #: int64 `[in]`: the block of each column, if they are not in order.
    groups: Tensor | None = None
    bits: int = 8

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def dense(self) -> Tensor:
        """Return the matrix in float32."""
        weight = self.codes.float()
        if self.zeros is not None:
            weight -= self._spread(self.zeros)
        return weight.mul_(self._spread(self.scales))

    def _spread(self, values: Tensor) -> Tensor:
        """Expand one value per block to one per element, float32."""
        rows, columns = self.shape
        values = _by_row(values.float(), self.block[0], rows)
        if self.groups is not None:
            return values[:, self.groups]
        return values.repeat_interleave(min(self.block[1], columns), dim=1)[:, :columns]

    def part(self, rows: slice, columns: slice) -> QuantizedWeight:
        """Return the submatrix `[rows, columns]`; both slices have a start and a stop."""
        weight = self._rows(rows)
        if (columns.start, columns.stop) == (0, self.shape[1]):
            return weight
        width = self.block[1]
        codes = weight.codes[:, columns]
        if self.groups is not None:
            return weight._replace(codes=codes, groups=self.groups[columns])
        if columns.start % width == 0 and (
            columns.stop % width == 0 or columns.stop == self.shape[1]
        ):
            blocks = slice(columns.start // width, -(-columns.stop // width))
            zeros = None if weight.zeros is None else weight.zeros[:, blocks]
            return weight._replace(codes=codes, scales=weight.scales[:, blocks], zeros=zeros)
        if width >= self.shape[1]:
            return weight._replace(codes=codes, block=(weight.block[0], codes.shape[1]))
        groups = torch.arange(columns.start, columns.stop, device=codes.device) // width
        return weight._replace(codes=codes, groups=groups)

    def _rows(self, rows: slice) -> QuantizedWeight:
        height = self.block[0]
        if (rows.start, rows.stop) == (0, self.shape[0]):
            return self
        if rows.start % height or (rows.stop % height and rows.stop != self.shape[0]):
            return self.by_row()._rows(rows)
        blocks = slice(rows.start // height, -(-rows.stop // height))
        zeros = None if self.zeros is None else self.zeros[blocks]
        return self._replace(codes=self.codes[rows], scales=self.scales[blocks], zeros=zeros)

    def by_row(self) -> QuantizedWeight:
        """Return the weight with separate scales for every row."""
        height, rows = self.block[0], self.shape[0]
        if height == 1:
            return self
        zeros = None if self.zeros is None else _by_row(self.zeros, height, rows)
        scales = _by_row(self.scales, height, rows)
        return self._replace(scales=scales, zeros=zeros, block=(1, self.block[1]))


def _by_row(values: Tensor, height: int, rows: int) -> Tensor:
    if height == 1:
        return values
    return values.repeat_interleave(min(height, rows), dim=0)[:rows]


def stack(weights: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """Stack matrices; None if their columns are quantised differently."""
    first = weights[0]
    if len(weights) == 1:
        return first
    for weight in weights[1:]:
        if (
            weight.codes.dtype != first.codes.dtype
            or weight.bits != first.bits
            or weight.block[1] != first.block[1]
            or weight.scales.dtype != first.scales.dtype
            or not _same(weight.groups, first.groups)
        ):
            return None
    height = first.block[0]
    if any(weight.block[0] != height or weight.shape[0] % height for weight in weights):
        weights = [weight.by_row() for weight in weights]
    elif height > 1 and first.scales.shape[0] == 1:
        # A single scale covers a whole matrix, and the next matrix has another.
        weights = [weight.by_row() for weight in weights]
    zeros = None
    if any(weight.zeros is not None for weight in weights):
        zeros = torch.cat(
            [
                torch.zeros_like(weight.scales, dtype=torch.int16)
                if weight.zeros is None
                else weight.zeros
                for weight in weights
            ]
        )
    return weights[0]._replace(
        codes=torch.cat([weight.codes for weight in weights]),
        scales=torch.cat([weight.scales for weight in weights]),
        zeros=zeros,
    )


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return bool(torch.equal(a, b))
