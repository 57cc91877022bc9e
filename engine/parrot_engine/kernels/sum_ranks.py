"""Sums over the ranks of a model, with the residual and the norm that follow, in one kernel.

What o and down yield on a rank is a share of a sum. Each rank writes its share of a token's row
into the memory of all others and waits until theirs have come into its own: one way over the link,
where reading from others takes two and a meeting of the ranks before and after. A place that
nothing has come to holds `EMPTY`, so that an element says itself whether it has arrived.

Rows are exchanged by turns through three *boxes*. A call fills one and empties the one before:
nobody writes there before the call after next, for which all ranks must have ended this one. Which
turn it is each row counts for itself, in the device's memory: a CUDA graph repeats the arguments.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Boxes of a row.
BOXES = 3
#: Elements of a row that one warp takes: 16 bytes a thread, of two bytes each.
_WARP_ELEMENTS = 256


class Exchange(NamedTuple):
    """The memory through which one rank exchanges rows with the others."""

    rank: int
    #: int64 `[ranks]`: the address of every rank's boxes.
    addresses: Tensor
    #: int32 `[max_rows]`: exchanges of each row so far; zeros at first.
    turns: Tensor

    @property
    def max_rows(self) -> int:
        return len(self.turns)


def empty_boxes(ranks: int, max_rows: int, size: int, dtype: torch.dtype) -> tuple[int, int]:
    """Elements that a rank's boxes hold, and the integer as wide as `dtype` that fills them.

    It is the bits of -0, which nobody sends. Rows are `size` elements long.
    """
    return BOXES * ranks * max_rows * size, -(1 << (8 * dtype.itemsize - 1))


@triton.jit
def sum_ranks(
    share,
    hidden,
    weight,
    addresses,
    turns,
    summed,
    out,
    eps,
    max_rows,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BOXES: tl.constexpr,
):
    """One program a row: hidden + the sum of all ranks' shares, to `summed`; its norm to `out`."""
    BITS: tl.constexpr = tl.int16 if share.dtype.element_ty.primitive_bitwidth == 16 else tl.int32
    EMPTY: tl.constexpr = -(2 ** (share.dtype.element_ty.primitive_bitwidth - 1))
    row = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < SIZE
    places = row.to(tl.int64) * SIZE + lanes
    turn = tl.load(turns + row)
    own = tl.load(share + places, mask=inside, other=0.0)
    bits = own.to(BITS, bitcast=True)
    bits = tl.where(bits == EMPTY, 0, bits)
    box = (turn % BOXES).to(tl.int64) * RANKS * max_rows * SIZE
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            theirs = tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(BITS)), 16)
            tl.store(theirs + box + RANK * max_rows * SIZE + places, bits, mask=inside)
    total = tl.load(hidden + places, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.load(weight + lanes, mask=inside, other=0.0).to(tl.float32)
    ours = tl.multiple_of(tl.load(addresses + RANK).to(tl.pointer_type(BITS)), 16)
    before = ((turn + BOXES - 1) % BOXES).to(tl.int64) * RANKS * max_rows * SIZE
    nothing = tl.full([BLOCK], EMPTY, BITS)
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            tl.store(ours + before + rank * max_rows * SIZE + places, nothing, mask=inside)
    # In the order of ranks, so that all get the same bits.
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            total += bits.to(share.dtype.element_ty, bitcast=True).to(tl.float32)
        else:
            source = ours + box + rank * max_rows * SIZE + places
            came = tl.load(source, mask=inside, other=0, volatile=True)
            while tl.max((came == EMPTY).to(tl.int32), 0) != 0:
                came = tl.load(source, mask=inside, other=0, volatile=True)
            total += came.to(share.dtype.element_ty, bitcast=True).to(tl.float32)
    # All of the program's threads have read it.
    tl.debug_barrier()
    tl.store(turns + row, turn + 1)
    rounded = total.to(summed.dtype.element_ty)
    tl.store(summed + places, rounded, mask=inside)
    if HAS_NORM:
        # The residual stream is what later layers see: normalise that, not the unrounded sum.
        values = rounded.to(tl.float32)
        factor = tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
        tl.store(out + places, (values * factor * scale).to(out.dtype.element_ty), mask=inside)


def sum_ranks_onto(
    share: Tensor, hidden: Tensor, exchange: Exchange, norm: tuple[Tensor, float] | None = None
) -> tuple[Tensor, Tensor]:
    """(RMSNorm of the sum, the sum) of `hidden` and every rank's `share`, `[rows, size]` each.

    Without a `norm`, (weight, eps), the sum twice. All ranks call this with as many rows, in the
    same order; there may be as many as `exchange` has room for.
    """
    assert share.is_contiguous()
    assert hidden.is_contiguous()
    rows, size = share.shape
    assert rows <= exchange.max_rows
    summed = torch.empty_like(hidden)
    out = summed if norm is None else torch.empty_like(hidden)
    weight, eps = norm or (hidden, 0.0)
    block = triton.next_power_of_2(size)
    sum_ranks[(rows,)](
        share,
        hidden,
        weight,
        exchange.addresses,
        exchange.turns,
        summed,
        out,
        eps,
        exchange.max_rows,
        RANK=exchange.rank,
        RANKS=len(exchange.addresses),
        HAS_NORM=norm is not None,
        SIZE=size,
        BLOCK=block,
        BOXES=BOXES,
        num_warps=min(max(block // _WARP_ELEMENTS, 1), 16),
    )
    return out, summed
