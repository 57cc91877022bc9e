"""Causal attention of many consecutive queries of one sequence over its paged cache.

A tile is some tokens of one row of the batch, all query heads of a KV head packed together; one
program walks the keys that the tile sees (FlashAttention-2, arXiv 2307.08691), those of the step
itself included, which must be in the cache already. Where few tiles have to read many keys, each
reads a part of them, and what it yields is left to `merge_splits`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from parrot_engine.kernels.attend import attend

#: Integers of a tile: see `attention.tiles.Tiles`, whose order this is.
TILE_FIELDS = 8


@triton.jit
def prefill_attention(
    query,
    query_stride,
    key_cache,
    value_cache,
    key_tiles,
    value_tiles,
    key_scales,
    value_scales,
    key_scale_tiles,
    value_scale_tiles,
    tiles,
    num_tiles,
    block_ids,
    out,
    partial,
    lse2,
    window,
    scale_log2,
    DESCRIPTORS: tl.constexpr,
    QUANTIZED: tl.constexpr,
    PAIRS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE_FIELDS: tl.constexpr,
):
    """One program a (tile, KV head); those behind the last tile do nothing."""
    if tl.program_id(0) // NUM_KV_HEADS >= tl.load(num_tiles):
        return
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    tile = tiles + (tl.program_id(0) // NUM_KV_HEADS) * TILE_FIELDS
    head = tl.program_id(0) % NUM_KV_HEADS
    first_block = tl.load(tile)
    begin = tl.load(tile + 1)
    end = tl.load(tile + 2)
    first_token = tl.load(tile + 3)
    num_tokens = tl.load(tile + 4)
    first_position = tl.load(tile + 5)

    member = rows // GROUP
    present = member < num_tokens
    positions = tl.where(present, first_position + member, -1)
    heads = head * GROUP + rows % GROUP
    tokens = (first_token + member).to(tl.int64)
    filled = present[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(
        query + (tokens * query_stride + heads * HEAD_DIM)[:, None] + dims[None, :],
        mask=filled,
        other=0.0,
    )
    masked_from = begin
    if not HAS_WINDOW:
        # Whole tiles of keys that the first of these tokens sees, all of them see.
        seen = (first_position + 1) // BLOCK_N * BLOCK_N
        masked_from = tl.maximum(begin, tl.minimum(seen, end))
    total, denominator, largest = attend(
        q,
        positions,
        key_cache,
        value_cache,
        key_tiles,
        value_tiles,
        key_scales,
        value_scales,
        key_scale_tiles,
        value_scale_tiles,
        block_ids,
        first_block,
        0,
        begin,
        masked_from,
        end,
        head,
        window,
        scale_log2,
        DESCRIPTORS,
        QUANTIZED,
        PAIRS,
        HAS_WINDOW,
        NUM_KV_HEADS,
        HEAD_DIM,
        BLOCK_M,
        BLOCK_D,
        BLOCK_SIZE,
        TILE_ROWS,
        BLOCK_N,
    )
    # Rows beyond the tile's tokens are not stored. One that saw none of a part's keys: output 0 and
    # log-sum-exp -inf, not 0 / 0.
    result = total / tl.where(denominator == 0.0, 1.0, denominator)[:, None]
    first_slot = tl.load(tile + 6)
    if first_slot < 0:
        places = (tokens * (NUM_KV_HEADS * GROUP) + heads) * HEAD_DIM
        tl.store(
            out + places[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=filled
        )
    else:
        slots = (first_slot + member * tl.load(tile + 7)).to(tl.int64)
        entries = slots * (NUM_KV_HEADS * GROUP) + heads
        tl.store(partial + entries[:, None] * HEAD_DIM + dims[None, :], result, mask=filled)
        tl.store(lse2 + entries, largest + tl.log2(denominator), mask=present)
