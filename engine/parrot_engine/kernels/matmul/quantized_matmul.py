"""Products with quantised weights: y = x W^T, W as codes and scales (`quantization.packed`).

Codes are converted to numbers on the way to the matrix instructions, in the dtype of x, which is
exact; scales multiply the sum over a group of columns, in float32. So a product costs the reading
of the codes. Fusions are those of `skinny_matmul`. A token's result depends only on its own row of
x.

With 4 bits, a byte holds two columns 16 apart: a tile of bytes is two tiles of columns.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from parrot_engine.kernels.matmul.dequantize import columns_of
from parrot_engine.kernels.matmul.hopper_product import specialized_product
from parrot_engine.kernels.matmul.quantized_tuning import is_grouped
from parrot_engine.kernels.matmul.quantized_vectors import vector_of_bytes, vector_of_words
from parrot_engine.kernels.matmul.skinny_matmul import INTERPRETED, finish_part, silu_gate
from parrot_engine.kernels.matmul.split_rows import split_rows
from parrot_engine.kernels.tuning import Tuning
from parrot_engine.quantization.packed import CHUNK, PackedWeight

_HALF: tl.constexpr = tl.constexpr(CHUNK // 2)


def _halves_of(dtype: str, base: int, one: int, less: int) -> tl.constexpr:
    """Build assembly that splits four bytes into lower and upper halves, as pairs of 16 bits.

    Args:
        dtype: PTX name of the pairs' dtype.
        base: the bits of a number whose last four bits count ones.
        one: the bits of 1.
        less: the bits of -(that number + 8).
    """
    digits = "".join(
        f"lop3.b32 {name}, {name}, 0x000F000F, 0x{base:04X}{base:04X}, 0xEA;\n" for name in "abcd"
    )
    results = "".join(
        f"fma.rn.{dtype}x2 ${place}, {name}, one, less;\n" for place, name in enumerate("abcd")
    )
    return tl.constexpr(
        f"""{{
        .reg .b32 a, b, c, d, one, less;
        prmt.b32 a, $4, 0, 0x4140;
        prmt.b32 b, $4, 0, 0x4342;
        shr.b32 c, a, 4;
        shr.b32 d, b, 4;
        mov.b32 one, 0x{one:04X}{one:04X};
        mov.b32 less, 0x{less:04X}{less:04X};
        {digits}{results}}}"""
    )


#: 128 and 1,024: the numbers from which each dtype has steps of 1.
_BFLOAT16_HALVES: tl.constexpr = _halves_of("bf16", 0x4300, 0x3F80, 0xC308)
_REGISTERS: tl.constexpr = tl.constexpr("=r,=r,=r,=r,r")
_FLOAT16_HALVES: tl.constexpr = _halves_of("f16", 0x6400, 0x3C00, 0xE408)


@triton.jit
def code_halves(pairs, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return (lower, upper) codes of bytes, minus 8, in `DTYPE`.

    Four bits become the last bits of a number with steps of 1: 128 in bfloat16, 1,024 in float16.
    That number is subtracted together with the eight: as x 1 - 136, in pairs.
    """
    if INTERPRETED:
        return (pairs & 15).to(DTYPE) - 8, (pairs >> 4).to(DTYPE) - 8
    if DTYPE == tl.bfloat16:  # noqa: SIM300
        low, high = tl.inline_asm_elementwise(
            _BFLOAT16_HALVES, _REGISTERS, [pairs], (tl.bfloat16, tl.bfloat16), True, 4
        )
    else:
        low, high = tl.inline_asm_elementwise(
            _FLOAT16_HALVES, _REGISTERS, [pairs], (tl.float16, tl.float16), True, 4
        )
    return low, high


@triton.jit
def _load_x(
    x,
    order,
    norm_weight,
    tokens,
    wanted,
    columns,
    HAS_NORM: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    IN: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Load (x times the norm's weight, squares of x) at `columns`, `[tokens, columns]`."""
    inside = columns < IN
    places = columns
    if HAS_ORDER:
        places = tl.load(order + columns, mask=inside, other=0)
    source = x + tokens[:, None] * IN + places[None, :]
    if WHOLE:
        value = tl.load(source, mask=wanted[:, None], other=0.0)
    else:
        value = tl.load(source, mask=wanted[:, None] & inside[None, :], other=0.0)
    exact = value.to(tl.float32)
    if HAS_NORM:
        scale = tl.load(norm_weight + places, mask=inside, other=0.0).to(tl.float32)
        value = (exact * scale[None, :]).to(x.dtype.element_ty)
    return value, exact * exact


@triton.jit
def load_of_step(values, places, PRESENT: tl.constexpr):
    """Load the scales or zero points of a step; 0 if it has none of its own."""
    value = tl.zeros(places.shape, tl.float32)
    if PRESENT:
        value = tl.load(values + places).to(tl.float32)
    return value


@triton.jit
def sum_columns(x_low, x_high, HAS_ZEROS: tl.constexpr, BITS: tl.constexpr):
    """Sum x over a step's columns, for the zero points; 0 without zero points."""
    sums = tl.zeros([x_low.shape[0]], tl.float32)
    if HAS_ZEROS:
        sums = tl.sum(x_low.to(tl.float32), 1)
        if BITS == 4:
            sums += tl.sum(x_high.to(tl.float32), 1)
    return sums


@triton.jit
def add_product(
    total,
    codes,
    x_low,
    x_high,
    sums,
    scale,
    zero,
    DTYPE: tl.constexpr,
    BITS: tl.constexpr,
    X_PARTS: tl.constexpr,
    GROUPED: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Return `total` plus the product of a step's `codes`.

    x `[columns, tokens]` has two parts: columns of lower and upper halves, or, with `X_PARTS`, the
    nearest 8-bit numbers and the remainder.
    """
    if BITS == 4:
        low, high = code_halves(codes, tl.float32 if INTERPRETED else DTYPE, INTERPRETED)
    else:
        low = codes
        if INTERPRETED:
            low = low.to(tl.float32)
        elif X_PARTS == 0:
            if low.dtype == tl.float8e4nv:
                # Needed before compute capability 9.0.
                low = low.to(tl.float32)
            low = low.to(DTYPE)
        high = low
    # 8-bit products lose precision in long sums, so a step's sums are added up in float32.
    if not GROUPED and X_PARTS == 0:
        total = tl.dot(low, x_low, total, input_precision="ieee")
        if BITS == 4:
            total = tl.dot(high, x_high, total, input_precision="ieee")
    else:
        part = tl.dot(low, x_low, input_precision="ieee")
        if BITS == 4 or X_PARTS == 2:
            part = tl.dot(high, x_high, part, input_precision="ieee")
        if HAS_ZEROS:
            part -= zero[:, None] * sums[None, :]
        if GROUPED:
            part *= scale[:, None]
        total += part
    return total


@triton.jit(do_not_specialize=["num_tokens"])
def quantized_tiles(
    x,
    x_scales,
    codes,
    code_tiles,
    scales,
    zeros,
    order,
    norm_weight,
    bias,
    residual,
    out,
    partial,
    arrivals,
    num_tokens,
    eps,
    BITS: tl.constexpr,
    X_PARTS: tl.constexpr,
    GROUPED: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    HAS_NORM: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    STAGES: tl.constexpr,
    SPLITS: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Compute `BLOCK_OUT` outputs of `TOKENS` tokens over part of the columns: program (t, i, s).

    A step has `BLOCK_IN` columns, within one group if `GROUPED`. Columns are split as in
    `skinny_matmul.tile_product`, for a single block of tokens only. With `X_PARTS` x is that number
    of `split_rows`' numbers, and codes are multiplied directly.
    """
    first = tl.program_id(1) * BLOCK_OUT
    rows = first + tl.arange(0, BLOCK_OUT)
    present = tl.minimum(rows, OUT - 1)
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    wanted = tokens < num_tokens
    ROWS: tl.constexpr = OUT * (2 if GATED else 1)
    SCALES: tl.constexpr = (ROWS + SCALE_ROWS - 1) // SCALE_ROWS
    BYTES: tl.constexpr = BLOCK_IN * BITS // 8
    ROW_BYTES: tl.constexpr = IN * BITS // 8
    WHOLE: tl.constexpr = IN % BLOCK_IN == 0
    DTYPE: tl.constexpr = x.dtype.element_ty
    lanes = tl.arange(0, BYTES)
    columns = columns_of(lanes, BITS)
    source = codes + present.to(tl.int64)[:, None] * ROW_BYTES + lanes[None, :]
    scale_rows = present // SCALE_ROWS
    up_scale_rows = (present + OUT) // SCALE_ROWS
    total = tl.zeros([BLOCK_OUT, TOKENS], tl.float32)
    up = tl.zeros([BLOCK_OUT, TOKENS], tl.float32)
    squares = tl.zeros([TOKENS, BYTES], tl.float32)
    PART: tl.constexpr = tl.cdiv(tl.cdiv(IN, BLOCK_IN), SPLITS) * BLOCK_IN
    split = tl.program_id(2)
    for start in tl.range(split * PART, min(IN, (split + 1) * PART), BLOCK_IN, num_stages=STAGES):
        begin = start * BITS // 8
        if DESCRIPTORS:
            w = code_tiles.load([first, begin])
        elif WHOLE:
            w = tl.load(source + begin, eviction_policy="evict_first")
        else:
            w = tl.load(source + begin, mask=(begin + lanes < ROW_BYTES)[None, :], other=0.0)
        if GATED:
            if DESCRIPTORS:
                v = code_tiles.load([OUT + first, begin])
            elif WHOLE:
                v = tl.load(source + begin + OUT * ROW_BYTES, eviction_policy="evict_first")
            else:
                v = tl.load(
                    source + begin + OUT * ROW_BYTES,
                    mask=(begin + lanes < ROW_BYTES)[None, :],
                    other=0.0,
                )
        x_low, squared = _load_x(
            x, order, norm_weight, tokens, wanted, start + columns, HAS_NORM, HAS_ORDER, IN, WHOLE
        )
        x_high = x_low
        if HAS_NORM:
            squares += squared
        if X_PARTS == 2:
            x_high, _ = _load_x(
                x + num_tokens * IN,
                order,
                norm_weight,
                tokens,
                wanted,
                start + columns,
                False,
                False,
                IN,
                WHOLE,
            )
        elif BITS == 4:
            x_high, squared = _load_x(
                x,
                order,
                norm_weight,
                tokens,
                wanted,
                start + _HALF + columns,
                HAS_NORM,
                HAS_ORDER,
                IN,
                WHOLE,
            )
            if HAS_NORM:
                squares += squared
        place = start // GROUP * SCALES
        scale = load_of_step(scales + place, scale_rows, GROUPED)
        up_scale = load_of_step(scales + place, up_scale_rows, GROUPED and GATED)
        zero = load_of_step(zeros + place, scale_rows, HAS_ZEROS)
        up_zero = load_of_step(zeros + place, up_scale_rows, HAS_ZEROS and GATED)
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
        total *= tl.load(scales + scale_rows).to(tl.float32)[:, None]
        if GATED:
            up *= tl.load(scales + up_scale_rows).to(tl.float32)[:, None]
    if X_PARTS > 0:
        factor = tl.load(x_scales + tokens, mask=wanted, other=0.0)[None, :]
        total *= factor
        up *= factor
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
        tl.program_id(1),
        split,
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


def quantized_product(
    x: Tensor,
    weight: PackedWeight,
    tuning: Tuning,
    *,
    norm: tuple[Tensor, float] | None = None,
    gated: bool = False,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    arrivals: Tensor | None = None,
) -> Tensor:
    """Do the work of `skinny_matmul.product` for a packed weight and any number of tokens.

    `tuning.tokens` is per program; if x has more, columns cannot be split. With scales per group,
    `tuning.block_in` columns must be within one group.
    """
    assert x.is_contiguous()
    if tuning.kind == "specialized":
        return specialized_product(
            x,
            weight,
            tuning,
            norm=norm,
            gated=gated,
            bias=bias,
            residual=residual,
            arrivals=arrivals,
        )
    num_tokens, in_size = x.shape
    out_size = weight.codes.shape[0] // (2 if gated else 1)
    token_blocks = triton.cdiv(num_tokens, tuning.tokens)
    assert tuning.splits == 1 or not (gated or token_blocks > 1)
    assert tuning.splits == 1 or norm is None or tuning.kind == "split"
    assert in_size == weight.in_size
    grouped = is_grouped(weight)
    out = torch.empty((num_tokens, out_size), dtype=x.dtype, device=x.device)
    splits_x = tuning.kind == "split"
    source, x_scales = x, weight.scales
    if splits_x:
        assert weight.kind == "fp8"
        source, x_scales = split_rows(x, norm)
        norm = None
    norm_weight, eps = norm or (x, 0.0)
    # An absent tensor is never read, so any pointer will do.
    operands = (x if bias is None else bias, x if residual is None else residual)
    blocks = triton.cdiv(out_size, tuning.block_out)
    sizes = {
        "HAS_NORM": norm is not None,
        "GATED": gated,
        "HAS_BIAS": bias is not None,
        "HAS_RESIDUAL": residual is not None,
        "IN": in_size,
        "OUT": out_size,
        "GROUP": weight.group,
        "BLOCK_OUT": tuning.block_out,
        "BLOCK_IN": tuning.block_in,
        "STAGES": tuning.num_stages,
        "num_warps": tuning.num_warps,
    }
    zeros = weight.scales if weight.zeros is None else weight.zeros
    if tuning.kind == "vector":
        assert num_tokens == 1
        common = (norm_weight, *operands, out, eps)
        if weight.kind == "int4":
            vector_of_words[(blocks,)](
                x,
                weight.codes.view(torch.int32),
                weight.scales,
                zeros,
                *common,
                HAS_ZEROS=weight.zeros is not None,
                INTERPRETED=INTERPRETED,
                **sizes,
            )
            return out
        sizes |= {"GROUPED": grouped, "SCALE_ROWS": weight.rows}
        vector_of_bytes[(blocks,)](x, weight.codes, weight.scales, *common, **sizes)
        return out
    assert not grouped or weight.group % tuning.block_in == 0
    bits = 4 if weight.kind == "int4" else 8
    tiles: Any = weight.codes
    if tuning.descriptors:
        tiles = TensorDescriptor.from_tensor(
            weight.codes, [tuning.block_out, tuning.block_in * bits // 8]
        )
    partial, counts = x, x
    if tuning.splits > 1:
        assert arrivals is not None
        assert len(arrivals) >= blocks
        size = blocks * tuning.splits * tuning.block_out * tuning.tokens
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
        counts = arrivals
    quantized_tiles[(token_blocks, blocks, tuning.splits)](
        source,
        x_scales,
        weight.codes,
        tiles,
        weight.scales,
        zeros,
        x if weight.order is None else weight.order,
        norm_weight,
        *operands,
        out,
        partial,
        counts,
        num_tokens,
        eps,
        BITS=bits,
        X_PARTS=2 if splits_x else 0,
        GROUPED=grouped,
        SCALE_ROWS=weight.rows,
        HAS_ZEROS=weight.zeros is not None,
        HAS_ORDER=weight.order is not None,
        TOKENS=tuning.tokens,
        SPLITS=tuning.splits,
        DESCRIPTORS=tuning.descriptors,
        INTERPRETED=INTERPRETED,
        **sizes,
    )
    return out
