"""Sums over a model's ranks, with the following residual and norm, in one kernel.

The outputs of o and down on a rank are a share of a sum. Each rank writes its share of a token's
row into all other ranks' memory and waits until theirs have arrived in its own. That takes one trip
over the link, whereas reading from others takes two, with a barrier before and after. An empty
place holds `EMPTY`, so each element itself shows whether it has arrived.

Rows are exchanged in turns through three *boxes*. A call fills one and empties the previous one:
nobody writes there before the call after next, and by then all ranks must have ended this one. Each
row counts its turns in the device's memory, because a CUDA graph repeats its arguments.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Boxes per row.
BOXES = 3
#: Elements of a row per warp: 16 bytes per thread, two bytes each.
_WARP_ELEMENTS = 256


class Exchange(NamedTuple):
    """The memory through which a rank exchanges rows with the others."""

    rank: int
    #: int64 `[ranks]`: the address of each rank's boxes.
    addresses: Tensor
    #: int32 `[max_rows]`: exchanges of each row so far, initially zero.
    turns: Tensor

    @property
    def max_rows(self) -> int:
        return len(self.turns)


def empty_boxes(ranks: int, max_rows: int, size: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return the number of elements in a rank's boxes, and the integer of `dtype`'s width that
    marks them empty.

    The mark has the bits of -0, which is never sent. Rows are `size` elements long.
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
    """Write hidden + the sum of all ranks' shares to `summed`, and its norm to `out`; one program
    per row.
    """
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
    # Always in the order of ranks, so that all ranks get the same bits.
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            total += bits.to(share.dtype.element_ty, bitcast=True).to(tl.float32)
        else:
            source = ours + box + rank * max_rows * SIZE + places
            came = tl.load(source, mask=inside, other=0, volatile=True)
            while tl.max((came == EMPTY).to(tl.int32), 0) != 0:
                came = tl.load(source, mask=inside, other=0, volatile=True)
            total += came.to(share.dtype.element_ty, bitcast=True).to(tl.float32)
    # All threads of the program have read the turn.
    tl.debug_barrier()
    tl.store(turns + row, turn + 1)
    rounded = total.to(summed.dtype.element_ty)
    tl.store(summed + places, rounded, mask=inside)
    if HAS_NORM:
        # Later layers see the rounded residual stream, so normalise that, not the unrounded sum.
        values = rounded.to(tl.float32)
        factor = tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
        tl.store(out + places, (values * factor * scale).to(out.dtype.element_ty), mask=inside)


def sum_ranks_onto(
    share: Tensor, hidden: Tensor, exchange: Exchange, norm: tuple[Tensor, float] | None = None
) -> tuple[Tensor, Tensor]:
    """Return (RMSNorm of the sum, the sum) of `hidden` and all ranks' `share`, `[rows, size]` each.

    Without a `norm`, (weight, eps), returns the sum twice. All ranks must call this with the same
    number of rows, in the same order; `exchange` limits the number.
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
