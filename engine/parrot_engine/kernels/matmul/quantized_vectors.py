"""Products of one token with packed weights by vector kernels: `quantized_matmul` for one row of
x.
"""

from __future__ import annotations

import triton
import triton.language as tl

from parrot_engine.kernels.matmul.skinny_matmul import finish, silu_gate
from parrot_engine.quantization.packed import CHUNK

_HALF: tl.constexpr = tl.constexpr(CHUNK // 2)


@triton.jit
def _normed(x, norm_weight, columns, HAS_NORM: tl.constexpr, IN: tl.constexpr, WHOLE: tl.constexpr):
    """Load (x times the norm's weight, squares of x) at `columns`, float32."""
    if WHOLE:
        value = tl.load(x + columns).to(tl.float32)
    else:
        value = tl.load(x + columns, mask=columns < IN, other=0.0).to(tl.float32)
    squares = value * value
    if HAS_NORM:
        value *= tl.load(norm_weight + columns, mask=columns < IN, other=0.0).to(tl.float32)
    return value, squares


@triton.jit
def _finish_vector(
    total,
    up,
    squares,
    rows,
    bias,
    residual,
    out,
    eps,
    HAS_NORM: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
):
    present = tl.minimum(rows, OUT - 1)
    if HAS_NORM:
        factor = tl.rsqrt(squares / IN + eps)
        total *= factor
        up *= factor
    if GATED:
        total = silu_gate(total, up, present, bias, OUT, HAS_BIAS)
    stored = rows < OUT
    finish(total, rows, present, stored, bias, residual, out, HAS_BIAS and not GATED, HAS_RESIDUAL)


@triton.jit
def vector_of_bytes(
    x,
    codes,
    scales,
    norm_weight,
    bias,
    residual,
    out,
    eps,
    GROUPED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute `BLOCK_OUT` outputs of one token from 8-bit codes, in float32 registers.

    If `GROUPED`, the rows of a program share their scales, which multiply x instead of W. A lane
    adds up a step's products at once, because registers limit the bytes in flight.
    """
    rows = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    present = tl.minimum(rows, OUT - 1)
    ROWS: tl.constexpr = OUT * (2 if GATED else 1)
    SCALES: tl.constexpr = (ROWS + SCALE_ROWS - 1) // SCALE_ROWS
    WHOLE: tl.constexpr = IN % BLOCK_IN == 0
    LANES: tl.constexpr = BLOCK_IN // 16
    lanes = tl.arange(0, BLOCK_IN)
    source = codes + present.to(tl.int64)[:, None] * IN + lanes[None, :]
    block = tl.program_id(0) * BLOCK_OUT // SCALE_ROWS
    up_block = (tl.program_id(0) * BLOCK_OUT + OUT) // SCALE_ROWS
    total = tl.zeros([BLOCK_OUT, LANES], tl.float32)
    up = tl.zeros([BLOCK_OUT, LANES], tl.float32)
    squares = tl.zeros([LANES], tl.float32)
    for start in tl.range(0, IN, BLOCK_IN, num_stages=STAGES):
        columns = start + lanes
        inside = columns < IN
        if WHOLE:
            w = tl.load(source + start, eviction_policy="evict_first")
        else:
            w = tl.load(source + start, mask=inside[None, :], other=0.0)
        if GATED:
            if WHOLE:
                v = tl.load(source + start + OUT * IN, eviction_policy="evict_first")
            else:
                v = tl.load(source + start + OUT * IN, mask=inside[None, :], other=0.0)
        value, squared = _normed(x, norm_weight, columns, HAS_NORM, IN, WHOLE)
        if HAS_NORM:
            squares += tl.sum(tl.reshape(squared, [LANES, 16]), 1)
        up_value = value
        if GROUPED:
            places = columns // GROUP * SCALES
            if GATED:
                up_value *= tl.load(scales + places + up_block, mask=inside, other=0.0)
            value *= tl.load(scales + places + block, mask=inside, other=0.0)
        products = w.to(tl.float32) * value[None, :]
        total += tl.sum(tl.reshape(products, [BLOCK_OUT, LANES, 16]), 2)
        if GATED:
            products = v.to(tl.float32) * up_value[None, :]
            up += tl.sum(tl.reshape(products, [BLOCK_OUT, LANES, 16]), 2)
    result = tl.sum(total, 1)
    result_up = tl.sum(up, 1)
    if not GROUPED:
        result *= tl.load(scales + present // SCALE_ROWS).to(tl.float32)
        if GATED:
            result_up *= tl.load(scales + (present + OUT) // SCALE_ROWS).to(tl.float32)
    _finish_vector(
        result, result_up, tl.sum(squares, 0), rows, bias, residual, out, eps,
        HAS_NORM, GATED, HAS_BIAS, HAS_RESIDUAL, IN, OUT,
    )  # fmt: skip


def _word_products() -> tl.constexpr:
    """Build assembly that multiplies eight codes of a word by eight values in pairs; the sum is
    float32.

    Pair i has the bits i x 4 above bits 0 to 3 and 16 to 19; sums of a word's pairs are in
    bfloat16.
    """
    steps = []
    for pair in range(4):
        source = "$1"
        if pair:
            steps.append(f"shr.b32 w, $1, {4 * pair};")
            source = "w"
        steps.append(f"lop3.b32 w, {source}, 0x000F000F, 0x43004300, 0xEA;")
        steps.append("fma.rn.bf16x2 w, w, one, less;")
        sum_before = "zero" if pair == 0 else "sum"
        steps.append(f"fma.rn.bf16x2 sum, w, ${2 + pair}, {sum_before};")
    return tl.constexpr(
        "{ .reg .b32 w, sum, one, less, zero; .reg .f32 a;"
        "mov.b32 one, 0x3F803F80; mov.b32 less, 0xC308C308; mov.b32 zero, 0x80008000;"
        + " ".join(steps)
        + "shl.b32 w, sum, 16; and.b32 sum, sum, 0xFFFF0000; mov.b32 a, w; mov.b32 $0, sum;"
        "add.f32 $0, $0, a; }"
    )


_WORD_PRODUCTS: tl.constexpr = _word_products()
_WORD_REGISTERS: tl.constexpr = tl.constexpr("=f,r,r,r,r,r")


@triton.jit
def _sum_words(words, x0, x1, x2, x3, INTERPRETED: tl.constexpr):
    """Multiply words `[rows, words]` by pairs of x `[words]`."""
    if INTERPRETED:
        total = tl.zeros(words.shape, tl.float32)
        for pair in tl.static_range(4):
            if pair == 0:
                x = x0
            elif pair == 1:
                x = x1
            elif pair == 2:
                x = x2
            else:
                x = x3
            low = (x << 16).to(tl.float32, bitcast=True)[None, :]
            high = (x & -65536).to(tl.float32, bitcast=True)[None, :]
            total += (((words >> (4 * pair)) & 15) - 8).to(tl.float32) * low
            total += (((words >> (4 * pair + 16)) & 15) - 8).to(tl.float32) * high
    else:
        total = tl.inline_asm_elementwise(
            _WORD_PRODUCTS,
            _WORD_REGISTERS,
            [words, x0[None, :], x1[None, :], x2[None, :], x3[None, :]],
            tl.float32,
            True,
            1,
        )
    return total


@triton.jit
def vector_of_words(
    x,
    words,
    scales,
    zeros,
    norm_weight,
    bias,
    residual,
    out,
    eps,
    HAS_ZEROS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Compute `BLOCK_OUT` outputs of one token in bfloat16, from 4-bit codes in groups.

    Word i of a chunk has columns 4 i to 4 i + 3 of both of its halves.
    """
    rows = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    present = tl.minimum(rows, OUT - 1)
    SCALES: tl.constexpr = OUT * (2 if GATED else 1)
    WORDS: tl.constexpr = BLOCK_IN // 8
    GROUPS: tl.constexpr = BLOCK_IN // GROUP
    lanes = tl.arange(0, WORDS)
    groups = tl.arange(0, GROUPS)
    source = words + present.to(tl.int64)[:, None] * (IN // 8) + lanes[None, :]
    of_groups = groups[None, :] * SCALES + present[:, None]
    total = tl.zeros([BLOCK_OUT, GROUPS], tl.float32)
    up = tl.zeros([BLOCK_OUT, GROUPS], tl.float32)
    squares = tl.zeros([WORDS], tl.float32)
    for start in tl.range(0, IN, BLOCK_IN, num_stages=STAGES):
        w = tl.load(
            source + start // 8,
            mask=(start // 8 + lanes < IN // 8)[None, :],
            other=0,
            eviction_policy="evict_first",
        )
        if GATED:
            v = tl.load(
                source + start // 8 + OUT * (IN // 8),
                mask=(start // 8 + lanes < IN // 8)[None, :],
                other=0,
                eviction_policy="evict_first",
            )
        inside = (start // GROUP + groups < IN // GROUP)[None, :]
        place = start // GROUP * SCALES + of_groups
        scale = tl.load(scales + place, mask=inside, other=0.0).to(tl.float32)
        columns = start + tl.arange(0, BLOCK_IN)
        value, squared = _normed(x, norm_weight, columns, HAS_NORM, IN, IN % BLOCK_IN == 0)
        if HAS_NORM:
            squares += tl.sum(tl.reshape(squared, [WORDS, 8]), 1)
        value = value.to(tl.bfloat16)
        bits = value.to(tl.int16, bitcast=True).to(tl.int32) & 65535
        # Layout of a chunk (half, word, 2, 2): pair (q, half) of a word has columns q and q + 2.
        bits = tl.reshape(bits, [BLOCK_IN // (2 * _HALF), 2, _HALF // 4, 2, 2])
        bits = tl.permute(bits, (0, 2, 4, 1, 3))
        even, odd = tl.split(tl.reshape(bits, [WORDS, 4, 2]))
        first, second = tl.split(tl.reshape(even | (odd << 16), [WORDS, 2, 2]))
        x0, x2 = tl.split(first)
        x1, x3 = tl.split(second)
        part = _sum_words(w, x0, x1, x2, x3, INTERPRETED)
        part = tl.sum(tl.reshape(part, [BLOCK_OUT, GROUPS, GROUP // 8]), 2)
        if HAS_ZEROS:
            sums = tl.sum(tl.reshape(value.to(tl.float32), [GROUPS, GROUP]), 1)[None, :]
            part -= tl.load(zeros + place, mask=inside, other=0).to(tl.float32) * sums
        total += part * scale
        if GATED:
            scale = tl.load(scales + place + OUT, mask=inside, other=0.0).to(tl.float32)
            part = _sum_words(v, x0, x1, x2, x3, INTERPRETED)
            part = tl.sum(tl.reshape(part, [BLOCK_OUT, GROUPS, GROUP // 8]), 2)
            if HAS_ZEROS:
                part -= tl.load(zeros + place + OUT, mask=inside, other=0).to(tl.float32) * sums
            up += part * scale
    _finish_vector(
        tl.sum(total, 1), tl.sum(up, 1), tl.sum(squares, 0), rows, bias, residual, out, eps,
        HAS_NORM, GATED, HAS_BIAS, HAS_RESIDUAL, IN, OUT,
    )  # fmt: skip
