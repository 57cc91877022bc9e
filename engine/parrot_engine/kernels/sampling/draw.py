"""Samples from each row of logits: temperature, top-k, top-p and min-p without sorting.

There is one program per row, so other rows of a step do not affect a draw. A token weighs
`exp((logit - largest) / temperature)`. Each lane sums its columns in float32; the lanes' sums are
added as integers in units of 2^-40. Top-k needs the smallest distance from the largest logit within
which there are k tokens, top-p the one within which there is that share of the weight. Both are
found with pivots. A first pass sums within three distances, a second one within three that divide
the interval with the answer. A third one keeps the distances of the remaining interval, and further
ones narrow these until all are equal.

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
#: Weight of the largest logit. The sum of up to 2^22 tokens of that weight is below 2^63.
_UNIT = tl.constexpr(float(1 << 40))
#: Largest distance with a weight; anything farther weighs nothing.
_FARTHEST = tl.constexpr(3.4028234663852886e38)
#: All temperatures from here on act alike.
_HOTTEST = tl.constexpr(1e30)

#: Columns per pass; and the split of a row for a draw: its segments, and the columns of a segment
#: read at once.
_BLOCK = 4096
_SEGMENTS, _LANES = 64, 128
NUM_WARPS = 16


def tiles(vocab_size: int) -> dict[str, int]:
    """Return the constants of `draw_tokens`, except the kinds of draws."""
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
    """Return the weights of tokens by their distances from the largest logit, float32."""
    if COUNT:
        return tl.where(distances <= _FARTHEST, 1.0, 0.0)
    return tl.exp2(-distances * scale)


@triton.jit
def _in_units(sums, COUNT: tl.constexpr):
    """Convert each lane's sum to integer units."""
    if COUNT:
        return sums.to(tl.int64)
    return (sums * _UNIT).to(tl.int64)


@triton.jit
def _distances(row, columns, largest, VOCAB: tl.constexpr):
    """Return the distances of a row's logits from the largest; infinite beyond its end."""
    return largest - tl.load(row + columns, mask=columns < VOCAB, other=float("-inf"))


@triton.jit
def _add_within(sums, distances, weights, pivots):
    """Add, per lane, the weights within each of three pivots."""
    within_1, within_2, within_3 = sums
    pivot_1, pivot_2, pivot_3 = pivots
    within_1 += tl.where(distances <= pivot_1, weights, 0.0)
    within_2 += tl.where(distances <= pivot_2, weights, 0.0)
    within_3 += tl.where(distances <= pivot_3, weights, 0.0)
    return within_1, within_2, within_3


@triton.jit
def _keep(kept, kept_state, distances, low, most, BLOCK: tl.constexpr):
    """Store the distances above `low` and up to `most` behind those each lane has kept.

    The state has each lane's count of kept distances, and the nearest and farthest of them.
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
    """Move `low` and `high` closer, given the sums above `low` and within three pivots.

    The sum within `low` is `below`, which is less than `target`; the sum within `high` is not less.
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
    """Return the smallest distance that contains enough, without exceeding `limit`.

    With `COUNT` enough is `target` tokens, or all; otherwise `share` of the weight. `kept` has room
    for the row's columns, rounded up to `BLOCK`: each lane keeps its distances in a column of its
    own.
    """
    lanes = tl.arange(0, BLOCK)
    nothing = tl.zeros([BLOCK], tl.float32)
    # The first pivots come from columns spread over the row; bad pivots only cost time.
    some = _distances(row, lanes * tl.cdiv(VOCAB, BLOCK), largest, VOCAB)
    reach = tl.max(tl.where(some <= limit, some, 0.0), 0)
    end = reach
    if not COUNT:
        # Tokens lighter than (1 - share) / VOCAB weigh less in total than the excluded share.
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
    # The answer is above `low`, and within `least` to `most`.
    least = 0.0
    most = tl.max(farthest, 0)
    low = -1.0
    below = everything - everything
    low, below, most = _narrow(sums, pivots, low, below, most, target, COUNT)
    if most > least:
        # One more pass over the row: the kept lists are longer the more uneven they are.
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
            # Two pivots divide evenly; the third halves the remaining floats at any scale.
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
    """Draw for the i-th drawing row in program i; see `draw`."""
    draw = tl.program_id(0)
    index = tl.load(rows + draw) if HAS_ROWS else draw
    largest = tl.load(values + index)
    if (largest < _INF) & (largest > -_INF):
        row = logits + index.to(tl.int64) * VOCAB
        # A bounded temperature, so that infinitely distant tokens weigh nothing.
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
        # The rounded product must stay below the total.
        point = (tl.load(points + draw) * total.to(tl.float64)).to(tl.int64)
        point = tl.minimum(point, total - 1)
        segment = tl.sum((tl.cumsum(of_segments, 0) <= point).to(tl.int32), 0)
        point -= tl.sum(tl.where(segments < segment, of_segments, 0), 0)
        inside = tl.arange(0, SEGMENT_BLOCK)
        columns = tl.where(inside < SEGMENT, segment * SEGMENT + inside, VOCAB)
        distances = _distances(row, columns, largest, VOCAB)
        inside_limit = tl.where(distances <= limit, _weigh(distances, scale, False), 0.0)
        in_units = _in_units(inside_limit, False)
        # Segments are rounded differently from columns: stay below the end.
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
    """Sample a token for some rows of logits.

    Tokens at the same distance (in float32) as the last one kept by top-k or top-p are all kept. A
    row whose largest logit is not finite keeps its current token.

    Args:
        logits: float32 `[n, vocab_size]`, contiguous.
        values: float32 `[n]`, largest logit of each row.
        tokens: int64 `[n]`, receives the tokens.
        rows: int64 `[m]`, the rows that draw; None: all, and m is n.
        temperatures: float64 `[m]`, above 0.
        points: float64 `[m]` in [0, 1): each row's place in the cumulative distribution.
        floors: float64 `[m]`: logarithms of the smallest kept weight; None: no limit.
        top_k: int64 `[m]`, at least 1; vocab_size and more keep all. None: no limit.
        top_p: float64 `[m]`, at least 0, of the tokens that top-k keeps; 1 and more keep all. None:
            no limit.
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
