"""Causal attention of many consecutive queries of one sequence over its paged cache.

A tile has some tokens of one row of the batch, with all query heads of a KV head packed together.
One program processes the keys visible to the tile (FlashAttention-2, arXiv 2307.08691); those of
the step itself must be in the cache already. If a few tiles read many keys, each program reads a
part of them, and `merge_splits` combines the results.
"""

from __future__ import annotations

import triton
import triton.language as tl

from parrot_engine.kernels.attention.attend import attend, beside_sink

#: Integers per tile, in the order of `attention.tiles.Tiles`.
TILE_FIELDS = tl.constexpr(8)


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
    sinks,
    C: tl.constexpr,
):
    """Run one program per (tile, KV head); those beyond the last tile do nothing."""
    if tl.program_id(0) // C.num_kv_heads >= tl.load(num_tiles):
        return
    cache = (
        (key_cache, value_cache),
        (key_tiles, value_tiles),
        (key_scales, value_scales),
        (key_scale_tiles, value_scale_tiles),
    )
    rows = tl.arange(0, C.block_m)
    dims = tl.arange(0, C.block_d)
    tile = tiles + (tl.program_id(0) // C.num_kv_heads) * TILE_FIELDS
    head = tl.program_id(0) % C.num_kv_heads
    first_block = tl.load(tile)
    begin = tl.load(tile + 1)
    end = tl.load(tile + 2)
    first_token = tl.load(tile + 3)
    num_tokens = tl.load(tile + 4)
    first_position = tl.load(tile + 5)

    member = rows // C.group
    present = member < num_tokens
    positions = tl.where(present, first_position + member, -1)
    heads = head * C.group + rows % C.group
    tokens = (first_token + member).to(tl.int64)
    filled = present[:, None] & (dims < C.head_dim)[None, :]
    q = tl.load(
        query + (tokens * query_stride + heads * C.head_dim)[:, None] + dims[None, :],
        mask=filled,
        other=0.0,
    )
    masked_from = begin
    if not C.has_window:
        # Whole tiles of keys visible to the first of these tokens are visible to all.
        seen = (first_position + 1) // C.block_n * C.block_n
        masked_from = tl.maximum(begin, tl.minimum(seen, end))
    run = (block_ids, first_block, 0)
    # Rows beyond the tile's tokens are computed but not stored.
    result, row_lse2 = attend(
        q, positions, cache, run, begin, masked_from, end, head, window, scale_log2, C
    )
    first_slot = tl.load(tile + 6)
    if first_slot < 0:
        if C.has_sinks:
            result *= beside_sink(tl.load(sinks + heads), row_lse2)[:, None]
        places = (tokens * (C.num_kv_heads * C.group) + heads) * C.head_dim
        tl.store(
            out + places[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=filled
        )
    else:
        slots = (first_slot + member * tl.load(tile + 7)).to(tl.int64)
        entries = slots * (C.num_kv_heads * C.group) + heads
        tl.store(partial + entries[:, None] * C.head_dim + dims[None, :], result, mask=filled)
        tl.store(lse2 + entries, row_lse2, mask=present)
