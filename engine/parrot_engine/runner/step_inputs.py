"""Inputs of a step from the host: tokens, sampling parameters and histories, grammar masks.

Everything except the masks is added to one `Upload`, so that a single transfer carries it without
the host waiting. Masks are computed on the host while the device computes the step. They are packed
to one bit per token, sent in one transfer, and unpacked next to the logits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import add
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from parrot_engine.batch import BatchRow, BatchRows, SamplingRow, ScoringRow, StepBatch
from parrot_engine.protocol import SamplingParams

Ints = npt.NDArray[np.int32]

_MASK64 = (1 << 64) - 1
#: Lower temperatures could only overflow: the largest logit wins anyway.
_MIN_TEMPERATURE = 1e-6


class Part:
    """One array of an upload."""

    __slots__ = ("_tensor", "array", "is_real")

    def __init__(self, array: npt.NDArray[np.int64], is_real: bool) -> None:
        self.array = array
        self.is_real = is_real
        self._tensor: Tensor | None = None

    @property
    def tensor(self) -> Tensor:
        """Return the array on the device, int64 or float64; valid once it was sent."""
        assert self._tensor is not None, "not sent yet"
        return self._tensor

    def take(self, sent: Tensor) -> None:
        self._tensor = sent.view(torch.float64) if self.is_real else sent


class Upload:
    """Collects arrays of 64-bit numbers, then sends all of them at once.

    On CUDA the transfer goes through pinned memory and is ordered on the current stream; the host
    continues at once. (`torch.tensor(values, device=...)` would wait for the stream.)
    """

    def __init__(self) -> None:
        self._parts: list[Part] = []

    def integers(self, values: Sequence[int]) -> Part:
        return self._add(Part(np.array(values, dtype=np.int64), is_real=False))

    def array(self, values: npt.NDArray[np.integer[Any]]) -> Part:
        return self._add(Part(values.astype(np.int64), is_real=False))

    def reals(self, values: Sequence[float] | npt.NDArray[np.float64]) -> Part:
        return self._add(Part(np.array(values, dtype=np.float64).view(np.int64), is_real=True))

    def _add(self, part: Part) -> Part:
        self._parts.append(part)
        return part

    def send(self, device: torch.device) -> None:
        """Start the transfer. Does nothing if there is nothing to send."""
        if not self._parts:
            return
        sizes = [part.array.size for part in self._parts]
        packed = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
        np.concatenate([part.array for part in self._parts], out=packed.numpy())
        for part, sent in zip(
            self._parts, packed.to(device, non_blocking=True).split(sizes), strict=True
        ):
            part.take(sent)


class StepTokens(NamedTuple):
    """The tokens that the rows of a batch compute, row after row."""

    token_ids: Ints
    positions: Ints
    #: Tokens known only to the device, and the rows of the previous step that sampled them.
    pending_at: Ints
    pending_rows: Ints
    #: Tokens whose logits are needed; None for all.
    logit_tokens: Ints | None


def gather_tokens(rows: Sequence[BatchRow]) -> StepTokens:
    """Gather the tokens of at least one row."""
    columns = BatchRows.of(rows)
    needs = columns.logits
    starts = np.array(columns.starts, dtype=np.int32)
    token_ids = np.array(list(chain.from_iterable(columns.token_ids)), dtype=np.int32)
    pending = [(index, row) for index, row in enumerate(columns.pending) if row is not None]
    if len(rows) == len(token_ids):
        at, waiting = zip(*pending, strict=True) if pending else ((), ())
        if "none" not in needs:
            return _tokens(token_ids, starts, at, waiting, None)
        logit_tokens = [index for index, need in enumerate(needs) if need != "none"]
        return _tokens(token_ids, starts, at, waiting, logit_tokens)
    counts = list(map(len, columns.token_ids))
    ends = np.cumsum(counts)
    first_tokens = (ends - counts).astype(np.int32)
    positions = np.repeat(starts - first_tokens, counts)
    positions += np.arange(len(positions), dtype=np.int32)
    logit_tokens = []
    for need, first, end in zip(needs, first_tokens.tolist(), ends.tolist(), strict=True):
        if need == "last":
            logit_tokens.append(end - 1)
        elif need == "all":
            logit_tokens.extend(range(first, end))
    at = tuple(int(first_tokens[index]) for index, _ in pending)
    return _tokens(token_ids, positions, at, tuple(row for _, row in pending), logit_tokens)


def _tokens(
    token_ids: Ints,
    positions: Ints,
    at: Sequence[int],
    waiting: Sequence[int],
    logit_tokens: Sequence[int] | None,
) -> StepTokens:
    return StepTokens(
        token_ids,
        positions,
        np.array(at, dtype=np.int32),
        np.array(waiting, dtype=np.int32),
        None
        if logit_tokens is None or len(logit_tokens) == len(token_ids)
        else np.array(logit_tokens, dtype=np.int32),
    )


class Edit(NamedTuple):
    """Elements of the flattened logits, with a number for each."""

    at: Part
    values: Part


class Ranking(NamedTuple):
    """Top-k and top-p of the drawing rows, present if any row has one."""

    #: The drawing rows that have either.
    at: Part
    #: The vocabulary's size for rows that keep all; None if all do.
    top_k: Part | None
    #: The largest top-k below the vocabulary's size.
    largest_k: int
    #: 1 for rows that keep all; None if all do.
    top_p: Part | None


class Draws(NamedTuple):
    """Rows with a temperature."""

    #: The rows; None for all.
    at: Part | None
    temperatures: Part
    #: Each row's place in the cumulative distribution.
    points: Part
    #: Logarithms of min-p, -inf without it; None if no row has one.
    floors: Part | None
    ranking: Ranking | None


class SamplingInputs(NamedTuple):
    """All sampling inputs of a step."""

    rows: Sequence[SamplingRow]
    #: Multiplicative penalties, additive ones, biases; None if no row has any.
    seen: Edit | None = None
    generated: Edit | None = None
    biased: Edit | None = None
    banned: Part | None = None
    draws: Draws | None = None
    #: Rows that report log-probabilities, and their places (None: all rows).
    with_logprobs: Sequence[int] = ()
    logprobs_at: Part | None = None
    num_top: int = 0

    @property
    def leaves_logits(self) -> bool:
        """Return true if the logits are used unchanged."""
        return (
            self.seen is None
            and self.generated is None
            and self.biased is None
            and self.banned is None
        )


def uniforms(seeds: Sequence[int], indices: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return, for each i, number `indices[i]` of the stream `seeds[i]`: in [0, 1), with 53 random
    bits.

    SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) as a counter-based generator: a finalizer over the
    seed picks the stream, another over stream + counter the number.
    """
    streams = _mix64(np.array([seed & _MASK64 for seed in seeds], dtype=np.uint64))
    counters = np.array(indices, dtype=np.uint64) + np.uint64(1)
    bits = _mix64(streams + counters * np.uint64(0x9E3779B97F4A7C15))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def prepare(
    rows: Sequence[SamplingRow], vocab_size: int, upload: Upload, ahead: Sequence[int] | None = None
) -> SamplingInputs:
    """Gather the inputs of `sampler.choose` for these rows; the caller sends `upload`.

    `ahead` has, by row, the number of draft tokens before the token to draw. Token ids outside the
    vocabulary in bias, stop ids or history are ignored.
    """
    if all(row.is_plain for row in rows):
        return SamplingInputs(rows)
    indices = [len(row.generated_token_ids) + row.num_pending for row in rows]
    if ahead is not None:
        indices = list(map(add, indices, ahead))
    edits = _gather_edits(rows, indices, vocab_size, upload)
    with_logprobs = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
    return SamplingInputs(
        rows,
        *edits,
        draws=_gather_draws(rows, indices, vocab_size, upload),
        with_logprobs=with_logprobs,
        logprobs_at=upload.integers(with_logprobs) if 0 < len(with_logprobs) < len(rows) else None,
        num_top=max((rows[index].params.logprobs or 0 for index in with_logprobs), default=0),
    )


class _Entries:
    """Elements of the flattened logits, and the numbers for them."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._at: list[int] = []
        self._values: list[float] = []

    def add(self, row: int, tokens: Iterable[int], value: float = 0.0) -> None:
        """Add those tokens of one row that are in the vocabulary."""
        base, size = row * self._vocab_size, self._vocab_size
        new = [base + token for token in tokens if 0 <= token < size]
        self._at += new
        self._values += [value] * len(new)

    def positions(self, upload: Upload) -> Part | None:
        """Return the elements' positions; None if there are none."""
        return upload.integers(self._at) if self._at else None

    def edit(self, upload: Upload) -> Edit | None:
        """Return elements and numbers; None if there are none."""
        at = self.positions(upload)
        return None if at is None else Edit(at, upload.reals(self._values))


def _gather_edits(
    rows: Sequence[SamplingRow], indices: Sequence[int], vocab_size: int, upload: Upload
) -> tuple[Edit | None, Edit | None, Edit | None, Part | None]:
    seen, generated, biased, banned = (_Entries(vocab_size) for _ in range(4))
    for index, (row, token_index) in enumerate(zip(rows, indices, strict=True)):
        if not row.edits_logits:
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
        # A grammar's mask handles `min_tokens`: where it may only end, it ends.
        if token_index < params.min_tokens and row.matcher is None:
            banned.add(index, row.end_token_ids)
    return seen.edit(upload), generated.edit(upload), biased.edit(upload), banned.positions(upload)


def _gather_draws(
    rows: Sequence[SamplingRow], indices: Sequence[int], vocab_size: int, upload: Upload
) -> Draws | None:
    at = [index for index, row in enumerate(rows) if row.params.temperature > 0]
    if not at:
        return None
    drawn = list(rows) if len(at) == len(rows) else [rows[index] for index in at]
    params = [row.params for row in drawn]
    min_p = [each.min_p for each in params]
    floors = None
    if max(min_p) > 0.0:
        floors = upload.reals([math.log(min(p, 1.0)) if p > 0.0 else -math.inf for p in min_p])
    points = uniforms(
        [row.seed for row in drawn],
        list(indices) if len(at) == len(rows) else [indices[index] for index in at],
    )
    return Draws(
        upload.integers(at) if len(at) < len(rows) else None,
        upload.reals([max(each.temperature, _MIN_TEMPERATURE) for each in params]),
        upload.reals(points),
        floors,
        _gather_ranking(params, vocab_size, upload),
    )


def _gather_ranking(
    params: Sequence[SamplingParams], vocab_size: int, upload: Upload
) -> Ranking | None:
    top_k = [each.top_k if 0 < each.top_k < vocab_size else vocab_size for each in params]
    top_p = [each.top_p for each in params]
    at = [
        index
        for index, (k, p) in enumerate(zip(top_k, top_p, strict=True))
        if k < vocab_size or p < 1.0
    ]
    if not at:
        return None
    limits = [k for k in top_k if k < vocab_size]
    return Ranking(
        upload.integers(at),
        upload.integers(top_k) if limits else None,
        max(limits, default=0),
        upload.reals(top_p) if min(top_p) < 1.0 else None,
    )


def _mix64(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply SplitMix64's finalizer, modulo 2**64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class TokenMasks(NamedTuple):
    """The allowed tokens of the rows with a grammar."""

    #: int64 `[m]`: the rows of the logits; None for all.
    at: Tensor | None
    #: int32 `[m, ceil(vocab_size / 32)]`: bit i of a row is token i.
    bits: Tensor


def make_masks(
    rows: Sequence[SamplingRow], vocab_size: int, device: torch.device
) -> TokenMasks | None:
    """Make the masks of rows with a matcher and send them to the device; None if there are none."""
    masked = [
        (index, row, row.matcher) for index, row in enumerate(rows) if row.matcher is not None
    ]
    if not masked:
        return None
    num_words = -(-vocab_size // 32)
    pinned = device.type == "cuda"
    # The masks' row numbers travel in front of them, in one transfer.
    packed = torch.zeros(len(masked) * (num_words + 1), dtype=torch.int32, pin_memory=pinned)
    host = packed.numpy()
    host[: len(masked)] = [index for index, _, _ in masked]
    words = host[len(masked) :].reshape(len(masked), num_words)
    for (_, row, matcher), mask in zip(masked, words, strict=True):
        matcher.fill_mask(row.generated_token_ids, mask)
    sent = packed.to(device, non_blocking=True)
    at = None if len(masked) == len(rows) else sent[: len(masked)].to(torch.int64)
    return TokenMasks(at, sent[len(masked) :].view(len(masked), num_words))


class _Scored(NamedTuple):
    row: int
    scoring: ScoringRow
    #: The row's first row of logits.
    first: int
    targets: Part


class StepInputs:
    """The logits of a step that are sampled from and scored."""

    def __init__(self, batch: StepBatch, vocab_size: int, upload: Upload) -> None:
        """Gather the inputs of `InFlightStep`; the caller sends `upload`."""
        self.num_rows = len(batch.rows)
        #: Rows of the batch that sample, in order; those with draft tokens appear once per token.
        self.sampled: list[int] = []
        self.has_drafts = False
        self.scored: list[_Scored] = []
        self.sampling: SamplingInputs
        #: Places of the sampled rows' logits; None: they are all logits.
        self.at: Part | None = None
        #: Targets of their tokens; None: every row samples, once.
        self.rows: Part | None = None
        sampled = [row for row in batch.sampling if row is not None]
        if len(sampled) == self.num_rows and set(BatchRows.of(batch.rows).logits) == {"last"}:
            self.sampled = list(range(self.num_rows))
            self.sampling = prepare(sampled, vocab_size, upload)
            return
        at: list[int] = []
        num_logits = 0
        sampling = batch.sampling or [None] * self.num_rows
        scoring = batch.scoring or [None] * self.num_rows
        rows, places = list[SamplingRow](), list[int]()
        for index, (row, draw, scores) in enumerate(
            zip(batch.rows, sampling, scoring, strict=True)
        ):
            if scores is not None and scores.target_token_ids:
                targets = upload.integers(scores.target_token_ids)
                self.scored.append(_Scored(index, scores, num_logits, targets))
            num_logits += _num_logits(row)
            if draw is not None:
                self.has_drafts |= row.num_drafts > 0
                for ahead in range(row.num_drafts + 1):
                    self.sampled.append(index)
                    at.append(num_logits - 1 - row.num_drafts + ahead)
                    rows.append(draw)
                    places.append(ahead)
        self.sampling = prepare(rows, vocab_size, upload, places)
        if len(at) < num_logits:
            self.at = upload.integers(at)
        if self.sampled != list(range(self.num_rows)):
            self.rows = upload.integers(self.sampled)


def _num_logits(row: BatchRow) -> int:
    """Return the number of logit rows that a row of the batch yields."""
    if row.logits == "all":
        return len(row.token_ids)
    return 1 if row.logits == "last" else 0
