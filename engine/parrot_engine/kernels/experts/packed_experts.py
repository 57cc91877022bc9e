"""Products of a mixture's tokens with experts stored as codes and scales.

It works like `grouped_product` and shares its routing and sums: pairs one by one, or tiles of one
expert's pairs. The matrices of all experts are one stacked `PackedWeight`. Codes become numbers as
in `quantized_matmul`. Single pairs use float32 registers. In tiles, FP8 codes are multiplied
directly by x in two 8-bit numbers, and all other codes in the dtype of x.
"""

from __future__ import annotations

import triton
import triton.language as tl

from parrot_engine.kernels.experts.grouped_product import store_sum, store_tile, store_units
from parrot_engine.kernels.matmul.dequantize import columns_of
from parrot_engine.kernels.matmul.quantized_matmul import add_product, load_of_step, sum_columns
from parrot_engine.quantization.packed import CHUNK

_HALF: tl.constexpr = tl.constexpr(CHUNK // 2)


@triton.jit
def _load_values(x, place, inside, BITS: tl.constexpr):
    """Load x in float32 at the columns of bytes: (of lower halves, of upper halves)."""
    low = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    high = low
    if BITS == 4:
        high = tl.load(x + place + _HALF, mask=inside, other=0.0).to(tl.float32)
    return low, high


@triton.jit
def _sum_chunks(low, high, CHUNKS: tl.constexpr, BITS: tl.constexpr, HAS_ZEROS: tl.constexpr):
    """Sum x over chunks, for the zero points; 0 without zero points."""
    sums = tl.zeros([CHUNKS], tl.float32)
    if HAS_ZEROS:
        added = low + high if BITS == 4 else low
        sums = tl.sum(tl.reshape(added, [CHUNKS, _HALF]), 1)
    return sums


@triton.jit
def _add_bytes(
    total,
    codes,
    low,
    high,
    sums,
    scales,
    zeros,
    place,
    there,
    BITS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
):
    """Add the scaled products of `codes` and x to `total` `[rows, chunks of 16 bytes]`."""
    if BITS == 4:
        products = ((codes & 15).to(tl.float32) - 8.0) * low[None, :]
        products += ((codes >> 4).to(tl.float32) - 8.0) * high[None, :]
    else:
        products = codes.to(tl.float32) * low[None, :]
    part = tl.sum(tl.reshape(products, [total.shape[0], total.shape[1], _HALF]), 2)
    if HAS_ZEROS:
        part -= tl.load(zeros + place, mask=there, other=0).to(tl.float32) * sums[None, :]
    return total + part * tl.load(scales + place, mask=there, other=0.0).to(tl.float32)


@triton.jit
def packed_vector_gate_up(
    x,
    codes,
    scales,
    zeros,
    bias,
    experts,
    out,
    BITS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    PARTIAL: tl.constexpr,
    TOP_K: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Compute gate, up and `gate_units` for `BLOCK_OUT` outputs of a pair per program.

    A step is `BLOCK_IN` bytes of a row; `SCALES` counts the blocks of rows of all experts. Steps
    are unrolled by hand, because otherwise each would wait for its own fetches.
    """
    pair = tl.program_id(0)
    expert = tl.load(experts + pair)
    if PARTIAL:  # noqa: SIM102 -- a constant
        if expert < 0:
            return
    rows = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    # Rows past the end read the last one again; they are not stored.
    present = tl.minimum(rows, OUT - 1)
    ROW_BYTES: tl.constexpr = IN * BITS // 8
    CHUNKS: tl.constexpr = BLOCK_IN // _HALF
    lanes = tl.arange(0, BLOCK_IN)
    columns = columns_of(lanes, BITS)
    chunks = tl.arange(0, CHUNKS) * _HALF
    above = expert * (2 * OUT) + present
    source = codes + above.to(tl.int64)[:, None] * ROW_BYTES + lanes[None, :]
    values = x + (pair // TOP_K).to(tl.int64) * IN
    gate = tl.zeros([BLOCK_OUT, CHUNKS], tl.float32)
    up = tl.zeros([BLOCK_OUT, CHUNKS], tl.float32)
    for start in tl.range(0, ROW_BYTES, BLOCK_IN, loop_unroll_factor=UNROLL):
        inside = start + lanes < ROW_BYTES
        here = inside[None, :]
        w = tl.load(source + start, mask=here, other=0.0, eviction_policy="evict_first")
        v = tl.load(
            source + start + OUT * ROW_BYTES, mask=here, other=0.0, eviction_policy="evict_first"
        )
        low, high = _load_values(values, start * 8 // BITS + columns, inside, BITS)
        sums = _sum_chunks(low, high, CHUNKS, BITS, HAS_ZEROS)
        there = (start + chunks < ROW_BYTES)[None, :]
        groups = ((start + chunks) * 8 // BITS // GROUP)[None, :] * SCALES
        place = groups + (above // SCALE_ROWS)[:, None]
        gate = _add_bytes(gate, w, low, high, sums, scales, zeros, place, there, BITS, HAS_ZEROS)
        place = groups + ((above + OUT) // SCALE_ROWS)[:, None]
        up = _add_bytes(up, v, low, high, sums, scales, zeros, place, there, BITS, HAS_ZEROS)
    opened, upper = tl.sum(gate, 1), tl.sum(up, 1)
    store_units(opened, upper, bias, above, pair, rows, out, HAS_BIAS, ALPHA, LIMIT, OUT)


@triton.jit
def packed_vector_down(
    x,
    codes,
    scales,
    zeros,
    bias,
    experts,
    factors,
    residual,
    out,
    BITS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PARTIAL: tl.constexpr,
    TOP_K: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Compute `BLOCK_OUT` outputs of a token per program: the sum of its experts, and the
    residual.
    """
    token = tl.program_id(0)
    rows = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    present = tl.minimum(rows, OUT - 1)
    ROW_BYTES: tl.constexpr = IN * BITS // 8
    CHUNKS: tl.constexpr = BLOCK_IN // _HALF
    lanes = tl.arange(0, BLOCK_IN)
    columns = columns_of(lanes, BITS)
    chunks = tl.arange(0, CHUNKS) * _HALF
    total = tl.zeros([BLOCK_OUT, CHUNKS], tl.float32)
    STEPS: tl.constexpr = (ROW_BYTES + BLOCK_IN - 1) // BLOCK_IN
    # One loop over experts and bytes, so that prefetching continues into the next expert.
    for step in tl.range(0, TOP_K * STEPS, loop_unroll_factor=UNROLL):
        pair = token * TOP_K + step // STEPS
        start = step % STEPS * BLOCK_IN
        expert = tl.load(experts + pair)
        above = expert * OUT + present
        factor = tl.load(factors + pair)
        # Inner rows of experts held elsewhere were never written.
        end = tl.where(expert >= 0, ROW_BYTES, 0) if PARTIAL else ROW_BYTES
        inside = start + lanes < end
        there = start + chunks < end
        w = tl.load(
            codes + above.to(tl.int64)[:, None] * ROW_BYTES + (start + lanes)[None, :],
            mask=inside[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        place = pair.to(tl.int64) * IN + start * 8 // BITS + columns
        low, high = _load_values(x, place, inside, BITS)
        low *= factor
        high *= factor
        sums = _sum_chunks(low, high, CHUNKS, BITS, HAS_ZEROS)
        groups = ((start + chunks) * 8 // BITS // GROUP)[None, :] * SCALES
        place = groups + (above // SCALE_ROWS)[:, None]
        total = _add_bytes(
            total, w, low, high, sums, scales, zeros, place, there[None, :], BITS, HAS_ZEROS
        )
    store_sum(
        tl.sum(total, 1), bias, experts, factors, residual, token, rows, out,
        HAS_BIAS, HAS_RESIDUAL, PARTIAL, TOP_K, OUT,
    )  # fmt: skip


@triton.jit
def _load_tile(x, place, wanted, inside, WHOLE: tl.constexpr):
    """Load rows of x at `place` `[pairs, columns]`, with 0 for padding and beyond a row's end."""
    if WHOLE:
        value = tl.load(x + place, mask=wanted[:, None], other=0.0)
    else:
        value = tl.load(x + place, mask=wanted[:, None] & inside[None, :], other=0.0)
    return value


@triton.jit(do_not_specialize=["num_rows"])
def packed_tile_product(
    x,
    x_scales,
    codes,
    code_tiles,
    scales,
    zeros,
    bias,
    pairs,
    tile_experts,
    num_tiles,
    factors,
    out,
    num_rows,
    BITS: tl.constexpr,
    X_PARTS: tl.constexpr,
    GROUPED: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    GATED: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    TOP_K: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    STAGES: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Do the work of `grouped_product.tile_product` for codes, `BLOCK_IN` columns per step within a
    group.

    x `[num_rows, IN]` is unchanged (`X_PARTS` 0), or split into that many 8-bit numbers
    (`split_rows`).
    """
    tile = tl.program_id(1)
    if tile >= tl.load(num_tiles):
        return
    expert = tl.load(tile_experts + tile)
    pair = tl.load(pairs + tile * TILE + tl.arange(0, TILE))
    wanted = pair >= 0
    token = tl.where(wanted, pair, 0) // TOP_K
    first = tl.program_id(0) * BLOCK_OUT
    rows = first + tl.arange(0, BLOCK_OUT)
    present = tl.minimum(rows, OUT - 1)
    HALVES: tl.constexpr = 2 if GATED else 1
    BYTES: tl.constexpr = BLOCK_IN * BITS // 8
    ROW_BYTES: tl.constexpr = IN * BITS // 8
    WHOLE: tl.constexpr = IN % BLOCK_IN == 0
    DTYPE: tl.constexpr = x.dtype.element_ty
    lanes = tl.arange(0, BYTES)
    columns = columns_of(lanes, BITS)
    top = expert * (HALVES * OUT)
    above = top + present
    source = codes + above.to(tl.int64)[:, None] * ROW_BYTES + lanes[None, :]
    line = token.to(tl.int64)[:, None] * IN + columns[None, :]
    total = tl.zeros([BLOCK_OUT, TILE], tl.float32)
    up = tl.zeros([BLOCK_OUT, TILE], tl.float32)
    for start in tl.range(0, IN, BLOCK_IN, num_stages=STAGES):
        begin = start * BITS // 8
        inside = begin + lanes < ROW_BYTES
        if DESCRIPTORS:
            w = code_tiles.load([top + first, begin])
            if GATED:
                v = code_tiles.load([top + OUT + first, begin])
        elif WHOLE:
            w = tl.load(source + begin)
            if GATED:
                v = tl.load(source + begin + OUT * ROW_BYTES)
        else:
            w = tl.load(source + begin, mask=inside[None, :], other=0.0)
            if GATED:
                v = tl.load(source + begin + OUT * ROW_BYTES, mask=inside[None, :], other=0.0)
        x_low = _load_tile(x, line + start, wanted, inside, WHOLE)
        x_high = x_low
        if BITS == 4:
            x_high = _load_tile(x, line + start + _HALF, wanted, inside, WHOLE)
        elif X_PARTS == 2:
            x_high = _load_tile(x + num_rows.to(tl.int64) * IN, line + start, wanted, inside, WHOLE)
        place = start // GROUP * SCALES + above // SCALE_ROWS
        up_place = start // GROUP * SCALES + (above + OUT) // SCALE_ROWS
        scale = load_of_step(scales, place, GROUPED)
        up_scale = load_of_step(scales, up_place, GROUPED and GATED)
        zero = load_of_step(zeros, place, HAS_ZEROS)
        up_zero = load_of_step(zeros, up_place, HAS_ZEROS and GATED)
        sums = sum_columns(x_low, x_high, HAS_ZEROS, BITS)
        if INTERPRETED:
            x_low = x_low.to(tl.float32)
            x_high = x_high.to(tl.float32)
        x_low = tl.trans(x_low)
        x_high = tl.trans(x_high)
        total = add_product(
            total, w, x_low, x_high, sums, scale, zero,
            DTYPE, BITS, X_PARTS, GROUPED, HAS_ZEROS, INTERPRETED,
        )  # fmt: skip
        if GATED:
            up = add_product(
                up, v, x_low, x_high, sums, up_scale, up_zero,
                DTYPE, BITS, X_PARTS, GROUPED, HAS_ZEROS, INTERPRETED,
            )  # fmt: skip
    if not GROUPED:
        total *= tl.load(scales + above // SCALE_ROWS).to(tl.float32)[:, None]
        if GATED:
            up *= tl.load(scales + (above + OUT) // SCALE_ROWS).to(tl.float32)[:, None]
    if X_PARTS > 0:
        factor = tl.load(x_scales + token, mask=wanted, other=0.0)[None, :]
        total *= factor
        up *= factor
    store_tile(
        total, up, bias + above, pair, rows, factors, out,
        HAS_BIAS, ALPHA, LIMIT, GATED, HAS_FACTORS, OUT,
    )  # fmt: skip
