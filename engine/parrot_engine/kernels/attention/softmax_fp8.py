"""Online softmax over tiles of a float8 cache: the counterpart of `attend`'s loop.

Differences and their reasons (instruction counts and times: bench/results/engine-log.md, 16):

- Products are in float16, which represents every float8_e4m3fn exactly: one instruction converts
  two elements. Conversion to bfloat16 takes two more, of the slowest kind.
- Tiles of few rows read the cache as pairs of bytes. Their matrix instructions take from a register
  elements that are adjacent in a column of memory. 16-bit values can be transposed on the way from
  shared memory, 8-bit values cannot, so even and odd elements of heads are multiplied separately.
- A value's scale goes into the exponent of its weight: the scale's power of two is added to the
  score. A row's largest weight *times that power* is then 1, so float16 has enough digits for all
  relevant weights, however small the scales; the denominator is divided by it again.

Bfloat16 queries are divided by a constant; if a value still exceeds float16, its row fails.
"""

from __future__ import annotations

import triton
import triton.language as tl

from parrot_engine.kernels.attention.paged_cache import hide_unseen, load_scales, load_tiles

#: Divisor of bfloat16 queries, because float16 ends at 65,504.
QUERY_DIVISOR = tl.constexpr(16.0)
#: True in Triton's interpreter, which does not support assembler.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def product_query(q, scale_log2):
    """Return `q` in the products' dtype (bfloat16 becomes float16), and the scale of the
    products.
    """
    if q.dtype == tl.bfloat16:
        scaled = q.to(tl.float32) / QUERY_DIVISOR
        # NOTE: not infinity, which could leave a row that seems to have seen nothing.
        q = tl.where(tl.abs(scaled) < 65504.0, scaled, float("nan")).to(tl.float16)
        scale_log2 *= QUERY_DIVISOR
    return q, scale_log2


@triton.jit
def convert(codes, dtype: tl.constexpr):
    """Convert bytes of float8_e4m3fn, the low bytes of integers, to `dtype`."""
    return codes.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(dtype)


@triton.jit
def convert_pairs(codes, dtype: tl.constexpr):
    """Convert pairs of bytes to even and odd numbers; `codes` are int16."""
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
    """Split scales into the power of two below: its logarithm, its inverse, and the remainder."""
    exponent = scale.to(tl.int32, bitcast=True) & 0x7F800000
    inverse = (0x7F000000 - exponent).to(tl.float32, bitcast=True)
    return ((exponent >> 23) - 127).to(tl.float32), inverse, scale * inverse


@triton.jit
def attend_quantized_keys(
    sums,
    q,
    odd_q,
    positions,
    cache,
    run,
    begin,
    end,
    limit,
    head,
    window,
    scale_log2,
    MASKED: tl.constexpr,
    C: tl.constexpr,
):
    """Let queries `q` attend to keys `begin` … `end` - 1; see `attend.attend_keys`.

    `q` and `scale_log2` come from `product_query`. `sums` has the weighted sums of values, those of
    odd elements, the denominator, and the largest score including the values' scales. The
    log-sum-exp of scores is still `largest + log2(denominator)`.

    With `C.pairs` the cache is int16, pairs of bytes; `q` and the first sum have the even elements
    of heads, `odd_q` and the second sum the odd ones. Otherwise these two are unused.
    """
    total, odd_total, denominator, largest = sums
    for start in range(begin, end, C.block_n):
        keys = start + tl.arange(0, C.block_n)
        k, v, origin = load_tiles(cache, run, start, limit, head, MASKED, C)
        k_scale, v_scale = load_scales(cache, origin, keys < limit, MASKED, C)
        if C.pairs:
            k, k_odd = convert_pairs(k, q.dtype)
            v, v_odd = convert_pairs(v, q.dtype)
        else:
            k, v = convert(k, q.dtype), convert(v, q.dtype)
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
        if C.pairs:
            products = tl.dot(odd_q, tl.trans(k_odd), products, input_precision="ieee")
        v_log2, v_inverse, v_rest = split_scale(v_scale)
        scores = products * (k_scale * scale_log2)[None, :]
        if C.softcap_log2 > 0.0:
            turned = tl.exp2(scores * (2.8853900817779268 / C.softcap_log2))
            scores = C.softcap_log2 - 2.0 * C.softcap_log2 / (turned + 1.0)
        scores += v_log2[None, :]
        if MASKED:
            scores = hide_unseen(scores, keys, positions, window, C)
        raised = tl.maximum(largest, tl.max(scores, 1))
        # A row that has seen nothing keeps -inf; -inf minus -inf would be NaN.
        anchor = tl.where(raised == float("-inf"), 0.0, raised) if MASKED else raised
        decay = tl.exp2(largest - anchor)
        weights = tl.exp2(scores - anchor[:, None])
        denominator = denominator * decay + tl.sum(weights * v_inverse[None, :], 1)
        weights = (weights * v_rest[None, :]).to(q.dtype)
        total = tl.dot(weights, v, total * decay[:, None], input_precision="ieee")
        if C.pairs:
            odd_total *= decay[:, None]
            odd_total = tl.dot(weights, v_odd, odd_total, input_precision="ieee")
        largest = raised
    return total, odd_total, denominator, largest
