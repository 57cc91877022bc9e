"""Masks over the vocabulary: from the matchers of a step's rows to logits of minus infinity.

Masks are made on the host while the device computes the step, packed to one bit a token, sent in
one transfer, and unpacked where the logits are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from parrot_engine.batch import SamplingRow


class TokenMasks(NamedTuple):
    """Which tokens may be drawn, for the rows that have a grammar."""

    #: int64 `[m]`: which rows of the logits; None for all.
    at: Tensor | None
    #: int32 `[m, ceil(vocab_size / 32)]`: bit i of a row is token i.
    bits: Tensor


def make_masks(
    rows: Sequence[SamplingRow], vocab_size: int, device: torch.device
) -> TokenMasks | None:
    """The masks of the rows that have a matcher, on their way to the device; None without any."""
    asked = [(index, row, row.matcher) for index, row in enumerate(rows) if row.matcher is not None]
    if not asked:
        return None
    num_words = -(-vocab_size // 32)
    pinned = device.type == "cuda"
    # The rows that the masks are for travel in front of them: one transfer.
    packed = torch.zeros(len(asked) * (num_words + 1), dtype=torch.int32, pin_memory=pinned)
    host = packed.numpy()
    host[: len(asked)] = [index for index, _, _ in asked]
    words = host[len(asked) :].reshape(len(asked), num_words)
    for (_, row, matcher), mask in zip(asked, words, strict=True):
        matcher.fill_mask(row.generated_token_ids, mask)
    sent = packed.to(device, non_blocking=True)
    at = None if len(asked) == len(rows) else sent[: len(asked)].to(torch.int64)
    return TokenMasks(at, sent[len(asked) :].view(len(asked), num_words))


def apply_masks(logits: Tensor, masks: TokenMasks) -> None:
    """Set what is not allowed to minus infinity, in place; `logits` is `[n, vocab_size]`."""
    if logits.is_cuda:
        # Imports triton, which is installed where it is used only.
        from parrot_engine.kernels.token_mask import apply_token_masks

        apply_token_masks(logits, masks.bits, masks.at)
        return
    allowed = unpack(masks.bits, logits.shape[1])
    if masks.at is None:
        logits.masked_fill_(~allowed, float("-inf"))
    else:
        logits[masks.at] = logits[masks.at].masked_fill_(~allowed, float("-inf"))


def unpack(bits: Tensor, vocab_size: int) -> Tensor:
    """bool `[m, vocab_size]` of packed masks on a CPU."""
    octets = bits.numpy().view(np.uint8)
    unpacked = np.unpackbits(octets, axis=1, bitorder="little", count=vocab_size)
    return torch.from_numpy(unpacked.view(np.bool_))
