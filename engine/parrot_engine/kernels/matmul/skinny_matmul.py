"""Products of few rows with a large weight: y = x W^T for 1 to 128 tokens.

Such a product costs one reading of W, and both kernels are built for that. `vector_product` (few
tokens) multiplies in float32 registers; `tile_product` feeds matrix instructions with a tile of
tokens padded to a power of two. RMSNorm is fused into the reading of x; bias, gated activation and
residual are fused into the writing of y. RMSNorm needs no pass of its own: with g the norm's
weight,

    (x / rms(x) * g) W^T = ((x * g) W^T) / rms(x)

so the squares are summed beside the product and their root divides at the end.

A token's result depends only on its own row of x and on shapes: sums run in a fixed order, even if
the weight's columns are split among programs. Other numbers of tokens may use another kernel or
tile (`skinny_tuning`), and so another order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from parrot_engine.kernels.tuning import Tuning

#: Triton's interpreter multiplies the bit patterns of bfloat16 in `tl.dot`.
INTERPRETED = triton.knobs.runtime.interpret


@triton.jit
def no_tensors():
    """Return a tuple to which tensors can be added, one per token."""
    return ()


@triton.jit
def finish(
    total,
    places,
    rows,
    stored,
    bias,
    residual,
    out,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """Add bias (by row of W) and residual, round and write; `places` locates `total` in `out`."""
    if HAS_BIAS:
        total += tl.load(bias + rows).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual + places, mask=stored, other=0.0).to(tl.float32)
    tl.store(out + places, total.to(out.dtype.element_ty), mask=stored)


@triton.jit
def finish_part(
    total,
    block,
    split,
    places,
    rows,
    stored,
    bias,
    residual,
    out,
    partial,
    arrivals,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Do the work of `finish` in the last program of a block of outputs with split columns.

    `total` `[rows, tokens]` is the `split`-th part of `block`. Parts go to `partial` `[blocks,
    SPLITS, rows, tokens]`. The last program, as counted in `arrivals[block]`, adds up all of them
    in order. Counts start and end at 0.
    """
    if SPLITS == 1:
        finish(total, places, rows, stored, bias, residual, out, HAS_BIAS, HAS_RESIDUAL)
    else:
        HEIGHT: tl.constexpr = total.shape[0]
        TOKENS: tl.constexpr = total.shape[1]
        lines = tl.arange(0, HEIGHT)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
        parts = partial + block * (SPLITS * HEIGHT * TOKENS) + lines
        tl.store(parts + split * (HEIGHT * TOKENS), total)
        # All threads must have stored before the count is raised.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals + block, 1, sem="acq_rel")
        if arrived == SPLITS - 1:
            tl.store(arrivals + block, 0)
            total = tl.load(parts)
            for other in tl.static_range(1, SPLITS):
                total += tl.load(parts + other * (HEIGHT * TOKENS))
            finish(total, places, rows, stored, bias, residual, out, HAS_BIAS, HAS_RESIDUAL)


@triton.jit
def silu_gate(gate, up, rows, bias, OUT: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Return silu(gate) x up, with the biases of both halves added first (arXiv 2002.05202)."""
    if HAS_BIAS:
        gate += tl.load(bias + rows).to(tl.float32)
        up += tl.load(bias + OUT + rows).to(tl.float32)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit(do_not_specialize=["num_tokens"])
def vector_product(
    x,
    weight,
    norm_weight,
    bias,
    residual,
    out,
    num_tokens,
    eps,
    HAS_NORM: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute `BLOCK_OUT` outputs of up to `TOKENS` tokens per program; with `GATED` of both halves
    of W.

    `OUT` is the width of `out`. With `BLOCK_IN` = 256 columns per warp every lane has the same
    columns (16 bytes of two-byte weights) of all rows of the tile, so x needs no exchange.
    """
    rows = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    # Rows past the end read the last one again; they are not stored.
    present = tl.minimum(rows, OUT - 1)
    lanes = tl.arange(0, BLOCK_IN)
    source = weight + present.to(tl.int64)[:, None] * IN + lanes[None, :]
    totals = no_tensors()
    ups = no_tensors()
    squares = no_tensors()
    for _ in tl.static_range(TOKENS):
        totals += (tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32),)
        ups += (tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32),)
        squares += (tl.zeros([BLOCK_IN], tl.float32),)
    for start in tl.range(0, IN, BLOCK_IN, num_stages=STAGES):
        if IN % BLOCK_IN == 0:
            w = tl.load(source + start, eviction_policy="evict_first").to(tl.float32)
            if GATED:
                v = tl.load(source + start + OUT * IN, eviction_policy="evict_first")
        else:
            inside = start + lanes < IN
            w = tl.load(
                source + start, mask=inside[None, :], other=0.0, eviction_policy="evict_first"
            ).to(tl.float32)
            if GATED:
                v = tl.load(
                    source + start + OUT * IN,
                    mask=inside[None, :],
                    other=0.0,
                    eviction_policy="evict_first",
                )
        if HAS_NORM:
            if IN % BLOCK_IN == 0:
                scale = tl.load(norm_weight + start + lanes).to(tl.float32)
            else:
                scale = tl.load(norm_weight + start + lanes, mask=inside, other=0.0).to(tl.float32)
        new_totals = no_tensors()
        new_ups = no_tensors()
        new_squares = no_tensors()
        for token in tl.static_range(TOKENS):
            row = tl.minimum(token, num_tokens - 1) * IN
            if IN % BLOCK_IN == 0:
                value = tl.load(x + row + start + lanes).to(tl.float32)
            else:
                value = tl.load(x + row + start + lanes, mask=inside, other=0.0).to(tl.float32)
            if HAS_NORM:
                new_squares += (squares[token] + value * value,)
                value *= scale
            else:
                new_squares += (squares[token],)
            new_totals += (totals[token] + w * value[None, :],)
            if GATED:
                new_ups += (ups[token] + v.to(tl.float32) * value[None, :],)
            else:
                new_ups += (ups[token],)
        totals = new_totals
        ups = new_ups
        squares = new_squares
    for token in tl.static_range(TOKENS):
        total = tl.sum(totals[token], 1)
        factor = 1.0
        if HAS_NORM:
            factor = tl.rsqrt(tl.sum(squares[token], 0) / IN + eps)
            total *= factor
        if GATED:
            up = tl.sum(ups[token], 1) * factor
            total = silu_gate(total, up, present, bias, OUT, HAS_BIAS)
        finish(
            total,
            token * OUT + rows,
            present,
            (rows < OUT) & (tl.full([BLOCK_OUT], token, tl.int32) < num_tokens),
            bias,
            residual,
            out,
            HAS_BIAS and not GATED,
            HAS_RESIDUAL,
        )


@triton.jit(do_not_specialize=["num_tokens"])
def tile_product(
    x,
    weight,
    x_tiles,
    weight_tiles,
    norm_weight,
    bias,
    residual,
    out,
    partial,
    arrivals,
    num_tokens,
    eps,
    HAS_NORM: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    STAGES: tl.constexpr,
    SPLITS: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    DOT_IN_FLOAT32: tl.constexpr,
):
    """Compute `BLOCK_OUT` outputs of all tokens per program; W is the large operand of the
    products.

    With `SPLITS` > 1 program (i, s) sums the s-th part of the columns; then neither norm nor gate
    may be fused; see `finish_part`. With `DESCRIPTORS` the copy engine fetches W, and x unless it
    is normalised.
    """
    first = tl.program_id(0) * BLOCK_OUT
    rows = first + tl.arange(0, BLOCK_OUT)
    present = tl.minimum(rows, OUT - 1)
    tokens = tl.arange(0, TOKENS)
    wanted = tokens < num_tokens
    lanes = tl.arange(0, BLOCK_IN)
    source = weight + present.to(tl.int64)[:, None] * IN + lanes[None, :]
    values = x + tokens[:, None] * IN + lanes[None, :]
    total = tl.zeros([BLOCK_OUT, TOKENS], tl.float32)
    up = tl.zeros([BLOCK_OUT, TOKENS], tl.float32)
    squares = tl.zeros([TOKENS, BLOCK_IN], tl.float32)
    PART: tl.constexpr = tl.cdiv(tl.cdiv(IN, BLOCK_IN), SPLITS) * BLOCK_IN
    split = tl.program_id(1)
    for start in tl.range(split * PART, min(IN, (split + 1) * PART), BLOCK_IN, num_stages=STAGES):
        # A missing token reads as zero, rather than whatever lies behind x.
        inside = (start + lanes < IN)[None, :]
        if DESCRIPTORS:
            w = weight_tiles.load([first, start])
            if GATED:
                v = weight_tiles.load([OUT + first, start])
        elif IN % BLOCK_IN == 0:
            w = tl.load(source + start, eviction_policy="evict_first")
            if GATED:
                v = tl.load(source + start + OUT * IN, eviction_policy="evict_first")
        else:
            w = tl.load(source + start, mask=inside, other=0.0, eviction_policy="evict_first")
            if GATED:
                v = tl.load(
                    source + start + OUT * IN, mask=inside, other=0.0, eviction_policy="evict_first"
                )
        if DESCRIPTORS and not HAS_NORM:
            value = x_tiles.load([0, start])
        elif IN % BLOCK_IN == 0:
            value = tl.load(values + start, mask=wanted[:, None], other=0.0)
        else:
            value = tl.load(values + start, mask=wanted[:, None] & inside, other=0.0)
        if HAS_NORM:
            exact = value.to(tl.float32)
            squares += exact * exact
            if IN % BLOCK_IN == 0:
                scale = tl.load(norm_weight + start + lanes).to(tl.float32)
            else:
                scale = tl.load(norm_weight + start + lanes, mask=start + lanes < IN, other=0.0).to(
                    tl.float32
                )
            value = (exact * scale[None, :]).to(w.dtype)
        if DOT_IN_FLOAT32:
            w = w.to(tl.float32)
            value = value.to(tl.float32)
        value = tl.trans(value)
        total = tl.dot(w, value, total, input_precision="ieee")
        if GATED:
            up = tl.dot(v.to(w.dtype), value, up, input_precision="ieee")
    if HAS_NORM:
        factor = tl.rsqrt(tl.sum(squares, 1) / IN + eps)[None, :]
        total *= factor
        up *= factor
    if GATED:
        total = silu_gate(total, up, present[:, None], bias, OUT, HAS_BIAS)
    places = tokens[None, :] * OUT + rows[:, None]
    stored = (rows < OUT)[:, None] & wanted[None, :]
    finish_part(
        total,
        tl.program_id(0),
        tl.program_id(1),
        places,
        present[:, None],
        stored,
        bias,
        residual,
        out,
        partial,
        arrivals,
        HAS_BIAS and not GATED,
        HAS_RESIDUAL,
        SPLITS,
    )


def product(
    x: Tensor,
    weight: Tensor,
    tuning: Tuning,
    *,
    norm: tuple[Tensor, float] | None = None,
    gated: bool = False,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    arrivals: Tensor | None = None,
) -> Tensor:
    """Compute y = f(norm(x) W^T + bias) + residual for contiguous `x` `[num_tokens, in]`, W `[out,
    in]`.

    `norm` is (weight, eps) of an RMSNorm of x. With `gated` the halves of W are gate and up, and
    f(gate, up) = silu(gate) x up, so y is half as wide. `residual` has the shape of y. Everything
    is summed in float32 and rounded once, to the dtype of `out` if given, otherwise of x.

    `tuning` must allow as many tokens as x has. Columns can be split (`splits`) only without `norm`
    and `gated`, and `descriptors` need rows of whole 16 bytes. Split columns need `arrivals`: int32
    zeros, at least one per block of outputs, that no other product uses at the same time.
    """
    assert x.is_contiguous()
    assert weight.is_contiguous()
    assert residual is None or residual.is_contiguous()
    num_tokens, in_size = x.shape
    out_size = weight.shape[0] // (2 if gated else 1)
    assert 1 <= num_tokens <= tuning.tokens
    assert tuning.splits == 1 or not (norm or gated)
    shape = (num_tokens, out_size)
    if out is None:
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
    assert out.shape == shape
    assert out.is_contiguous()
    norm_weight, eps = norm or (x, 0.0)
    blocks = triton.cdiv(out_size, tuning.block_out)
    fused = {"HAS_BIAS": bias is not None, "HAS_RESIDUAL": residual is not None}
    # An absent tensor is never read, so any pointer will do.
    operands = (x if bias is None else bias, x if residual is None else residual)
    sizes = {
        "HAS_NORM": norm is not None,
        "GATED": gated,
        "IN": in_size,
        "OUT": out_size,
        "TOKENS": tuning.tokens,
        "BLOCK_OUT": tuning.block_out,
        "BLOCK_IN": tuning.block_in,
        "STAGES": tuning.num_stages,
        "num_warps": tuning.num_warps,
    }
    if tuning.kind == "vector":
        vector_product[(blocks,)](
            x, weight, norm_weight, *operands, out, num_tokens, eps, **sizes, **fused
        )
        return out
    sizes |= {
        "SPLITS": tuning.splits,
        "DESCRIPTORS": tuning.descriptors,
        "DOT_IN_FLOAT32": INTERPRETED,
    }
    tiles: tuple[Any, Any] = (x, weight)
    if tuning.descriptors:
        tiles = (
            TensorDescriptor.from_tensor(x, [tuning.tokens, tuning.block_in]),
            TensorDescriptor.from_tensor(weight, [tuning.block_out, tuning.block_in]),
        )
    partial, counts = x, x
    if tuning.splits > 1:
        assert arrivals is not None
        assert len(arrivals) >= blocks
        size = blocks * tuning.splits * tuning.block_out * tuning.tokens
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
        counts = arrivals
    tile_product[(blocks, tuning.splits)](
        x,
        weight,
        *tiles,
        norm_weight,
        *operands,
        out,
        partial,
        counts,
        num_tokens,
        eps,
        **sizes,
        **fused,
    )
    return out
