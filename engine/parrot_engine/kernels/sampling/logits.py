"""Kernels over rows of logits: the largest of each row, and token masks.

The largest logit is the greedy choice, and the start of a draw. It is found in two passes, over
parts of a row and then over the parts, so that even a single row uses several cores. Integers are
compared: the value's order, and below it the column counted backwards. So the result does not
depend on how a reduction is divided.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Columns per part, and per program that applies a mask.
_PART = 2048
_MASK_BLOCK = 1024


@triton.jit
def _ordered(values):
    """Return integers in the order of float32 `values`, with NaN above all and equal zeros.

    Uses integer arithmetic only, so that a device's rounding mode has no effect.
    """
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    order = tl.where(bits < 0, -magnitude, magnitude)
    return tl.where(magnitude > 0x7F800000, 0x7FFFFFFF, order)


@triton.jit
def largest_of_parts(logits, parts, VOCAB: tl.constexpr, PART: tl.constexpr):
    """Find the largest of `PART` columns, as order x 2^32 + (2^31 - 1 - column), per program (row,
    part).
    """
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
    """Find the largest of a row's parts, per program (row)."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < NUM_PARTS
    found = tl.load(parts + row * NUM_PARTS + lanes, mask=inside, other=0)
    best = tl.max(tl.where(inside, found, -0x8000000000000000), 0)
    token = 0x7FFFFFFF - (best & 0x7FFFFFFF)
    order = best >> 32
    # True between the two infinities.
    is_finite = (order < 0x7F800000) & (order > -0x7F800000)
    tl.store(values + row, tl.load(logits + row * VOCAB + token))
    tl.store(tokens + row, token)
    tl.store(checked + row, tl.where(is_finite, token, -1))


def find_largest(logits: Tensor, values: Tensor, tokens: Tensor, checked: Tensor) -> None:
    """Write each row's largest logit, its column, and the column again, or -1 if the logit is not
    finite.

    Works like `torch.max` on a GPU: the first of equal columns counts, and NaN is above everything.

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


@triton.jit
def _token_mask_kernel(
    logits, bits, at, row_stride, num_words, vocab_size, HAS_AT: tl.constexpr, BLOCK: tl.constexpr
):
    mask_row = tl.program_id(0)
    row = tl.load(at + mask_row) if HAS_AT else mask_row
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocab_size
    words = tl.load(bits + mask_row.to(tl.int64) * num_words + tokens // 32, inside, other=-1)
    banned = (words >> (tokens % 32)) & 1 == 0
    # Only banned logits are touched: a mask costs its own bytes and the bytes it writes.
    places = logits + row.to(tl.int64) * row_stride + tokens
    tl.store(places, float("-inf"), inside & banned)


def apply_token_masks(logits: Tensor, bits: Tensor, at: Tensor | None) -> None:
    """Set the logits of tokens with bit 0 to minus infinity.

    Args:
        logits: `[n, vocab_size]`, its rows contiguous; changed in place.
        bits: int32 `[m, ceil(vocab_size / 32)]`, contiguous; bit i of a row is token i.
        at: integers `[m]`: the row of the logits that each mask is for; None: the m rows in order.
    """
    if logits.stride(1) != 1 or not bits.is_contiguous() or bits.dtype != torch.int32:
        raise ValueError("rows of logits and masks must be contiguous, masks int32")
    rows, vocab_size = bits.shape[0], logits.shape[1]
    _token_mask_kernel[(rows, triton.cdiv(vocab_size, _MASK_BLOCK))](
        logits,
        bits,
        bits if at is None else at,
        logits.stride(0),
        bits.shape[1],
        vocab_size,
        HAS_AT=at is not None,
        BLOCK=_MASK_BLOCK,
        num_warps=4,
    )
