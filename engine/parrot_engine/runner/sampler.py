"""Sampling: from logits to tokens, for all rows of a step, on the logits' device.

Order of operations, as in transformers' processors and warpers: repetition penalty, presence and
frequency penalties, logit bias, `min_tokens`, grammar -> temperature -> top-k -> top-p -> min-p ->
draw. Temperature 0 takes the largest of the processed logits. Log-probabilities are those of the
raw logits.

A draw inverts the cumulative distribution over the kept tokens, in order of their ids. Its point
depends only on the row's seed and the number of its generated tokens, not on the batch or the order
of draws. Tokens that tie with the last one kept by top-k or top-p are kept too, so the result does
not depend on a sort's order. Triton's kernels use integer weights (`kernels.sampling.draw`),
torch's operators float32: points within rounding of a token's interval may draw its neighbour in
one of them.

There are three parts. `step_inputs.prepare` gathers the inputs on the host. `choose` and `score`
compute on the device without reading anything back. `assemble_tokens` and `assemble_scores` build
the results on the host. `sample` and `prompt_logprobs` do all three in a row, for callers that can
wait.

Independent of stop strings, end of text and contexts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from parrot_engine.batch import SampledToken, SamplingRow
from parrot_engine.kernels.selection import Kernels
from parrot_engine.protocol import TokenLogprobs
from parrot_engine.runner.step_inputs import (
    Draws,
    Ranking,
    SamplingInputs,
    TokenMasks,
    Upload,
    make_masks,
    prepare,
)

#: Columns summed together before a draw looks into one such span.
_DRAW_SPAN = 512


class Scores(NamedTuple):
    """Log-probabilities of one token per row, and of the likeliest ones."""

    #: `[n]`
    chosen: Tensor
    #: `[n, k]`, likeliest first, and their ids.
    top: Tensor
    top_ids: Tensor


class Largest(NamedTuple):
    """The largest logit of each row."""

    #: `[n]`
    values: Tensor
    #: int64 `[n]`: the first column with it, or the first NaN.
    tokens: Tensor
    #: The same tokens, but -1 if the logits were not finite.
    checked: Tensor


class Computed(NamedTuple):
    """A model's output for a step's tokens; valid until the next step is launched."""

    #: `[num_tokens, hidden_size]`, before the final norm.
    hidden: Tensor
    #: `[num_tokens, vocab_size]` in float32, if they were computed with it.
    logits: Tensor | None
    #: Largest of these logits, if it was computed with them.
    largest: Largest | None = None


class StepLogits(NamedTuple):
    """The logits that a step samples from; valid until the next step is launched."""

    #: Float32 `[num_logit_rows, vocab_size]`, in the order of rows and positions.
    values: Tensor
    #: Largest of each of these rows, if already known.
    largest: Largest | None = None


class Choice(NamedTuple):
    """The result of `choose`, on the device."""

    #: int64 `[n]`: always within the vocabulary, so usable in computations.
    tokens: Tensor
    #: The same tokens, but -1 if the logits were not finite.
    checked: Tensor
    #: Scores of the rows that asked for log-probabilities.
    scores: Scores | None


@torch.inference_mode()
def sample(
    logits: Tensor, rows: Sequence[SamplingRow], *, kernels: Kernels = "torch"
) -> list[SampledToken]:
    """Sample one token for each row, and wait for it.

    `logits` is float32 `[len(rows), vocab_size]` and stays unchanged. A row whose logits have a NaN
    or +inf, or (once processed) only -inf, gets token None. Token ids outside the vocabulary in
    bias, stop ids or history are ignored.
    """
    if not rows:
        return []
    if logits.shape[0] != len(rows):
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(rows)} sequences")
    upload = Upload()
    inputs = prepare(rows, logits.shape[1], upload)
    upload.send(logits.device)
    masks = make_masks(rows, logits.shape[1], logits.device)
    choice = choose(logits, inputs, masks, kernels=kernels)
    return assemble_tokens(inputs, choice.checked, choice.scores)


@torch.inference_mode()
def prompt_logprobs(
    logits: Tensor, target_token_ids: Sequence[int], num_top: int
) -> list[TokenLogprobs]:
    """Return log-probabilities of given tokens, one per row of `logits` `[n, vocab_size]`; waits
    for them.

    Row i of `logits` predicts `target_token_ids[i]`. Each comes with the `num_top` likeliest
    tokens.
    """
    if not target_token_ids:
        return []
    targets = torch.tensor(target_token_ids, dtype=torch.int64, device=logits.device)
    return assemble_scores(target_token_ids, score(logits, targets, num_top))


# -- on the device


def choose(
    logits: Tensor,
    inputs: SamplingInputs,
    masks: TokenMasks | None = None,
    *,
    largest: Largest | None = None,
    kernels: Kernels = "torch",
) -> Choice:
    """Choose one token for each row of `logits`, float32 `[n, vocab_size]`, which stay unchanged.

    Never waits for the device. The parts of `inputs` must have been sent there. `largest` belongs
    to `logits` if already known; the result shares no memory with it.
    """
    processed = _process(logits, inputs)
    if masks is not None:
        # Last, so that no bias brings back a forbidden token.
        processed = logits.clone() if processed is logits else processed
        apply_masks(processed, masks)
    if largest is None or processed is not logits:
        values, tokens, checked = _find_largest(processed, logits, largest, kernels)
    else:
        values, tokens, checked = largest.values, largest.tokens.clone(), largest.checked.clone()
    draws = inputs.draws
    if draws is not None:
        if kernels == "triton":
            _draw_by_kernel(processed, values, tokens, draws)
        elif draws.at is None:
            tokens = _draw(processed, values, draws)
        else:
            at = draws.at.tensor
            tokens[at] = _draw(processed[at], values[at], draws)
        checked = tokens.masked_fill(checked < 0, -1)
    scores = None
    if inputs.logprobs_at is not None:
        at = inputs.logprobs_at.tensor
        scores = score(logits[at], tokens[at], inputs.num_top)
    elif inputs.with_logprobs:
        scores = score(logits, tokens, inputs.num_top)
    return Choice(tokens, checked, scores)


def _find_largest(
    processed: Tensor, logits: Tensor, largest: Largest | None, kernels: Kernels
) -> Largest:
    found = _largest_of(processed, kernels)
    if processed is logits:
        return found
    # A bias or penalty must not hide invalid logits.
    wrong = (largest or _largest_of(logits, kernels)).checked < 0
    return found._replace(checked=found.checked.masked_fill(wrong, -1))


def _largest_of(logits: Tensor, kernels: Kernels) -> Largest:
    if kernels == "triton":
        # Imports triton, which is installed only where it is used.
        from parrot_engine.kernels.sampling.logits import find_largest

        count, device = len(logits), logits.device
        found = Largest(
            torch.empty(count, dtype=torch.float32, device=device),
            *torch.empty((2, count), dtype=torch.int64, device=device),
        )
        find_largest(logits, *found)
        return found
    values, tokens = logits.max(dim=-1)
    # NaN wins every maximum, so testing the maximum finds NaN, +inf and all -inf.
    return Largest(values, tokens, tokens.masked_fill(~torch.isfinite(values), -1))


def score(logits: Tensor, targets: Tensor, num_top: int) -> Scores:
    """Return log-probabilities of `targets` `[n]`, and the likeliest tokens, from `logits` `[n,
    vocab]`.
    """
    scores = torch.log_softmax(logits.float(), dim=-1)
    top = scores.topk(min(num_top, scores.shape[1]), dim=-1)
    return Scores(scores.gather(1, targets[:, None])[:, 0], top.values, top.indices)


def _process(logits: Tensor, inputs: SamplingInputs) -> Tensor:
    """Apply penalties, bias and bans to logits; returns the same tensor if nothing applies."""
    if inputs.leaves_logits:
        return logits
    processed = logits.clone()
    flat = processed.view(-1)
    if inputs.seen is not None:
        at, penalty = inputs.seen.at.tensor, inputs.seen.values.tensor.to(flat.dtype)
        values = flat[at]
        flat[at] = torch.where(values > 0, values / penalty, values * penalty)
    for edit in (inputs.generated, inputs.biased):
        if edit is not None:
            flat[edit.at.tensor] += edit.values.tensor.to(flat.dtype)
    if inputs.banned is not None:
        flat.index_fill_(0, inputs.banned.tensor, float("-inf"))
    return processed


def apply_masks(logits: Tensor, masks: TokenMasks) -> None:
    """Set forbidden tokens to minus infinity in place; `logits` is `[n, vocab_size]`."""
    if logits.is_cuda:
        # Imports triton, which is installed only where it is used.
        from parrot_engine.kernels.sampling.logits import apply_token_masks

        apply_token_masks(logits, masks.bits, masks.at)
        return
    allowed = unpack(masks.bits, logits.shape[1])
    if masks.at is None:
        logits.masked_fill_(~allowed, float("-inf"))
    else:
        logits[masks.at] = logits[masks.at].masked_fill_(~allowed, float("-inf"))


def unpack(bits: Tensor, vocab_size: int) -> Tensor:
    """Unpack masks on a CPU to bool `[m, vocab_size]`."""
    octets = bits.numpy().view(np.uint8)
    unpacked = np.unpackbits(octets, axis=1, bitorder="little", count=vocab_size)
    return torch.from_numpy(unpacked.view(np.bool_))


def _draw_by_kernel(processed: Tensor, largest: Tensor, tokens: Tensor, draws: Draws) -> None:
    """Write the tokens of the drawing rows; rows whose `largest` is not finite keep theirs."""
    # Imports triton, as above.
    from parrot_engine.kernels.sampling.draw import draw

    ranking = draws.ranking
    draw(
        processed,
        largest,
        tokens,
        rows=None if draws.at is None else draws.at.tensor,
        temperatures=draws.temperatures.tensor,
        points=draws.points.tensor,
        floors=None if draws.floors is None else draws.floors.tensor,
        top_k=None if ranking is None or ranking.top_k is None else ranking.top_k.tensor,
        top_p=None if ranking is None or ranking.top_p is None else ranking.top_p.tensor,
    )


def _draw(processed: Tensor, largest: Tensor, draws: Draws) -> Tensor:
    """Return one token id per row, `[n]`; rows whose `largest` is not finite get any id."""
    vocab_size = processed.shape[1]
    temperatures = draws.temperatures.tensor.to(processed.dtype)
    # From here on the largest logit is 0: no exponential overflows, and min-p is a plain threshold.
    scores = (processed - largest[:, None]).div_(temperatures[:, None])
    threshold = _thresholds(scores, draws)
    weights = scores.new_zeros((len(scores), -(-vocab_size // _DRAW_SPAN) * _DRAW_SPAN))
    torch.exp(scores, out=weights[:, :vocab_size])
    if threshold is not None:
        weights[:, :vocab_size].masked_fill_(scores < threshold[:, None], 0.0)
    return _invert(weights, draws.points.tensor).clamp_(max=vocab_size - 1)


def _invert(weights: Tensor, points: Tensor) -> Tensor:
    """Return, per row, the first column at which the running sum exceeds the row's point of the
    total.

    `weights` is `[n, columns]`, with columns a multiple of `_DRAW_SPAN`; `points` are in [0, 1). It
    works in two levels, spans and then one span's columns, because a float64 running sum over the
    whole row would be most of a draw's cost.
    """
    spans = weights.view(len(weights), -1, _DRAW_SPAN)
    span_ends = spans.sum(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    total = span_ends[:, -1]
    # The rounded point must stay below the total, so that a span beyond it exists.
    point = torch.minimum(points * total, total.nextafter(torch.zeros_like(total)))[:, None]
    span = torch.searchsorted(span_ends, point, right=True).clamp_(max=spans.shape[1] - 1)
    inside = spans.gather(1, span[:, :, None].expand(-1, -1, _DRAW_SPAN))[:, 0]
    ends = inside.cumsum(dim=-1, dtype=torch.float64)
    before = span_ends.gather(1, span) - ends[:, -1:]
    # The two levels round differently: stay below the end of the span.
    rest = torch.minimum(point - before, ends[:, -1:].nextafter(torch.zeros_like(point)))
    column = torch.searchsorted(ends, rest.clamp_(min=0.0), right=True)
    return (span * _DRAW_SPAN + column)[:, 0]


def _thresholds(scores: Tensor, draws: Draws) -> Tensor | None:
    """Return the smallest kept score of each row, `[n]`; None if every row keeps all.

    `scores` are logits over temperature, with a row's largest at 0.
    """
    if draws.floors is None and draws.ranking is None:
        return None
    if draws.floors is not None:
        threshold = draws.floors.tensor.to(scores.dtype)
    else:
        threshold = scores.new_full((len(scores),), -torch.inf)
    if draws.ranking is not None:
        at = draws.ranking.at.tensor
        cut = _ranked_thresholds(scores[at], draws.ranking)
        threshold[at] = torch.maximum(threshold[at], cut)
    return threshold


def _ranked_thresholds(scores: Tensor, ranking: Ranking) -> Tensor:
    """Return thresholds of top-k, then of top-p over the tokens it kept; the likeliest token always
    stays.
    """
    vocab_size = scores.shape[1]
    floor = scores.new_full((len(scores), 1), -torch.inf)
    at = ranking.at.tensor
    if ranking.top_k is not None:
        k = ranking.top_k.tensor[at, None]
        largest = scores.topk(ranking.largest_k, dim=-1).values
        last = largest.gather(1, k.clamp(max=ranking.largest_k) - 1)
        floor = torch.where(k < vocab_size, last, floor)
    if ranking.top_p is None:
        return floor[:, 0]
    p = ranking.top_p.tensor[at, None]
    total = scores.exp().masked_fill_(scores < floor, 0.0).sum(-1, True, dtype=torch.float64)
    # Tokens lighter than (1 - p) total / V weigh less together than the part outside the nucleus,
    # so they are outside it and need no sorting. The half is a margin for rounding.
    negligible = (0.5 * (1.0 - p) * total / vocab_size).log().to(scores.dtype)
    ranked = _descending(scores, torch.maximum(floor, negligible))
    weights = ranked.exp().double()
    nucleus = (weights.cumsum(dim=-1) - weights < p * total) & (weights > 0)
    count = nucleus.sum(dim=-1, keepdim=True).clamp_(min=1)
    return torch.where(p < 1.0, ranked.gather(1, count - 1), floor)[:, 0]


def _descending(scores: Tensor, floor: Tensor) -> Tensor:
    """Return each row's scores from `floor` `[n, 1]` up, largest first, then lower ones or -inf."""
    if scores.device.type != "cpu":
        return scores.sort(dim=-1, descending=True).values
    # numpy sorts with SIMD: 30 times faster than torch 2.13 for rows of 4,096 on one thread.
    negated = [
        np.sort(-row[row >= low]) for row, low in zip(scores.numpy(), floor.numpy(), strict=True)
    ]
    ranked = np.full((len(negated), max(1, *map(len, negated))), np.inf, dtype=np.float32)
    for row, values in zip(ranked, negated, strict=True):
        row[: len(values)] = values
    return torch.from_numpy(ranked).neg_()


# -- back on the host


def assemble_tokens(
    inputs: SamplingInputs, checked: Tensor, scores: Scores | None
) -> list[SampledToken]:
    """Build the result of `choose` once `Choice.checked` and its scores are on the host."""
    chosen = [token if token >= 0 else None for token in checked.tolist()]
    if scores is None:
        return [SampledToken(token, None) for token in chosen]
    logprobs: dict[int, TokenLogprobs] = {}
    entries = assemble_scores([chosen[index] or 0 for index in inputs.with_logprobs], scores)
    for index, entry in zip(inputs.with_logprobs, entries, strict=True):
        if chosen[index] is not None:
            count = inputs.rows[index].params.logprobs or 0
            logprobs[index] = TokenLogprobs(entry.token_id, entry.logprob, entry.top[:count])
    return [SampledToken(token, logprobs.get(index)) for index, token in enumerate(chosen)]


def assemble_scores(target_token_ids: Sequence[int], scores: Scores) -> list[TokenLogprobs]:
    """Build the result of `score` once it is on the host."""
    return [
        TokenLogprobs(token, value, list(zip(ids, values, strict=True)))
        for token, value, values, ids in zip(
            target_token_ids,
            scores.chosen.tolist(),
            scores.top.tolist(),
            scores.top_ids.tolist(),
            strict=True,
        )
    ]
