"""A draw from each row of logits: temperature, top-k, top-p and min-p without sorting.

One program a row: the other rows of a step have no say in what is drawn. A token weighs
`exp((logit - largest) / temperature)`; each lane sums up its columns in float32, and what the lanes
have is added as integers in units of 2^-40. Top-k asks for the smallest distance from the largest
logit within which there are k tokens, top-p for the one within which there is that share of the
weight. Both are found by pivots: a pass sums up what lies within three distances, a second one
within three that divide the part that holds the answer, a third one keeps the distances of the
part of that, and so on with what was kept until all of it is equal.

The draw itself inverts the cumulative distribution in the order of token ids in two levels:
segments of the row, then the columns of one segment.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2_E = tl.constexpr(1.4426950408889634)
_INF = tl.constexpr(float("inf"))
#: What the largest logit weighs. Up to 2^22 tokens of that weight have a sum below 2^63.
_UNIT = tl.constexpr(float(1 << 40))
#: Distances are at most this; what is farther weighs nothing.
_FARTHEST = tl.constexpr(3.4028234663852886e38)
#: Temperatures at least this high are alike.
_HOTTEST = tl.constexpr(1e30)

#: Columns that a pass reads at once, and how a draw cuts a row: into so many segments, of each of
#: which it reads so many columns at once.
_BLOCK = 4096
_SEGMENTS, _LANES = 64, 128
NUM_WARPS = 16


def tiles(vocab_size: int) -> dict[str, int]:
    """Constants that `draw_tokens` is compiled for, besides the kinds of draws."""
    segment = triton.cdiv(vocab_size, _SEGMENTS * _LANES) * _LANES
    return {
        "VOCAB": vocab_size,
        "BLOCK": _BLOCK,
        "SEGMENTS": _SEGMENTS,
        "SEGMENT": segment,
        "SEGMENT_BLOCK": triton.next_power_of_2(segment),
        "LANES": _LANES,
    }


@triton.jit
def _weigh(distances, scale, COUNT: tl.constexpr):
    """Weights of tokens by their distances from the largest logit, float32."""
    if COUNT:
        return tl.where(distances <= _FARTHEST, 1.0, 0.0)
    return tl.exp2(-distances * scale)


@triton.jit
def _in_units(sums, COUNT: tl.constexpr):
    """Integers of what each lane has summed up."""
    if COUNT:
        return sums.to(tl.int64)
    return (sums * _UNIT).to(tl.int64)


@triton.jit
def _distances(row, columns, largest, VOCAB: tl.constexpr):
    """Distances of a row's logits from the largest; infinite behind its end."""
    return largest - tl.load(row + columns, mask=columns < VOCAB, other=float("-inf"))


@triton.jit
def _add_within(sums, distances, weights, pivots):
    """For three pivots the sums by lane of the weights of what lies within each."""
    within_1, within_2, within_3 = sums
    pivot_1, pivot_2, pivot_3 = pivots
    within_1 += tl.where(distances <= pivot_1, weights, 0.0)
    within_2 += tl.where(distances <= pivot_2, weights, 0.0)
    within_3 += tl.where(distances <= pivot_3, weights, 0.0)
    return within_1, within_2, within_3


@triton.jit
def _keep(kept, kept_state, distances, low, most, BLOCK: tl.constexpr):
    """Store the distances above `low` and up to `most`, behind what each lane has kept so far.

    The state is how many each lane has kept, and the nearest and the farthest of them.
    """
    depths, nearest, farthest = kept_state
    stays = (distances > low) & (distances <= most)
    tl.store(kept + depths * BLOCK + tl.arange(0, BLOCK), distances, mask=stays)
    depths += stays.to(tl.int32)
    nearest = tl.minimum(nearest, tl.where(stays, distances, _INF))
    farthest = tl.maximum(farthest, tl.where(stays, distances, 0.0))
    return depths, nearest, farthest


@triton.jit
def _narrow(sums, pivots, low, below, high, target, COUNT: tl.constexpr):
    """Move `low` and `high` together, given what lies above `low` and within three pivots.

    Less than `target` lies within `low`, namely `below`, and no less within `high`.
    """
    within_1, within_2, within_3 = sums
    pivot_1, pivot_2, pivot_3 = pivots
    sum_1 = below + tl.sum(_in_units(within_1, COUNT), 0)
    sum_2 = below + tl.sum(_in_units(within_2, COUNT), 0)
    sum_3 = below + tl.sum(_in_units(within_3, COUNT), 0)
    high = tl.where(sum_1 >= target, tl.minimum(high, pivot_1), high)
    high = tl.where(sum_2 >= target, tl.minimum(high, pivot_2), high)
    high = tl.where(sum_3 >= target, tl.minimum(high, pivot_3), high)
    low = tl.where(sum_1 < target, tl.maximum(low, pivot_1), low)
    low = tl.where(sum_2 < target, tl.maximum(low, pivot_2), low)
    low = tl.where(sum_3 < target, tl.maximum(low, pivot_3), low)
    below = tl.where(sum_1 < target, tl.maximum(below, sum_1), below)
    below = tl.where(sum_2 < target, tl.maximum(below, sum_2), below)
    below = tl.where(sum_3 < target, tl.maximum(below, sum_3), below)
    return low, below, high


@triton.jit
def _find_bound(
    row,
    kept,
    largest,
    limit,
    scale,
    target,
    share,
    COUNT: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The smallest distance within which there is enough, of what is not beyond `limit`.

    With `COUNT` enough is `target` tokens, or all; else `share` of the weight. `kept` is room for
    the row's columns, rounded up to `BLOCK`: each lane keeps its distances in a column of its own.
    """
    lanes = tl.arange(0, BLOCK)
    nothing = tl.zeros([BLOCK], tl.float32)
    # First pivots by some columns from all over the row; right or not, they only cost time.
    some = _distances(row, lanes * tl.cdiv(VOCAB, BLOCK), largest, VOCAB)
    reach = tl.max(tl.where(some <= limit, some, 0.0), 0)
    end = reach
    if not COUNT:
        # Tokens lighter than (1 - share) / VOCAB weigh less than what is left out.
        light = (1.0 - share).to(tl.float32) / (2.0 * VOCAB)
        end = tl.minimum(reach, -tl.log2(tl.maximum(light, 1e-30)) / scale)
    pivots = (0.25 * end, 0.5 * end, tl.where(end < reach, end, 0.75 * end))
    sums = (nothing, nothing, nothing)
    total = nothing
    farthest = nothing
    for start in range(0, VOCAB, BLOCK):
        distances = _distances(row, start + lanes, largest, VOCAB)
        weights = tl.where(distances <= limit, _weigh(distances, scale, COUNT), 0.0)
        total += weights
        sums = _add_within(sums, distances, weights, pivots)
        farthest = tl.maximum(farthest, tl.where(distances <= limit, distances, 0.0))
    everything = tl.sum(_in_units(total, COUNT), 0)
    if COUNT:
        target = tl.minimum(target, everything)
    else:
        target = tl.ceil(share * everything.to(tl.float64)).to(tl.int64)
        target = tl.minimum(tl.maximum(target, 1), everything)
    # The answer is above `low`, and among what lies from `least` to `most`.
    least = 0.0
    most = tl.max(farthest, 0)
    low = -1.0
    below = everything - everything
    low, below, most = _narrow(sums, pivots, low, below, most, target, COUNT)
    if most > least:
        # Once more over the row: lists of what is left are the longer, the more uneven they are.
        begin = tl.maximum(low, 0.0)
        width = most - begin
        pivots = (begin + 0.25 * width, begin + 0.5 * width, begin + 0.75 * width)
        sums = (nothing, nothing, nothing)
        for start in range(0, VOCAB, BLOCK):
            distances = _distances(row, start + lanes, largest, VOCAB)
            weights = tl.where(distances > low, _weigh(distances, scale, COUNT), 0.0)
            sums = _add_within(sums, distances, weights, pivots)
        low, below, most = _narrow(sums, pivots, low, below, most, target, COUNT)
        depths = tl.zeros([BLOCK], tl.int32)
        nearest = tl.full([BLOCK], _INF, tl.float32)
        farthest = nothing
        for start in range(0, VOCAB, BLOCK):
            distances = _distances(row, start + lanes, largest, VOCAB)
            depths, nearest, farthest = _keep(
                kept, (depths, nearest, farthest), distances, low, most, BLOCK
            )
        least = tl.min(nearest, 0)
        most = tl.max(farthest, 0)
        while least < most:
            tl.debug_barrier()
            # Two pivots cut evenly, the third halves the floats that are left, at any scale.
            last = most.to(tl.int32, bitcast=True) - 1
            middle = (
                least.to(tl.int32, bitcast=True) + (last - least.to(tl.int32, bitcast=True)) // 2
            )
            before = last.to(tl.float32, bitcast=True)
            quarter = tl.minimum(least + 0.25 * (most - least), before)
            half = tl.minimum(least + 0.5 * (most - least), before)
            pivots = (quarter, half, middle.to(tl.float32, bitcast=True))
            deepest = tl.max(depths, 0)
            sums = (nothing, nothing, nothing)
            for depth in range(deepest):
                distances = tl.load(kept + depth * BLOCK + lanes, mask=depth < depths, other=_INF)
                sums = _add_within(sums, distances, _weigh(distances, scale, COUNT), pivots)
            low, below, most = _narrow(sums, pivots, low, below, most, target, COUNT)
            filled = depths
            depths = tl.zeros([BLOCK], tl.int32)
            nearest = tl.full([BLOCK], _INF, tl.float32)
            farthest = nothing
            for depth in range(deepest):
                distances = tl.load(kept + depth * BLOCK + lanes, mask=depth < filled, other=_INF)
                depths, nearest, farthest = _keep(
                    kept, (depths, nearest, farthest), distances, low, most, BLOCK
                )
            least = tl.min(nearest, 0)
            most = tl.max(farthest, 0)
    return most


@triton.jit
def draw_tokens(
    logits,
    values,
    rows,
    temperatures,
    points,
    floors,
    top_k,
    top_p,
    kept,
    tokens,
    HAS_ROWS: tl.constexpr,
    HAS_FLOORS: tl.constexpr,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SEGMENT: tl.constexpr,
    SEGMENT_BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """Program i draws for the i-th row that draws; see `draw`."""
    draw = tl.program_id(0)
    index = tl.load(rows + draw) if HAS_ROWS else draw
    largest = tl.load(values + index)
    if (largest < _INF) & (largest > -_INF):
        row = logits + index.to(tl.int64) * VOCAB
        # So that what is infinitely far weighs nothing.
        temperature = tl.minimum(tl.load(temperatures + draw), _HOTTEST)
        scale = (1.0 / temperature * _LOG2_E).to(tl.float32)
        limit = tl.zeros_like(largest) + _FARTHEST
        own = kept
        if HAS_TOP_K or HAS_TOP_P:
            own = kept + draw.to(tl.int64) * (tl.cdiv(VOCAB, BLOCK) * BLOCK)
        if HAS_TOP_K:
            target = tl.load(top_k + draw)
            if target < VOCAB:
                limit = _find_bound(
                    row, own, largest, limit, scale, target, 0.0, True, VOCAB, BLOCK
                )
                tl.debug_barrier()
        if HAS_TOP_P:
            share = tl.load(top_p + draw)
            if share < 1.0:
                none = share.to(tl.int64)
                limit = _find_bound(
                    row, own, largest, limit, scale, none, share, False, VOCAB, BLOCK
                )
        if HAS_FLOORS:
            floor = (-tl.load(floors + draw) * temperature).to(tl.float32)
            limit = tl.minimum(limit, floor)

        segments = tl.arange(0, SEGMENTS)
        lanes = tl.arange(0, LANES)
        weights = tl.zeros([SEGMENTS, LANES], tl.float32)
        for start in range(0, SEGMENT, LANES):
            columns = segments[:, None] * SEGMENT + (start + lanes)[None, :]
            distances = _distances(row, columns, largest, VOCAB)
            weights += tl.where(distances <= limit, _weigh(distances, scale, False), 0.0)
        of_segments = tl.sum(_in_units(weights, False), 1)
        total = tl.sum(of_segments, 0)
        # The rounding of the product must not reach the total.
        point = (tl.load(points + draw) * total.to(tl.float64)).to(tl.int64)
        point = tl.minimum(point, total - 1)
        segment = tl.sum((tl.cumsum(of_segments, 0) <= point).to(tl.int32), 0)
        point -= tl.sum(tl.where(segments < segment, of_segments, 0), 0)
        inside = tl.arange(0, SEGMENT_BLOCK)
        columns = tl.where(inside < SEGMENT, segment * SEGMENT + inside, VOCAB)
        distances = _distances(row, columns, largest, VOCAB)
        inside_limit = tl.where(distances <= limit, _weigh(distances, scale, False), 0.0)
        in_units = _in_units(inside_limit, False)
        # Segments are rounded in another way than columns: stay below the end.
        point = tl.minimum(point, tl.sum(in_units, 0) - 1)
        ends = tl.cumsum(in_units, 0)
        token = segment * SEGMENT + tl.sum((ends <= point).to(tl.int32), 0)
        tl.store(tokens + index, tl.minimum(token, VOCAB - 1).to(tl.int64))


def draw(
    logits: Tensor,
    values: Tensor,
    tokens: Tensor,
    *,
    rows: Tensor | None,
    temperatures: Tensor,
    points: Tensor,
    floors: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
) -> None:
    """Draw a token for some rows of logits.

    Of tokens as far from the largest logit (in float32) as the last one that top-k or top-p keeps,
    all are kept. A row whose largest logit is not finite keeps the token that it has.

    Args:
        logits: float32 `[n, vocab_size]`, contiguous.
        values: float32 `[n]`, the largest of each row.
        tokens: int64 `[n]`, where the tokens go.
        rows: int64 `[m]`, which rows draw; None: all, and m is n.
        temperatures: float64 `[m]`, above 0.
        points: float64 `[m]` in [0, 1): where in the cumulative distribution each draws.
        floors: float64 `[m]`: logarithms of the least weight that is kept; None: none is needed.
        top_k: int64 `[m]`, at least 1; from vocab_size on it keeps all. None: all keep all.
        top_p: float64 `[m]`, at least 0, of what top-k keeps; from 1 on it keeps all. None: as
            above.
    """
    assert logits.dtype is torch.float32
    assert logits.is_contiguous()
    vocab_size = logits.shape[1]
    count = len(temperatures)
    kept = logits
    if top_k is not None or top_p is not None:
        room = triton.cdiv(vocab_size, _BLOCK) * _BLOCK
        kept = torch.empty((count, room), dtype=torch.float32, device=logits.device)
    draw_tokens[(count,)](
        logits,
        values,
        tokens if rows is None else rows,
        temperatures,
        points,
        temperatures if floors is None else floors,
        tokens if top_k is None else top_k,
        temperatures if top_p is None else top_p,
        kept,
        tokens,
        HAS_ROWS=rows is not None,
        HAS_FLOORS=floors is not None,
        HAS_TOP_K=top_k is not None,
        HAS_TOP_P=top_p is not None,
        **tiles(vocab_size),
        num_warps=NUM_WARPS,
    )
