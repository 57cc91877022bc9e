"""Masks over the vocabulary, packed to bits, applied to logits in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


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
    # Only what is banned is touched: a mask costs its own bytes and those that it writes.
    places = logits + row.to(tl.int64) * row_stride + tokens
    tl.store(places, float("-inf"), inside & banned)


def apply_token_masks(logits: Tensor, bits: Tensor, at: Tensor | None) -> None:
    """Set the logits of tokens whose bit is 0 to minus infinity.

    Args:
        logits: `[n, vocab_size]`, its rows contiguous; changed in place.
        bits: int32 `[m, ceil(vocab_size / 32)]`, contiguous; bit i of a row is token i.
        at: integers `[m]`: the row of the logits that each mask is for; None: the m rows in order.
    """
    if logits.stride(1) != 1 or not bits.is_contiguous() or bits.dtype != torch.int32:
        raise ValueError("rows of logits and masks must be contiguous, masks int32")
    rows, vocab_size = bits.shape[0], logits.shape[1]
    _token_mask_kernel[(rows, triton.cdiv(vocab_size, _BLOCK))](
        logits,
        bits,
        bits if at is None else at,
        logits.stride(0),
        bits.shape[1],
        vocab_size,
        HAS_AT=at is not None,
        BLOCK=_BLOCK,
        num_warps=4,
    )
