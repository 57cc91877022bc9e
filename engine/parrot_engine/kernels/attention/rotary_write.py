"""Writes new keys and values into the paged cache, rotated (and normalised) on the way.

For each token: optional RMSNorm of q and k heads, rotary embedding of both, q to a separate buffer,
k and v to their slots. This takes one pass over the output of the fused projection. `write_kv` is
the plain variant for keys that are already rotated.

With `QUANTIZED` heads are stored in the form of `attention.storage`: bytes of float8_e4m3fn, and a
scale per head and token behind the keys of its tile.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scale_of(largest, zeros):
    """Return the scales for heads with these largest magnitudes; `zeros` is NaN for heads that are
    not finite.
    """
    # NOTE: 448 x 2^-60, see `attention.storage`.
    return tl.div_rn(tl.maximum(largest, 3.885780586188048e-16), 448.0) + zeros


@triton.jit
def e4m3_bits(x):
    """Return the byte of the float8_e4m3fn nearest to x (ties to even); |x| < 464.

    NOTE: written out, because Triton's interpreter loses the carry of a rounding.
    """
    magnitude = tl.abs(x)
    bits = magnitude.to(tl.uint32, bitcast=True)
    # Keep three fraction bits, and change the exponent's bias from 127 to 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    # Below 2^-6 only multiples of 2^-9 exist, which is the last digit left by adding 2^14.
    small = (magnitude + 16384.0).to(tl.uint32, bitcast=True) & 15
    code = tl.where(magnitude < 0.015625, small, normal)
    return (code | tl.where(x < 0, 128, 0).to(tl.uint32)).to(tl.uint8)


@triton.jit
def rotate_and_write(
    qkv,
    qkv_stride,
    cos,
    sin,
    q_weight,
    k_weight,
    eps,
    slots,
    query_out,
    key_cache,
    value_cache,
    key_scales,
    value_scales,
    QK_NORM: tl.constexpr,
    QUANTIZED: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Run one program per (token, `BLOCK_H` heads); a row of `qkv` has heads of q, k and v in this
    order.

    `cos` and `sin` are `[num_tokens, head_dim / 2]`. `ROTATED` pairs of a head are rotated:
    elements that far apart or, if `INTERLEAVED`, neighbours. For the elements behind them cos is 1
    and sin is 0, and any two form a pair. `slots` `[num_tokens]` is block x block_size + offset, or
    -1 to write nothing.
    """
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    lanes = tl.arange(0, BLOCK_HALF)
    if INTERLEAVED:
        first = 2 * lanes
        second = first + 1
    elif ROTATED == HALF:
        first = lanes
        second = HALF + lanes
    else:
        first = tl.where(lanes < ROTATED, lanes, ROTATED + lanes)
        second = tl.where(lanes < ROTATED, ROTATED + lanes, HALF + lanes)
    inside = (heads < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & (lanes < HALF)[None, :]
    source = qkv + token * qkv_stride + (heads * HEAD_DIM)[:, None]
    x1 = tl.load(source + first[None, :], mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(source + second[None, :], mask=inside, other=0.0).to(tl.float32)
    is_query = heads < NUM_HEADS
    is_value = heads >= NUM_HEADS + NUM_KV_HEADS
    y1, y2 = x1, x2
    if QK_NORM:
        squares = tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)
        factor = tl.rsqrt(squares / HEAD_DIM + eps)
        half = lanes < HALF
        qw1 = tl.load(q_weight + first, mask=half, other=0.0).to(tl.float32)
        qw2 = tl.load(q_weight + second, mask=half, other=0.0).to(tl.float32)
        kw1 = tl.load(k_weight + first, mask=half, other=0.0).to(tl.float32)
        kw2 = tl.load(k_weight + second, mask=half, other=0.0).to(tl.float32)
        w1 = tl.where(is_query[:, None], qw1[None, :], kw1[None, :])
        w2 = tl.where(is_query[:, None], qw2[None, :], kw2[None, :])
        y1 = y1 * factor[:, None] * w1
        y2 = y2 * factor[:, None] * w2
    c = tl.load(cos + token * HALF + lanes, mask=lanes < HALF, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + token * HALF + lanes, mask=lanes < HALF, other=0.0).to(tl.float32)[None, :]
    r1 = tl.where(is_value[:, None], x1, y1 * c - y2 * s)
    r2 = tl.where(is_value[:, None], x2, y2 * c + y1 * s)
    dtype = query_out.dtype.element_ty
    r1, r2 = r1.to(dtype), r2.to(dtype)

    target = query_out + ((token * NUM_HEADS + heads) * HEAD_DIM)[:, None]
    tl.store(target + first[None, :], r1, mask=inside & is_query[:, None])
    tl.store(target + second[None, :], r2, mask=inside & is_query[:, None])

    slot = tl.load(slots + token).to(tl.int64)
    inside = inside & (heads < tl.where(slot < 0, 0, NUM_HEADS + 2 * NUM_KV_HEADS))[:, None]
    kv_heads = (heads - NUM_HEADS) % NUM_KV_HEADS
    tile = slot // BLOCK_SIZE * NUM_KV_HEADS + kv_heads
    places = ((tile * TILE_ROWS + slot % BLOCK_SIZE) * HEAD_DIM)[:, None]
    is_key = (heads >= NUM_HEADS) & (heads < NUM_HEADS + NUM_KV_HEADS)
    if QUANTIZED:
        r1, r2 = r1.to(tl.float32), r2.to(tl.float32)
        largest = tl.max(tl.maximum(tl.abs(r1), tl.abs(r2)), 1)
        scale = scale_of(largest, tl.sum(r1 * 0.0 + r2 * 0.0, 1))
        r1, r2 = e4m3_bits(tl.div_rn(r1, scale[:, None])), e4m3_bits(tl.div_rn(r2, scale[:, None]))
        scale_places = tile * (TILE_ROWS * HEAD_DIM // 4) + (
            BLOCK_SIZE * HEAD_DIM // 4 + slot % BLOCK_SIZE
        )
        written = heads < tl.where(slot < 0, 0, NUM_HEADS + 2 * NUM_KV_HEADS)
        tl.store(key_scales + scale_places, scale, mask=written & is_key)
        tl.store(value_scales + scale_places, scale, mask=written & is_value)
    tl.store(key_cache + places + first[None, :], r1, mask=inside & is_key[:, None])
    tl.store(key_cache + places + second[None, :], r2, mask=inside & is_key[:, None])
    tl.store(value_cache + places + first[None, :], r1, mask=inside & is_value[:, None])
    tl.store(value_cache + places + second[None, :], r2, mask=inside & is_value[:, None])


@triton.jit
def write_kv(
    key,
    key_stride,
    value,
    value_stride,
    slots,
    key_cache,
    value_cache,
    key_scales,
    value_scales,
    QUANTIZED: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Write `key` and `value` `[num_tokens, kv_heads, head_dim]` unchanged, one program per token.

    Tokens with slot -1 are not written.
    """
    token = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_D)
    slot = tl.load(slots + token).to(tl.int64)
    present = tl.where(slot < 0, 0, NUM_KV_HEADS)
    inside = (heads < present)[:, None] & (dims < HEAD_DIM)[None, :]
    offsets = (heads * HEAD_DIM)[:, None] + dims[None, :]
    k = tl.load(key + token * key_stride + offsets, mask=inside, other=0.0)
    v = tl.load(value + token * value_stride + offsets, mask=inside, other=0.0)
    tile = slot // BLOCK_SIZE * NUM_KV_HEADS + heads
    places = ((tile * TILE_ROWS + slot % BLOCK_SIZE) * HEAD_DIM)[:, None] + dims[None, :]
    if QUANTIZED:
        k, v = k.to(tl.float32), v.to(tl.float32)
        k_scale = scale_of(tl.max(tl.abs(k), 1), tl.sum(k * 0.0, 1))
        v_scale = scale_of(tl.max(tl.abs(v), 1), tl.sum(v * 0.0, 1))
        k, v = e4m3_bits(tl.div_rn(k, k_scale[:, None])), e4m3_bits(tl.div_rn(v, v_scale[:, None]))
        scale_places = tile * (TILE_ROWS * HEAD_DIM // 4) + (
            BLOCK_SIZE * HEAD_DIM // 4 + slot % BLOCK_SIZE
        )
        tl.store(key_scales + scale_places, k_scale, mask=heads < present)
        tl.store(value_scales + scale_places, v_scale, mask=heads < present)
    tl.store(key_cache + places, k, mask=inside)
    tl.store(value_cache + places, v, mask=inside)
