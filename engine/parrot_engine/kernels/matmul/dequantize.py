"""Converts packed weights to numbers in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from parrot_engine.quantization.packed import CHUNK, PackedWeight

_HALF: tl.constexpr = tl.constexpr(CHUNK // 2)


@triton.jit
def columns_of(lanes, BITS: tl.constexpr):
    """Return the columns whose codes are the bytes `lanes`; for 4 bits, those of lower halves.

    The column of the upper half is 16 further.
    """
    columns = lanes
    if BITS == 4:
        columns = lanes // _HALF * (2 * _HALF) + lanes % _HALF
    return columns


@triton.jit
def dequantize_kernel(
    codes,
    scales,
    zeros,
    order,
    out,
    BITS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Dequantise `BLOCK` bytes of a row per program (row, i)."""
    row = tl.program_id(0).to(tl.int64)
    SCALES: tl.constexpr = (OUT + SCALE_ROWS - 1) // SCALE_ROWS
    ROW_BYTES: tl.constexpr = IN * BITS // 8
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < ROW_BYTES
    code = tl.load(codes + row * ROW_BYTES + lanes, mask=inside, other=0.0)
    for half in tl.static_range(8 // BITS):
        columns = columns_of(lanes, BITS) + half * _HALF
        values = (code if BITS == 8 else (code >> (4 * half)) & 15).to(tl.float32)
        values = values if BITS == 8 else values - 8
        place = columns // GROUP * SCALES + row // SCALE_ROWS
        if HAS_ZEROS:
            values -= tl.load(zeros + place, mask=inside, other=0).to(tl.float32)
        values *= tl.load(scales + place, mask=inside, other=0.0).to(tl.float32)
        places = columns
        if HAS_ORDER:
            places = tl.load(order + columns, mask=inside, other=0)
        tl.store(out + row * IN + places, values.to(out.dtype.element_ty), mask=inside)


def dequantize(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Compute `PackedWeight.dense` in one pass."""
    out_size, row_bytes = weight.codes.shape
    out = torch.empty((out_size, weight.in_size), dtype=dtype, device=weight.codes.device)
    block = min(1024, triton.next_power_of_2(row_bytes))
    dequantize_kernel[(out_size, triton.cdiv(row_bytes, block))](
        weight.codes,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        weight.codes if weight.order is None else weight.order,
        out,
        BITS=4 if weight.kind == "int4" else 8,
        HAS_ZEROS=weight.zeros is not None,
        HAS_ORDER=weight.order is not None,
        IN=weight.in_size,
        OUT=out_size,
        GROUP=weight.group,
        SCALE_ROWS=weight.rows,
        BLOCK=block,
        num_warps=4,
    )
    return out
