"""Inputs of the sampler, gathered on the host from the rows of a step.

Parameters and histories are added to one `Upload`, so that all of them travel in a single transfer
that the host does not wait for. Masks of grammars are made while the device computes the step,
packed to one bit a token, sent in one transfer, and unpacked where the logits are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from parrot_engine.batch import SamplingRow
from parrot_engine.runner.transfers import Part, Upload

_MASK64 = (1 << 64) - 1
#: Below this a temperature only serves to overflow: the largest logit wins anyway.
_MIN_TEMPERATURE = 1e-6


class Edit(NamedTuple):
    """Elements of the flattened logits, and a number for each."""

    at: Part
    values: Part


class Ranking(NamedTuple):
    """Top-k and top-p of the rows that draw, of all if any row has one."""

    #: Which of the rows that draw have either.
    at: Part
    #: The vocabulary's size where a row keeps all; None when all do.
    top_k: Part | None
    #: The largest that is less than the vocabulary.
    largest_k: int
    #: 1 where a row keeps all; None when all do.
    top_p: Part | None


class Draws(NamedTuple):
    """Rows with a temperature."""

    #: Which rows; None for all.
    at: Part | None
    temperatures: Part
    #: Where in the cumulative distribution each draws.
    points: Part
    #: Logarithms of min-p, -inf without; None when no row has one.
    floors: Part | None
    ranking: Ranking | None


class SamplingInputs(NamedTuple):
    """All of a step's sampling."""

    rows: Sequence[SamplingRow]
    #: Multiplicative penalties, additive ones, biases; None where no row has any.
    seen: Edit | None = None
    generated: Edit | None = None
    biased: Edit | None = None
    banned: Part | None = None
    draws: Draws | None = None
    #: Rows that report log-probabilities, and where they are (None: all rows).
    with_logprobs: Sequence[int] = ()
    logprobs_at: Part | None = None
    num_top: int = 0

    @property
    def leaves_logits(self) -> bool:
        """Whether the logits are used as they are."""
        return (
            self.seen is None
            and self.generated is None
            and self.biased is None
            and self.banned is None
        )


def uniform(seed: int, index: int) -> float:
    """The `index`-th number in [0, 1) of the stream `seed`, with 53 random bits.

    SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) as a counter-based generator: one finalizer
    over the seed picks the stream, another over stream + counter the number.
    """
    stream = _mix64(seed & _MASK64)
    bits = _mix64((stream + (index + 1) * 0x9E3779B97F4A7C15) & _MASK64)
    return (bits >> 11) * 2.0**-53


def prepare(rows: Sequence[SamplingRow], vocab_size: int, upload: Upload) -> SamplingInputs:
    """Gather what `sampler.choose` needs for these rows; `upload` is sent by the caller.

    Token ids outside the vocabulary in bias, stop ids or history are ignored.
    """
    if all(row.is_plain for row in rows):
        return SamplingInputs(rows)
    edits = _gather_edits(rows, vocab_size, upload)
    with_logprobs = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
    return SamplingInputs(
        rows,
        *edits,
        draws=_gather_draws(rows, vocab_size, upload),
        with_logprobs=with_logprobs,
        logprobs_at=upload.integers(with_logprobs) if 0 < len(with_logprobs) < len(rows) else None,
        num_top=max((rows[index].params.logprobs or 0 for index in with_logprobs), default=0),
    )


class _Entries:
    """Elements of the flattened logits, and numbers that go with them."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._at: list[int] = []
        self._values: list[float] = []

    def add(self, row: int, tokens: Iterable[int], value: float = 0.0) -> None:
        """Add the tokens of one row that the vocabulary holds."""
        base, size = row * self._vocab_size, self._vocab_size
        new = [base + token for token in tokens if 0 <= token < size]
        self._at += new
        self._values += [value] * len(new)

    def positions(self, upload: Upload) -> Part | None:
        """Where the elements are; None when there are none."""
        return upload.integers(self._at) if self._at else None

    def edit(self, upload: Upload) -> Edit | None:
        """Elements and numbers; None when there are none."""
        at = self.positions(upload)
        return None if at is None else Edit(at, upload.reals(self._values))


def _gather_edits(
    rows: Sequence[SamplingRow], vocab_size: int, upload: Upload
) -> tuple[Edit | None, Edit | None, Edit | None, Part | None]:
    seen, generated, biased, banned = (_Entries(vocab_size) for _ in range(4))
    for index, row in enumerate(rows):
        if row.is_plain:
            continue
        params = row.params
        if params.repetition_penalty != 1.0:
            tokens = set(row.prompt_token_ids).union(row.generated_token_ids)
            seen.add(index, tokens, params.repetition_penalty)
        if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
            counts: dict[int, int] = {}
            for token in row.generated_token_ids:
                counts[token] = counts.get(token, 0) + 1
            for token, count in counts.items():
                penalty = params.presence_penalty + params.frequency_penalty * count
                generated.add(index, (token,), -penalty)
        for token, bias in (params.logit_bias or {}).items():
            biased.add(index, (token,), bias)
        # A grammar's mask knows about `min_tokens`: where it may only end, it ends.
        if row.index < params.min_tokens and row.matcher is None:
            banned.add(index, row.end_token_ids)
    return seen.edit(upload), generated.edit(upload), biased.edit(upload), banned.positions(upload)


def _gather_draws(rows: Sequence[SamplingRow], vocab_size: int, upload: Upload) -> Draws | None:
    at = [index for index, row in enumerate(rows) if row.params.temperature > 0]
    if not at:
        return None
    drawn = [rows[index] for index in at]
    floors = [
        math.log(min(row.params.min_p, 1.0)) if row.params.min_p > 0.0 else -math.inf
        for row in drawn
    ]
    return Draws(
        upload.integers(at) if len(at) < len(rows) else None,
        upload.reals([max(row.params.temperature, _MIN_TEMPERATURE) for row in drawn]),
        upload.reals([uniform(row.seed, row.index) for row in drawn]),
        upload.reals(floors) if max(floors) > -math.inf else None,
        _gather_ranking(drawn, vocab_size, upload),
    )


def _gather_ranking(rows: Sequence[SamplingRow], vocab_size: int, upload: Upload) -> Ranking | None:
    top_k = [
        min(row.params.top_k, vocab_size) if row.params.top_k > 0 else vocab_size for row in rows
    ]
    at = [
        index for index, row in enumerate(rows) if top_k[index] < vocab_size or row.params.top_p < 1
    ]
    if not at:
        return None
    limits = [k for k in top_k if k < vocab_size]
    top_p = [row.params.top_p for row in rows]
    return Ranking(
        upload.integers(at),
        upload.integers(top_k) if limits else None,
        max(limits, default=0),
        upload.reals(top_p) if min(top_p) < 1.0 else None,
    )


def _mix64(value: int) -> int:
    """SplitMix64's finalizer."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


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
    masked = [
        (index, row, row.matcher) for index, row in enumerate(rows) if row.matcher is not None
    ]
    if not masked:
        return None
    num_words = -(-vocab_size // 32)
    pinned = device.type == "cuda"
    # The rows that the masks are for travel in front of them: one transfer.
    packed = torch.zeros(len(masked) * (num_words + 1), dtype=torch.int32, pin_memory=pinned)
    host = packed.numpy()
    host[: len(masked)] = [index for index, _, _ in masked]
    words = host[len(masked) :].reshape(len(masked), num_words)
    for (_, row, matcher), mask in zip(masked, words, strict=True):
        matcher.fill_mask(row.generated_token_ids, mask)
    sent = packed.to(device, non_blocking=True)
    at = None if len(masked) == len(rows) else sent[: len(masked)].to(torch.int64)
    return TokenMasks(at, sent[len(masked) :].view(len(masked), num_words))


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
