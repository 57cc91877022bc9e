"""Low-rank products of several adapters at once: `out += (x A^T) B^T`, with A and B per token.

Two kernels: *shrink* computes x A^T with the columns of x divided among programs, whose sums stay
separate; *expand* adds them in order and multiplies by B. Both use tiles of one adapter's tokens,
which the host lays out (`models.lora.AdapterRows`). No launch depends on their content, so a CUDA
graph can contain it; a program whose tile has no tokens ends at once. Only an adapter's actual
ranks are read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Bytes of a row of x that a program takes at a time, and outputs per program.
_BYTES_IN, _BLOCK_OUT = 256, 64
#: Maximum programs that divide the columns of x.
_MAX_SPLITS = 8
#: Maximum projections in one product: q, k and v.
_MAX_PROJECTIONS = 3


@triton.jit
def shrink_kernel(
    x,
    a,
    used,
    order,
    tiles,
    inner,
    num_tokens,
    IN: tl.constexpr,
    PROJECTIONS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    SPLITS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Run one program per (tile, `BLOCK_RANK` ranks of a projection, part of the columns)."""
    tile = tl.program_id(0)
    blocks: tl.constexpr = (MAX_RANK + BLOCK_RANK - 1) // BLOCK_RANK
    projection = tl.program_id(1) // blocks
    first_rank = tl.program_id(1) % blocks * BLOCK_RANK
    split = tl.program_id(2)
    slot = tl.load(tiles + 3 * tile).to(tl.int64)
    begin = tl.load(tiles + 3 * tile + 1)
    end = tl.load(tiles + 3 * tile + 2)
    if begin < end and first_rank < tl.load(used + slot * PROJECTIONS + projection):
        places = begin + tl.arange(0, TILE)
        inside = places < end
        tokens = tl.load(order + places, mask=inside, other=0).to(tl.int64)
        ranks = first_rank + tl.arange(0, BLOCK_RANK)
        is_rank = ranks < MAX_RANK
        rows = (slot * PROJECTIONS + projection) * MAX_RANK + ranks
        total = tl.zeros((TILE, BLOCK_RANK), dtype=tl.float32)
        for start in range(split * BLOCK_IN, IN, SPLITS * BLOCK_IN):
            columns = start + tl.arange(0, BLOCK_IN)
            is_column = columns < IN
            values = tl.load(
                x + tokens[:, None] * IN + columns[None, :],
                mask=inside[:, None] & is_column[None, :],
                other=0.0,
            )
            weights = tl.load(
                a + rows[:, None] * IN + columns[None, :],
                mask=is_rank[:, None] & is_column[None, :],
                other=0.0,
            )
            if EXACT:
                total += tl.dot(values, tl.trans(weights), input_precision="ieee")
            else:
                total += tl.dot(values, tl.trans(weights))
        width: tl.constexpr = PROJECTIONS * MAX_RANK
        target = (split * num_tokens + places).to(tl.int64) * width + projection * MAX_RANK
        tl.store(
            inner + target[:, None] + ranks[None, :], total, mask=inside[:, None] & is_rank[None, :]
        )


@triton.jit
def expand_kernel(
    inner,
    b,
    used,
    order,
    tiles,
    out,
    num_tokens,
    SIZE_0: tl.constexpr,
    SIZE_1: tl.constexpr,
    SIZE_2: tl.constexpr,
    PROJECTIONS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    SPLITS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Run one program per (tile, `BLOCK_OUT` outputs of a projection), adding to `out`."""
    tile = tl.program_id(0)
    block = tl.program_id(1)
    blocks_0: tl.constexpr = (SIZE_0 + BLOCK_OUT - 1) // BLOCK_OUT
    blocks_1: tl.constexpr = (SIZE_1 + BLOCK_OUT - 1) // BLOCK_OUT
    is_behind = block >= blocks_0
    is_last = block >= blocks_0 + blocks_1
    projection = is_behind.to(tl.int32) + is_last.to(tl.int32)
    block -= tl.where(is_behind, blocks_0, 0) + tl.where(is_last, blocks_1, 0)
    first = tl.where(is_behind, SIZE_0, 0) + tl.where(is_last, SIZE_1, 0)
    size = tl.where(is_last, SIZE_2, tl.where(is_behind, SIZE_1, SIZE_0))
    slot = tl.load(tiles + 3 * tile).to(tl.int64)
    begin = tl.load(tiles + 3 * tile + 1)
    end = tl.load(tiles + 3 * tile + 2)
    rank = tl.load(used + slot * PROJECTIONS + projection)
    if begin < end and rank > 0:
        places = begin + tl.arange(0, TILE)
        inside = places < end
        tokens = tl.load(order + places, mask=inside, other=0).to(tl.int64)
        outputs = block * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        is_output = outputs < size
        all_outputs: tl.constexpr = SIZE_0 + SIZE_1 + SIZE_2
        width: tl.constexpr = PROJECTIONS * MAX_RANK
        total = tl.zeros((TILE, BLOCK_OUT), dtype=tl.float32)
        for start in range(0, rank, BLOCK_RANK):
            ranks = start + tl.arange(0, BLOCK_RANK)
            is_rank = ranks < rank
            values = tl.zeros((TILE, BLOCK_RANK), dtype=tl.float32)
            for split in range(SPLITS):
                source = (split * num_tokens + places).to(tl.int64) * width
                source += projection * MAX_RANK
                values += tl.load(
                    inner + source[:, None] + ranks[None, :],
                    mask=inside[:, None] & is_rank[None, :],
                    other=0.0,
                )
            weights = tl.load(
                b + (slot * all_outputs + first + outputs)[:, None] * MAX_RANK + ranks[None, :],
                mask=is_output[:, None] & is_rank[None, :],
                other=0.0,
            )
            rounded = values.to(b.dtype.element_ty)
            if EXACT:
                total += tl.dot(rounded, tl.trans(weights), input_precision="ieee")
            else:
                total += tl.dot(rounded, tl.trans(weights))
        target = out + tokens[:, None] * all_outputs + first + outputs[None, :]
        mask = inside[:, None] & is_output[None, :]
        before = tl.load(target, mask=mask, other=0.0).to(tl.float32)
        tl.store(target, (before + total).to(out.dtype.element_ty), mask=mask)


class StackedWeights(NamedTuple):
    """A and B of every slot, and their ranks; see `models.lora.LoraSlots`."""

    #: `[slots, projections x max_rank, in]`
    a: Tensor
    #: `[slots, out, max_rank]`
    b: Tensor
    #: int32 `[slots, projections]`
    used: Tensor
    #: Outputs of each projection.
    sizes: tuple[int, ...]


def num_splits(num_blocks: int, num_programs: int, num_cores: int) -> int:
    """Return the parts for blocks of columns, given `num_programs` others that keep cores busy."""
    wanted = max(1, 2 * num_cores // max(1, num_programs))
    return min(_MAX_SPLITS, num_blocks, 1 << (wanted - 1).bit_length())


def add_lora(
    out: Tensor,
    x: Tensor,
    weights: StackedWeights,
    order: Tensor,
    tiles: Tensor,
    tile_size: int,
    *,
    num_cores: int = 1,
) -> None:
    """Add adapters' products of `x` `[num_tokens, in]` to `out` `[num_tokens, out]`.

    Args:
        out, x: contiguous, of the dtype of the weights.
        weights: stacked weights of the slots.
        order: int32: tokens with adapters, by slot.
        tiles: int32 `[n, 3]`: slot, and begin and end in `order`; empty if these are equal.
        tile_size: the largest tile; 16 or more.
        num_cores: cores of the device.
    """
    num_tokens, in_size = x.shape
    a, b, used, sizes = weights
    projections, max_rank = len(sizes), b.shape[2]
    assert projections <= _MAX_PROJECTIONS, sizes
    if not len(tiles):
        return
    block_rank = min(64, max(16, triton.next_power_of_2(max_rank)))
    rank_blocks = projections * triton.cdiv(max_rank, block_rank)
    block_in = _BYTES_IN // x.itemsize
    splits = num_splits(triton.cdiv(in_size, block_in), len(tiles) * rank_blocks, num_cores)
    inner = torch.empty(
        (splits, num_tokens, projections * max_rank), dtype=torch.float32, device=x.device
    )
    constants = {
        "PROJECTIONS": projections,
        "MAX_RANK": max_rank,
        "TILE": tile_size,
        "BLOCK_RANK": block_rank,
        "SPLITS": splits,
        "EXACT": x.dtype is torch.float32,
    }
    shrink_kernel[(len(tiles), rank_blocks, splits)](
        x, a, used, order, tiles, inner, num_tokens,
        IN=in_size, BLOCK_IN=block_in, num_warps=4, **constants,
    )  # fmt: skip
    padded = [*sizes, 0, 0]
    blocks = sum(triton.cdiv(size, _BLOCK_OUT) for size in sizes)
    expand_kernel[(len(tiles), blocks)](
        inner, b, used, order, tiles, out, num_tokens,
        SIZE_0=padded[0], SIZE_1=padded[1], SIZE_2=padded[2], BLOCK_OUT=_BLOCK_OUT, num_warps=4,
        **constants,
    )  # fmt: skip
