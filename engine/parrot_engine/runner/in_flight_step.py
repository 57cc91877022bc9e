"""A step on the device: the arrays that go into the model, and from its logits to the outcome.

Sampling and scoring run on the device; logits never leave it. What the host gets are token ids, one
number each, and log-probabilities where they were asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from parrot_engine.batch import BatchRow, RowOutcome, SampledToken, ScoringRow, StepBatch
from parrot_engine.kernels.selection import Kernels
from parrot_engine.protocol import TokenLogprobs
from parrot_engine.runner.sampler import (
    Largest,
    Scores,
    assemble_scores,
    assemble_tokens,
    choose,
    score,
)
from parrot_engine.runner.sampling_inputs import SamplingInputs, make_masks, prepare
from parrot_engine.runner.transfers import Download, Part, Upload, current_device

Ints = npt.NDArray[np.int32]


class StepTokens(NamedTuple):
    """What the rows of a batch compute, row after row."""

    token_ids: Ints
    positions: Ints
    #: Tokens known only to the device, and the rows of the step before that sampled them.
    pending_at: Ints
    pending_rows: Ints
    #: Tokens whose logits are needed; None for all.
    logit_tokens: Ints | None


class Computed(NamedTuple):
    """What a model makes of a step's tokens; valid until the next step is launched."""

    #: `[num_tokens, hidden_size]`, before the final norm.
    hidden: Tensor
    #: `[num_tokens, vocab_size]` in float32, where they were computed along with it.
    logits: Tensor | None
    #: Of these logits, where it was looked for along with them.
    largest: Largest | None = None


class StepLogits(NamedTuple):
    """What a step's tokens are chosen from; valid until the next step is launched."""

    #: Float32 `[num_logit_rows, vocab_size]`, in the order of rows and positions.
    values: Tensor
    #: Of each of these rows, where it is known already.
    largest: Largest | None = None


def gather_tokens(rows: Sequence[BatchRow]) -> StepTokens:
    """The tokens of at least one row."""
    lists, firsts, _, needs, waits, _ = zip(*rows, strict=True)
    counts = list(map(len, lists))
    starts = np.array(firsts, dtype=np.int32)
    token_ids = np.array(list(chain.from_iterable(lists)), dtype=np.int32)
    pending: list[tuple[int, int]] = []
    if waits.count(None) < len(rows):
        pending = [(index, row) for index, row in enumerate(waits) if row is not None]
    if len(rows) == len(token_ids):
        at, waiting = zip(*pending, strict=True) if pending else ((), ())
        if "none" not in needs:
            return _tokens(token_ids, starts, at, waiting, None)
        logit_tokens = [index for index, need in enumerate(needs) if need != "none"]
        return _tokens(token_ids, starts, at, waiting, logit_tokens)
    ends = np.cumsum(counts)
    first_tokens = (ends - counts).astype(np.int32)
    positions = np.repeat(starts - first_tokens, counts)
    positions += np.arange(len(positions), dtype=np.int32)
    logit_tokens = []
    for row, first, end in zip(rows, first_tokens.tolist(), ends.tolist(), strict=True):
        if row.logits == "last":
            logit_tokens.append(end - 1)
        elif row.logits == "all":
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


class _Scored(NamedTuple):
    """A row that scores its tokens."""

    row: int
    scoring: ScoringRow
    #: The row's first row of logits.
    first: int
    targets: Part


class StepInputs:
    """Which logits of a step are sampled from and scored."""

    def __init__(self, batch: StepBatch, vocab_size: int, upload: Upload) -> None:
        """Gather what `InFlightStep` needs; `upload` is sent by the caller."""
        self.num_rows = len(batch.rows)
        #: Rows of the batch that sample, in order; those with draft tokens once for each token.
        self.sampled: list[int] = []
        self.scored: list[_Scored] = []
        self.sampling: SamplingInputs
        #: Where the sampled rows' logits are; None: they are all there is.
        self.at: Part | None = None
        #: Where their tokens go; None: every row samples, once.
        self.rows: Part | None = None
        sampled = [row for row in batch.sampling if row is not None]
        if len(sampled) == self.num_rows and {row.logits for row in batch.rows} == {"last"}:
            self.sampled = list(range(self.num_rows))
            self.sampling = prepare(sampled, vocab_size, upload)
            return
        at: list[int] = []
        num_logits = 0
        sampling = batch.sampling or [None] * self.num_rows
        scoring = batch.scoring or [None] * self.num_rows
        rows = []
        for index, (row, draw, scores) in enumerate(
            zip(batch.rows, sampling, scoring, strict=True)
        ):
            if scores is not None and scores.target_token_ids:
                targets = upload.integers(scores.target_token_ids)
                self.scored.append(_Scored(index, scores, num_logits, targets))
            num_logits += _num_logits(row)
            if draw is not None:
                for ahead in range(row.num_drafts + 1):
                    self.sampled.append(index)
                    at.append(num_logits - 1 - row.num_drafts + ahead)
                    rows.append(draw.ahead(ahead))
        self.sampling = prepare(rows, vocab_size, upload)
        if len(at) < num_logits:
            self.at = upload.integers(at)
        if self.sampled != list(range(self.num_rows)):
            self.rows = upload.integers(self.sampled)


class InFlightStep:
    """A step on its way; implements `parrot_engine.batch.Launch`."""

    def __init__(
        self, batch: StepBatch, computed: StepLogits, device: torch.device, kernels: Kernels
    ) -> None:
        """Take a step whose logits are being computed, and sample unless it `awaits_tokens`."""
        self._batch = batch
        self._computed: StepLogits | None = computed
        self._device = device
        self._kernels = kernels
        self._inputs: StepInputs
        #: int64 `[num_rows]`: the token sampled for each row of the batch, 0 for the others; on
        #: the device. Within the vocabulary even if the row's logits were not finite; any of a
        #: row's for one with draft tokens. None before it was drawn.
        self.sampled: Tensor | None = None
        self._has_scores = False
        self._download: Download
        if not batch.awaits_tokens:
            self.sample()

    @torch.inference_mode()
    def sample(self) -> None:
        """Sample and score on the device, and start the copies to the host.

        All of the host's work for it, masks of grammars too, is done here, while the device
        computes the logits.
        """
        assert self._computed is not None, "sampled already"
        (logits, largest), self._computed = self._computed, None
        upload = Upload()
        inputs = self._inputs = StepInputs(self._batch, logits.shape[1], upload)
        with current_device(self._device):
            upload.send(self._device)
            self._sample(inputs, logits, largest)

    def _sample(self, inputs: StepInputs, logits: Tensor, largest: Largest | None) -> None:
        device, kernels = self._device, self._kernels
        tensors: list[Tensor] = []
        if inputs.sampled:
            masks = make_masks(inputs.sampling.rows, logits.shape[1], device)
            if inputs.at is None:
                choice = choose(logits, inputs.sampling, masks, largest=largest, kernels=kernels)
            else:
                choice = choose(logits[inputs.at.tensor], inputs.sampling, masks, kernels=kernels)
            tensors.append(choice.checked)
            if choice.scores is not None:
                self._has_scores = True
                tensors += choice.scores
        for _, scoring, first, targets in inputs.scored:
            part = logits[first : first + len(scoring.target_token_ids)]
            tensors += score(part, targets.tensor, scoring.num_top)
        if inputs.sampled and inputs.rows is None:
            self.sampled = choice.tokens
        else:
            self.sampled = torch.zeros(inputs.num_rows, dtype=torch.int64, device=device)
            if inputs.sampled and inputs.rows is not None:
                self.sampled[inputs.rows.tensor] = choice.tokens
        self._download = Download(tensors, device)

    def ready(self) -> bool:
        """Whether `outcome` would return at once."""
        return self._download.ready()

    def outcome(self) -> list[RowOutcome]:
        """Wait for the step, and for nothing launched after it; see `Launch`."""
        parts = iter(self._download.wait())
        inputs = self._inputs
        sampled: list[SampledToken] = []
        if inputs.sampled:
            checked = next(parts)
            scores = Scores(next(parts), next(parts), next(parts)) if self._has_scores else None
            sampled = assemble_tokens(inputs.sampling, checked, scores)
        if inputs.rows is None and not inputs.scored:
            return list(map(RowOutcome, sampled))
        tokens: dict[int, list[SampledToken]] = {}
        for row, token in zip(inputs.sampled, sampled, strict=True):
            tokens.setdefault(row, []).append(token)
        scored: dict[int, list[TokenLogprobs]] = {}
        for row, scoring, _, _ in inputs.scored:
            found = Scores(next(parts), next(parts), next(parts))
            scored[row] = assemble_scores(scoring.target_token_ids, found)
        return [
            _outcome(tokens.get(index, ()), scored.get(index, ()))
            for index in range(inputs.num_rows)
        ]


def _outcome(tokens: Sequence[SampledToken], scores: Sequence[TokenLogprobs]) -> RowOutcome:
    first = tokens[0] if tokens else None
    return RowOutcome(first, scores, _is_sound(scores), tokens[1:])


def _is_sound(scores: Sequence[TokenLogprobs]) -> bool:
    return not any(entry.logprob != entry.logprob for entry in scores)


def _num_logits(row: BatchRow) -> int:
    """Rows of logits that a row of the batch yields."""
    if row.logits == "all":
        return len(row.token_ids)
    return 1 if row.logits == "last" else 0
