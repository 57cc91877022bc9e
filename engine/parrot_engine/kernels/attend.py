"""Attention of queries over a range of keys, whatever the cache holds: the kernels' common part."""

from __future__ import annotations

import triton
import triton.language as tl

from parrot_engine.kernels.softmax import attend_keys
from parrot_engine.kernels.softmax_fp8 import attend_quantized_keys, product_query


@triton.jit
def attend(
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
    base,
    begin,
    masked_from,
    end,
    head,
    window,
    scale_log2,
    DESCRIPTORS: tl.constexpr,
    QUANTIZED: tl.constexpr,
    PAIRS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Sum `[BLOCK_M, BLOCK_D]`, denominator and largest score of queries `q` and these keys.

    All queries see keys `begin` … `masked_from` - 1, of the others those up to their own position
    (and within the window). With a window `masked_from` must be `begin`. For arguments see
    `softmax.attend_keys`, and `softmax_fp8.attend_quantized_keys` with `QUANTIZED`.
    """
    denominator = tl.zeros([BLOCK_M], tl.float32)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if QUANTIZED:
        q, scale_log2 = product_query(q, scale_log2)
        WIDTH: tl.constexpr = BLOCK_D // 2 if PAIRS else BLOCK_D
        odd_q = q
        if PAIRS:
            q, odd_q = tl.split(tl.reshape(q, [BLOCK_M, WIDTH, 2]))
        total = tl.zeros([BLOCK_M, WIDTH], tl.float32)
        odd_total = total
        for masked in tl.static_range(1 if HAS_WINDOW else 0, 2):
            total, odd_total, denominator, largest = attend_quantized_keys(
                total,
                odd_total,
                denominator,
                largest,
                q,
                odd_q,
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
                base,
                masked_from if masked else begin,
                end if masked else masked_from,
                end,
                head,
                window,
                scale_log2,
                masked == 1,
                DESCRIPTORS,
                PAIRS,
                HAS_WINDOW,
                NUM_KV_HEADS,
                HEAD_DIM,
                BLOCK_D,
                BLOCK_SIZE,
                TILE_ROWS,
                BLOCK_N,
            )
        if PAIRS:
            total = tl.interleave(total, odd_total)
    else:
        total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for masked in tl.static_range(1 if HAS_WINDOW else 0, 2):
            total, denominator, largest = attend_keys(
                total,
                denominator,
                largest,
                q,
                positions,
                key_cache,
                value_cache,
                key_tiles,
                value_tiles,
                block_ids,
                first_block,
                base,
                masked_from if masked else begin,
                end if masked else masked_from,
                end,
                head,
                window,
                scale_log2,
                masked == 1,
                DESCRIPTORS,
                HAS_WINDOW,
                NUM_KV_HEADS,
                HEAD_DIM,
                BLOCK_D,
                BLOCK_SIZE,
                TILE_ROWS,
                BLOCK_N,
            )
    return total, denominator, largest
