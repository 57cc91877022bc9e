"""Online softmax over tiles of a cache of float8: the loop of `kernels.softmax` for such a cache.

What differs, and why (counts of instructions and times: docs/engine-log.md, 16):

- Products are in float16, which holds every number of float8_e4m3fn: one instruction converts
  two elements to it. To bfloat16 it takes two more, of the slowest kind.
- Tiles of few rows read the cache as pairs of bytes. Their matrix instructions take from a register
  what lies under each other in memory; 16 bits can be transposed so on the way from shared memory,
  8 cannot. So even and odd elements of heads are multiplied apart.
- A value's scale goes into the exponent of its weight: the power of two in it is added to the
  score. The largest weight of a row *times that* is 1 then, so that float16 has digits for all that
  count, however small the scales; the denominator is divided by it again.

Queries of bfloat16 are divided by a constant; what still exceeds float16 fails its row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from parrot_engine.kernels.softmax import cache_places

#: What queries of bfloat16 are divided by: float16 reaches no further than 65,504.
QUERY_DIVISOR = tl.constexpr(16.0)
#: Whether this is Triton's interpreter, which knows no assembler.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def product_query(q, scale_log2):
    """`q` as the products take it, bfloat16 as float16, and what scales those products."""
    if q.dtype == tl.bfloat16:
        scaled = q.to(tl.float32) / QUERY_DIVISOR
        # NOTE: not infinity, which could leave a row that seems to have seen nothing.
        q = tl.where(tl.abs(scaled) < 65504.0, scaled, float("nan")).to(tl.float16)
        scale_log2 *= QUERY_DIVISOR
    return q, scale_log2


@triton.jit
def convert(codes, dtype: tl.constexpr):
    """Numbers of `dtype` from bytes of float8_e4m3fn, the low ones of integers."""
    return codes.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(dtype)


@triton.jit
def convert_pairs(codes, dtype: tl.constexpr):
    """Even and odd numbers from pairs of bytes; `codes` are int16."""
    if INTERPRETED or dtype != tl.float16:
        even, odd = convert(codes, dtype), convert(codes >> 8, dtype)
    else:
        # Two pairs at a time: one permutation, two conversions.
        even, odd = tl.inline_asm_elementwise(
            """{
            .reg .b32 sorted;
            .reg .b16 low, high;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {low, high}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }""",
            "=r,=r,r",
            [codes],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return even, odd


@triton.jit
def split_scale(scale):
    """Powers of two not above scales: their logarithms, their inverses, and what is left."""
    exponent = scale.to(tl.int32, bitcast=True) & 0x7F800000
    inverse = (0x7F000000 - exponent).to(tl.float32, bitcast=True)
    return ((exponent >> 23) - 127).to(tl.float32), inverse, scale * inverse


@triton.jit
def attend_quantized_keys(
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
    begin,
    end,
    limit,
    head,
    window,
    scale_log2,
    MASKED: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    PAIRS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Let queries `q` attend to keys `begin` … `end` - 1; see `softmax.attend_keys`.

    `q` and `scale_log2` are those of `product_query`; `key_scales` and `value_scales` are the cache
    as float32. `total` are the weighted sums of values, `largest` and `denominator` those of the
    scores with the scales of values in them: the log-sum-exp of scores is `largest +
    log2(denominator)` all the same.

    With `PAIRS` the cache is one of int16, pairs of bytes; `q` and `total` are the even elements of
    heads, `odd_q` and `odd_total` the odd ones. Without, these two are not used.
    """
    lanes = tl.arange(0, BLOCK_N)
    # Elements of a row of keys, as they are read.
    WIDTH: tl.constexpr = HEAD_DIM // 2 if PAIRS else HEAD_DIM
    BLOCK_W: tl.constexpr = BLOCK_D // 2 if PAIRS else BLOCK_D
    columns = tl.arange(0, BLOCK_W)
    # Rows of the cache that the scales of a tile of keys fill, if whole ones.
    SCALE_ROWS: tl.constexpr = 4 * BLOCK_N // HEAD_DIM
    for start in range(begin, end, BLOCK_N):
        keys = start + lanes
        if DESCRIPTORS and not MASKED:
            offset = start - base
            block = tl.load(block_ids + first_block + offset // BLOCK_SIZE)
            row = (block * NUM_KV_HEADS + head) * TILE_ROWS + offset % BLOCK_SIZE
            k = key_tiles.load([row, 0])
            v = value_tiles.load([row, 0])
            tiles = (block * NUM_KV_HEADS + head).to(tl.int64)
            in_tile = offset % BLOCK_SIZE + lanes
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
            places = (tiles * TILE_ROWS + in_tile)[:, None] * WIDTH + columns[None, :]
            if MASKED:
                present = (keys < limit)[:, None]
                if BLOCK_W != WIDTH:
                    present = present & (columns < WIDTH)[None, :]
                k = tl.load(key_cache + places, mask=present, other=0)
                v = tl.load(value_cache + places, mask=present, other=0)
            elif BLOCK_W != WIDTH:
                present = (columns < WIDTH)[None, :]
                k = tl.load(key_cache + places, mask=present, other=0)
                v = tl.load(value_cache + places, mask=present, other=0)
            else:
                k = tl.load(key_cache + places)
                v = tl.load(value_cache + places)
        if DESCRIPTORS and not MASKED and SCALE_ROWS * HEAD_DIM == 4 * BLOCK_N:
            row += BLOCK_SIZE - offset % BLOCK_SIZE + offset % BLOCK_SIZE * 4 // HEAD_DIM
            k_scale = tl.reshape(key_scale_tiles.load([row, 0]), [BLOCK_N])
            v_scale = tl.reshape(value_scale_tiles.load([row, 0]), [BLOCK_N])
        else:
            places = tiles * (TILE_ROWS * HEAD_DIM // 4) + (BLOCK_SIZE * HEAD_DIM // 4 + in_tile)
            if MASKED:
                k_scale = tl.load(key_scales + places, mask=keys < limit, other=0.0)
                v_scale = tl.load(value_scales + places, mask=keys < limit, other=0.0)
            else:
                k_scale = tl.load(key_scales + places)
                v_scale = tl.load(value_scales + places)
        if PAIRS:
            k, k_odd = convert_pairs(k, q.dtype)
            v, v_odd = convert_pairs(v, q.dtype)
        else:
            k, v = convert(k, q.dtype), convert(v, q.dtype)
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
        if PAIRS:
            products = tl.dot(odd_q, tl.trans(k_odd), products, input_precision="ieee")
        v_log2, v_inverse, v_rest = split_scale(v_scale)
        scores = products * (k_scale * scale_log2)[None, :] + v_log2[None, :]
        if MASKED:
            seen = keys[None, :] <= positions[:, None]
            if HAS_WINDOW:
                seen = seen & (keys[None, :] > positions[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        raised = tl.maximum(largest, tl.max(scores, 1))
        # A row that sees nothing yet keeps -inf; -inf minus -inf would be NaN.
        anchor = tl.where(raised == float("-inf"), 0.0, raised) if MASKED else raised
        decay = tl.exp2(largest - anchor)
        weights = tl.exp2(scores - anchor[:, None])
        denominator = denominator * decay + tl.sum(weights * v_inverse[None, :], 1)
        weights = (weights * v_rest[None, :]).to(q.dtype)
        total = tl.dot(weights, v, total * decay[:, None], input_precision="ieee")
        if PAIRS:
            odd_total *= decay[:, None]
            odd_total = tl.dot(weights, v_odd, odd_total, input_precision="ieee")
        largest = raised
    return total, odd_total, denominator, largest
