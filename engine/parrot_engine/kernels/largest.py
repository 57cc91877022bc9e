"""The largest logit of each row: what a greedy choice is, and where a draw begins.

Two passes, parts of a row and then the row, so that one row alone fills some of the device. What
is compared is one integer, the value in its order and below it the column counted backwards:
which part finds it first, and how a reduction is cut, cannot matter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Columns of a part.
_PART = 2048


@triton.jit
def _ordered(values):
    """Integers that stand in the order of float32 `values`; any NaN above, both zeros equal.

    Integer arithmetic alone, so that no rounding mode of a device has a say in it.
    """
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    order = tl.where(bits < 0, -magnitude, magnitude)
    return tl.where(magnitude > 0x7F800000, 0x7FFFFFFF, order)


@triton.jit
def largest_of_parts(logits, parts, VOCAB: tl.constexpr, PART: tl.constexpr):
    """Program (row, part): the largest of `PART` columns as order x 2^32 + (2^31 - 1 - column)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * PART + tl.arange(0, PART)
    inside = columns < VOCAB
    values = tl.load(logits + row * VOCAB + columns, mask=inside, other=0.0)
    found = (_ordered(values).to(tl.int64) << 32) | (0x7FFFFFFF - columns).to(tl.int64)
    best = tl.max(tl.where(inside, found, -0x8000000000000000), 0)
    tl.store(parts + row * tl.num_programs(1) + tl.program_id(1), best)


@triton.jit
def largest_of_rows(
    logits,
    parts,
    values,
    tokens,
    checked,
    VOCAB: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row): the largest of its parts."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < NUM_PARTS
    found = tl.load(parts + row * NUM_PARTS + lanes, mask=inside, other=0)
    best = tl.max(tl.where(inside, found, -0x8000000000000000), 0)
    token = 0x7FFFFFFF - (best & 0x7FFFFFFF)
    order = best >> 32
    # Between the infinities of either sign.
    is_finite = (order < 0x7F800000) & (order > -0x7F800000)
    tl.store(values + row, tl.load(logits + row * VOCAB + token))
    tl.store(tokens + row, token)
    tl.store(checked + row, tl.where(is_finite, token, -1))


def find_largest(logits: Tensor, values: Tensor, tokens: Tensor, checked: Tensor) -> None:
    """Write the largest logit of each row, its column, and the column or -1 if it is not finite.

    As `torch.max` on a GPU: of equals the first column counts, and NaN is above everything.

    Args:
        logits: float32 `[n, vocab_size]`, contiguous.
        values: float32 `[n]`.
        tokens: int64 `[n]`.
        checked: int64 `[n]`.
    """
    assert logits.dtype is torch.float32
    assert logits.is_contiguous()
    rows, vocab_size = logits.shape
    num_parts = triton.cdiv(vocab_size, _PART)
    parts = torch.empty((rows, num_parts), dtype=torch.int64, device=logits.device)
    largest_of_parts[(rows, num_parts)](logits, parts, VOCAB=vocab_size, PART=_PART, num_warps=4)
    largest_of_rows[(rows,)](
        logits,
        parts,
        values,
        tokens,
        checked,
        VOCAB=vocab_size,
        NUM_PARTS=num_parts,
        BLOCK=triton.next_power_of_2(num_parts),
        num_warps=1,
    )
