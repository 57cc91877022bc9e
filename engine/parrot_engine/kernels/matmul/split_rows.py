"""Converts activations to 8 bits: rows as sums of two numbers, with a scale per row or per
group.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents


@triton.jit
def split_rows_kernel(
    x,
    norm_weight,
    parts,
    scales,
    rows,
    eps,
    HAS_NORM: tl.constexpr,
    LETS_NEXT_START: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Split one row per program into the nearest 8-bit numbers and the remainder."""
    if LETS_NEXT_START:
        gdc_launch_dependents()
    row = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < SIZE
    values = tl.load(x + row * SIZE + lanes, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        values *= tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
        values *= tl.load(norm_weight + lanes, mask=inside, other=0.0).to(tl.float32)
    scale = tl.max(tl.abs(values), 0) / 448.0
    # A value that is not finite must leave nothing finite in its row.
    scale = tl.where(scale == 0.0, 1.0, scale) + tl.sum(values * 0.0, 0)
    tl.store(scales + row, scale)
    values /= scale
    nearest = values.to(parts.dtype.element_ty)
    place = parts + row * SIZE + lanes
    tl.store(place, nearest, mask=inside)
    left = (values - nearest.to(tl.float32)).to(parts.dtype.element_ty)
    tl.store(place + rows * SIZE, left, mask=inside)


class SplitRows(NamedTuple):
    """x as (nearest + remainder) x scales: two 8-bit numbers have the digits of bfloat16."""

    #: `[2, rows, size]` float8_e4m3fn: nearest, remainder.
    parts: Tensor
    #: float32 `[rows]`, or `[groups, rows]`.
    scales: Tensor


def split_rows(
    x: Tensor, norm: tuple[Tensor, float] | None = None, *, lets_next_start: bool = False
) -> SplitRows:
    """Split contiguous `x` `[rows, size]`, normalised first if there is a `norm`.

    A following kernel that waits for this one itself may start at once (compute capability 9.0 and
    later).
    """
    assert x.is_contiguous()
    rows, size = x.shape
    parts = torch.empty((2, rows, size), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    weight, eps = norm or (x, 0.0)
    block = triton.next_power_of_2(size)
    split_rows_kernel[(rows,)](
        x,
        weight,
        parts,
        scales,
        rows,
        eps,
        HAS_NORM=norm is not None,
        LETS_NEXT_START=lets_next_start,
        SIZE=size,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
    )
    return SplitRows(parts, scales)


#: Columns that share a scale.
GROUP = 128


@triton.jit
def split_groups_kernel(
    x,
    parts,
    scales,
    rows,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Round one row per program to the nearest 8-bit numbers and, with `HAS_LEFT`, the
    remainder.
    """
    row = tl.program_id(0)
    groups = tl.arange(0, GROUPS)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = columns < SIZE
    values = tl.load(x + row * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.max(tl.abs(values), 1) / 448.0
    # NOTE: a value that is not finite must leave nothing finite in its group.
    scale = tl.where(scale == 0.0, 1.0, scale) + tl.sum(values * 0.0, 1)
    tl.store(scales + groups * rows + row, scale, mask=groups < SIZE // GROUP)
    values /= scale[:, None]
    nearest = values.to(parts.dtype.element_ty)
    place = parts + row * SIZE + columns
    tl.store(place, nearest, mask=inside)
    if HAS_LEFT:
        left = (values - nearest.to(tl.float32)).to(parts.dtype.element_ty)
        tl.store(place + rows * SIZE, left, mask=inside)


def split_groups(x: Tensor, *, has_left: bool) -> SplitRows:
    """Round contiguous `x` `[rows, size]` to 8 bits with a scale per group of 128 columns.

    cuBLAS takes multiples of four rows: the result is padded to that, with undefined content.

    Returns:
        parts: `[2, rows, size]`, or `[1, rows, size]` without the remainder.
        scales: `[size / 128, rows]`.
    """
    assert x.is_contiguous()
    num_rows, size = x.shape
    assert size % GROUP == 0
    rows = triton.cdiv(num_rows, 4) * 4
    parts = torch.empty(
        (2 if has_left else 1, rows, size), dtype=torch.float8_e4m3fn, device=x.device
    )
    scales = torch.empty((size // GROUP, rows), dtype=torch.float32, device=x.device)
    groups = triton.next_power_of_2(size // GROUP)
    split_groups_kernel[(num_rows,)](
        x,
        parts,
        scales,
        rows,
        SIZE=size,
        GROUPS=groups,
        HAS_LEFT=has_left,
        GROUP=GROUP,
        num_warps=min(max(groups // 4, 1), 16),
    )
    return SplitRows(parts, scales)
