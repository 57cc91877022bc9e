"""Products of a mixture's tokens with the weights of their experts.

With few tokens each pair (a token and one of its experts, see `expert_routing`) is a separate
product: `vector_gate_up`, then `vector_down`, which adds up the token's experts and the residual.
With more tokens the pairs of an expert share the reading of its weights: `tile_product` multiplies
tiles of them, once for gate and up and once for down, and `sum_experts` adds up.

Sums are float32, in a fixed order. A token's result depends only on its own row and on shapes.
Weights are `[experts, out, in]`, gate above up. `mixture` launches the kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gate_units(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """Return silu(gate) x up; with a `LIMIT` gpt-oss's bounded variant (NaN stays NaN)."""
    if LIMIT > 0.0:
        nan: tl.constexpr = tl.PropagateNan.ALL
        gate = tl.minimum(gate, LIMIT, propagate_nan=nan)
        up = tl.maximum(tl.minimum(up, LIMIT, propagate_nan=nan), -LIMIT, propagate_nan=nan)
        return gate / (1.0 + tl.exp(-ALPHA * gate)) * (up + 1.0)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def store_units(
    gate,
    up,
    bias,
    above,
    pair,
    rows,
    out,
    HAS_BIAS: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    OUT: tl.constexpr,
):
    """Write `gate_units` of a pair; `above` locates the gate's `rows` in the bias."""
    if HAS_BIAS:
        gate += tl.load(bias + above).to(tl.float32)
        up += tl.load(bias + above + OUT).to(tl.float32)
    total = gate_units(gate, up, ALPHA, LIMIT)
    tl.store(out + pair.to(tl.int64) * OUT + rows, total.to(out.dtype.element_ty), mask=rows < OUT)


@triton.jit
def store_sum(
    total,
    bias,
    experts,
    factors,
    residual,
    token,
    rows,
    out,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PARTIAL: tl.constexpr,
    TOP_K: tl.constexpr,
    OUT: tl.constexpr,
):
    """Write the sum of a token's experts with their biases and the residual."""
    present = tl.minimum(rows, OUT - 1)
    if HAS_BIAS:
        for slot in tl.static_range(TOP_K):
            expert = tl.load(experts + token * TOP_K + slot).to(tl.int64)
            factor = tl.load(factors + token * TOP_K + slot)
            held = tl.where(expert >= 0, OUT, 0) if PARTIAL else OUT
            value = tl.load(bias + expert * OUT + present, mask=present < held, other=0.0)
            total += value.to(tl.float32) * factor
    places = token.to(tl.int64) * OUT + rows
    if HAS_RESIDUAL:
        total += tl.load(residual + places, mask=rows < OUT, other=0.0).to(tl.float32)
    tl.store(out + places, total.to(out.dtype.element_ty), mask=rows < OUT)


@triton.jit
def store_tile(
    total,
    up,
    biases,
    pair,
    rows,
    factors,
    out,
    HAS_BIAS: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    GATED: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    OUT: tl.constexpr,
):
    """Write a tile's outputs, `total` `[rows, pairs]`; `biases` points to those of its rows."""
    if HAS_BIAS:
        total += tl.load(biases).to(tl.float32)[:, None]
        if GATED:
            up += tl.load(biases + OUT).to(tl.float32)[:, None]
    if GATED:
        total = gate_units(total, up, ALPHA, LIMIT)
    wanted = pair >= 0
    if HAS_FACTORS:
        total *= tl.load(factors + pair, mask=wanted, other=0.0)[None, :]
    places = pair.to(tl.int64)[None, :] * OUT + rows[:, None]
    stored = (rows < OUT)[:, None] & wanted[None, :]
    tl.store(out + places, total.to(out.dtype.element_ty), mask=stored)


@triton.jit
def vector_gate_up(
    x,
    weight,
    bias,
    experts,
    out,
    HAS_BIAS: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    PARTIAL: tl.constexpr,
    TOP_K: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute gate, up and `gate_units` for `BLOCK_OUT` outputs of a pair per program.

    With `PARTIAL`, pairs of experts held elsewhere are skipped.
    """
    pair = tl.program_id(0)
    expert = tl.load(experts + pair).to(tl.int64)
    if PARTIAL:  # noqa: SIM102 -- a constant
        if expert < 0:
            return
    rows = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    # Rows past the end read the last one again; they are not stored.
    present = tl.minimum(rows, OUT - 1)
    lanes = tl.arange(0, BLOCK_IN)
    source = weight + expert * (2 * OUT * IN) + present[:, None] * IN + lanes[None, :]
    values = x + (pair // TOP_K).to(tl.int64) * IN + lanes
    gate = tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
    up = tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
    for start in tl.range(0, IN, BLOCK_IN, num_stages=STAGES):
        inside = start + lanes < IN
        here = inside[None, :]
        w = tl.load(source + start, mask=here, other=0.0, eviction_policy="evict_first")
        v = tl.load(source + start + OUT * IN, mask=here, other=0.0, eviction_policy="evict_first")
        value = tl.load(values + start, mask=inside, other=0.0).to(tl.float32)[None, :]
        gate += w.to(tl.float32) * value
        up += v.to(tl.float32) * value
    opened, upper = tl.sum(gate, 1), tl.sum(up, 1)
    above = expert * (2 * OUT) + present
    store_units(opened, upper, bias, above, pair, rows, out, HAS_BIAS, ALPHA, LIMIT, OUT)


@triton.jit
def vector_down(
    x,
    weight,
    bias,
    experts,
    factors,
    residual,
    out,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PARTIAL: tl.constexpr,
    TOP_K: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute `BLOCK_OUT` outputs of a token per program: the sum of its experts, and the
    residual.
    """
    token = tl.program_id(0)
    rows = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    present = tl.minimum(rows, OUT - 1)
    lanes = tl.arange(0, BLOCK_IN)
    source = weight + present[:, None] * IN + lanes[None, :]
    total = tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
    STEPS: tl.constexpr = (IN + BLOCK_IN - 1) // BLOCK_IN
    # One loop over experts and columns, so that prefetching continues into the next expert.
    for step in tl.range(0, TOP_K * STEPS, num_stages=STAGES):
        pair = token * TOP_K + step // STEPS
        start = step % STEPS * BLOCK_IN
        expert = tl.load(experts + pair).to(tl.int64)
        factor = tl.load(factors + pair)
        # Inner rows of experts held elsewhere were never written.
        inside = start + lanes < (tl.where(expert >= 0, IN, 0) if PARTIAL else IN)
        w = tl.load(
            source + expert * (OUT * IN) + start,
            mask=inside[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        value = tl.load(x + pair.to(tl.int64) * IN + start + lanes, mask=inside, other=0.0)
        total += w.to(tl.float32) * (value.to(tl.float32) * factor)[None, :]
    store_sum(
        tl.sum(total, 1), bias, experts, factors, residual, token, rows, out,
        HAS_BIAS, HAS_RESIDUAL, PARTIAL, TOP_K, OUT,
    )  # fmt: skip


@triton.jit
def tile_product(
    x,
    weight,
    weight_tiles,
    bias,
    pairs,
    tile_experts,
    num_tiles,
    factors,
    out,
    HAS_BIAS: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    GATED: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    TOP_K: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    STAGES: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    DOT_IN_FLOAT32: tl.constexpr,
):
    """Compute `BLOCK_OUT` outputs of a tile of pairs per program; W is the large operand.

    Pair p reads row `p // TOP_K` of x and writes row p of `out`: `gate_units` if `GATED`, times its
    factor if `HAS_FACTORS`. With `DESCRIPTORS` the copy engine fetches W.
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
    lanes = tl.arange(0, BLOCK_IN)
    HALVES: tl.constexpr = 2 if GATED else 1
    source = weight + expert.to(tl.int64) * (HALVES * OUT * IN)
    source = source + present[:, None] * IN + lanes[None, :]
    values = x + token.to(tl.int64)[:, None] * IN + lanes[None, :]
    total = tl.zeros([BLOCK_OUT, TILE], tl.float32)
    up = tl.zeros([BLOCK_OUT, TILE], tl.float32)
    top = expert * (HALVES * OUT) + first
    for start in tl.range(0, IN, BLOCK_IN, num_stages=STAGES):
        inside = (start + lanes < IN)[None, :]
        if DESCRIPTORS:
            w = weight_tiles.load([top, start])
            if GATED:
                v = weight_tiles.load([top + OUT, start])
        elif IN % BLOCK_IN == 0:
            w = tl.load(source + start)
            if GATED:
                v = tl.load(source + start + OUT * IN)
        else:
            w = tl.load(source + start, mask=inside, other=0.0)
            if GATED:
                v = tl.load(source + start + OUT * IN, mask=inside, other=0.0)
        # Padding is zero, and so is everything beyond the last column.
        if IN % BLOCK_IN == 0:
            value = tl.load(values + start, mask=wanted[:, None], other=0.0)
        else:
            value = tl.load(values + start, mask=wanted[:, None] & inside, other=0.0)
        if DOT_IN_FLOAT32:
            w = w.to(tl.float32)
            value = value.to(tl.float32)
        value = tl.trans(value)
        total = tl.dot(w, value, total, input_precision="ieee")
        if GATED:
            up = tl.dot(v.to(w.dtype), value, up, input_precision="ieee")
    biases = bias + expert.to(tl.int64) * (HALVES * OUT) + present
    store_tile(
        total, up, biases, pair, rows, factors, out,
        HAS_BIAS, ALPHA, LIMIT, GATED, HAS_FACTORS, OUT,
    )  # fmt: skip


@triton.jit
def sum_experts(
    parts,
    experts,
    residual,
    out,
    HAS_RESIDUAL: tl.constexpr,
    PARTIAL: tl.constexpr,
    TOP_K: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum `BLOCK` columns of a token's pairs and the residual per program."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(TOP_K):
        pair = token * TOP_K + slot
        size = tl.where(tl.load(experts + pair) >= 0, SIZE, 0) if PARTIAL else SIZE
        part = tl.load(parts + pair * SIZE + columns, mask=columns < size, other=0.0)
        total += part.to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual + token * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * SIZE + columns, total.to(out.dtype.element_ty), mask=inside)
