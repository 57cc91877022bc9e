"""Online softmax over tiles of a paged KV cache: the loop that all attention kernels share.

Scores are in base 2 throughout: they are multiplied once by scale x log2(e), which must be
positive, and what the loop keeps is `m` (largest score of a row so far), `l` (sum of
2^(score - m)) and the weighted sum of values. Nothing here knows work lists, rows of a batch, or
where results go.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def cache_places(
    block_ids,
    first_block,
    offset,
    length,
    head,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """For `BLOCK_N` keys from `offset` on: their (block, head) tiles and their places in these.

    `first_block` is the index in `block_ids` of the block that holds offset 0. Ids at or behind
    `length` are not read.
    """
    lanes = tl.arange(0, BLOCK_N)
    if BLOCK_SIZE % BLOCK_N == 0:
        # One block holds all of them: a scalar id, and places that follow each other.
        blocks = tl.load(block_ids + first_block + offset // BLOCK_SIZE).to(tl.int64)
        places = offset % BLOCK_SIZE + lanes
    else:
        local = offset + lanes
        blocks = tl.load(
            block_ids + first_block + local // BLOCK_SIZE, mask=local < length, other=0
        ).to(tl.int64)
        places = local % BLOCK_SIZE
    return blocks * NUM_KV_HEADS + head, places


@triton.jit
def attend_keys(
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
    begin,
    end,
    limit,
    head,
    window,
    scale_log2,
    MASKED: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Let the queries `q` `[BLOCK_M, BLOCK_D]` attend to keys `begin` … `end` - 1.

    Positions of keys are absolute; `base` is the one that `first_block` begins with, `begin -
    base` a multiple of `BLOCK_N`. Without `MASKED` every query must see every key, and the range
    must be whole tiles. With it a query sees keys up to its own position (and within the
    window), and keys at or behind `limit` are not even read: their slots may hold anything.

    With `DESCRIPTORS` unmasked tiles come through the copy engine: `key_tiles` and `value_tiles`
    describe the cache as `[rows, HEAD_DIM]` in tiles of `[BLOCK_N, BLOCK_D]`, and a tile must lie
    within one block. Otherwise both are not used.
    """
    lanes = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    for start in range(begin, end, BLOCK_N):
        keys = start + lanes
        if DESCRIPTORS and not MASKED:
            offset = start - base
            block = tl.load(block_ids + first_block + offset // BLOCK_SIZE)
            row = (block * NUM_KV_HEADS + head) * TILE_ROWS + offset % BLOCK_SIZE
            k = key_tiles.load([row, 0])
            v = value_tiles.load([row, 0])
        else:
            tiles, in_tile = cache_places(
                block_ids,
                first_block,
                start - base,
                limit - base,
                head,
                NUM_KV_HEADS,
                BLOCK_SIZE,
                BLOCK_N,
            )
            places = (tiles * TILE_ROWS + in_tile)[:, None] * HEAD_DIM + dims[None, :]
            if MASKED:
                present = (keys < limit)[:, None]
                if BLOCK_D != HEAD_DIM:
                    present = present & (dims < HEAD_DIM)[None, :]
                k = tl.load(key_cache + places, mask=present, other=0)
                v = tl.load(value_cache + places, mask=present, other=0)
            elif BLOCK_D != HEAD_DIM:
                present = (dims < HEAD_DIM)[None, :]
                k = tl.load(key_cache + places, mask=present, other=0)
                v = tl.load(value_cache + places, mask=present, other=0)
            else:
                k = tl.load(key_cache + places)
                v = tl.load(value_cache + places)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            seen = keys[None, :] <= positions[:, None]
            if HAS_WINDOW:
                seen = seen & (keys[None, :] > positions[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        raised = tl.maximum(largest, tl.max(scores, 1) * scale_log2)
        # A row that sees nothing yet keeps -inf; -inf minus -inf would be NaN.
        anchor = tl.where(raised == float("-inf"), 0.0, raised) if MASKED else raised
        decay = tl.exp2(largest - anchor)
        weights = tl.exp2(scores * scale_log2 - anchor[:, None])
        denominator = denominator * decay + tl.sum(weights, 1)
        total = total * decay[:, None]
        total = tl.dot(weights.to(v.dtype), v, total, input_precision="ieee")
        largest = raised
    return total, denominator, largest
