"""Kernels over the rows of activations: RMSNorm with or without a residual, and SwiGLU.

Each reads its inputs once and writes its outputs once; arithmetic is float32, rounded at the end.
The launching functions take the arguments of torch's counterparts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_SWIGLU_BLOCK = 1024


@triton.jit
def rms_norm_kernel(
    x,
    delta,
    weight,
    summed,
    out,
    eps,
    HAS_DELTA: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Normalise one row per program. With `HAS_DELTA` the row is x + delta, which goes to `summed`
    too.
    """
    row = tl.program_id(0).to(tl.int64) * SIZE
    lanes = tl.arange(0, BLOCK)
    inside = lanes < SIZE
    values = tl.load(x + row + lanes, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        values += tl.load(delta + row + lanes, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(summed.dtype.element_ty)
        tl.store(summed + row + lanes, rounded, mask=inside)
        # Later layers see the rounded residual stream, so normalise that, not the unrounded sum.
        values = rounded.to(tl.float32)
    factor = tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
    scale = tl.load(weight + lanes, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + lanes, (values * factor * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_kernel(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Compute silu(gate) x up for a (row, `BLOCK` columns) per program; arXiv 2002.05202."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    source = gate_up + row * (2 * SIZE) + columns
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + SIZE, mask=inside, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * SIZE + columns, result.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm of contiguous `x` `[rows, size]`."""
    out = torch.empty_like(x)
    _launch_rms_norm(x, x, weight, out, out, eps, has_delta=False)
    return out


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (RMSNorm of x + delta, x + delta) for contiguous `[rows, size]`."""
    out, summed = torch.empty_like(x), torch.empty_like(x)
    _launch_rms_norm(x, delta, weight, summed, out, eps, has_delta=True)
    return out, summed


def _launch_rms_norm(
    x: Tensor,
    delta: Tensor,
    weight: Tensor,
    summed: Tensor,
    out: Tensor,
    eps: float,
    *,
    has_delta: bool,
) -> None:
    assert x.is_contiguous()
    assert delta.is_contiguous()
    rows, size = x.shape
    block = triton.next_power_of_2(size)
    rms_norm_kernel[(rows,)](
        x,
        delta,
        weight,
        summed,
        out,
        eps,
        HAS_DELTA=has_delta,
        SIZE=size,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
    )


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) x up for contiguous `[rows, 2 x size]`, gate first."""
    assert gate_up.is_contiguous()
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    block = min(_SWIGLU_BLOCK, triton.next_power_of_2(size))
    swiglu_kernel[(rows, triton.cdiv(size, block))](
        gate_up, out, SIZE=size, BLOCK=block, num_warps=4
    )
    return out
