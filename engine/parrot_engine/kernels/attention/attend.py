"""Attention of queries over a range of keys: online softmax over tiles of a paged KV cache.

Scores are in base 2 throughout. They are multiplied once by scale x log2(e), which must be
positive. The loop keeps `m` (a row's largest score so far), `l` (the sum of 2^(score - m)) and the
weighted sum of values. This file is independent of work lists, rows of a batch, and destinations of
results. A float8 cache has a loop of its own (`softmax_fp8`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from parrot_engine.kernels.attention.paged_cache import hide_unseen, load_tiles
from parrot_engine.kernels.attention.softmax_fp8 import attend_quantized_keys, product_query


@triton.jit
def attend(
    q, positions, cache, run, begin, masked_from, end, head, window, scale_log2, C: tl.constexpr
):
    """Return the normalised output `[block_m, block_d]` and log-sum-exp of queries `q` over these
    keys.

    All queries see keys `begin` … `masked_from` - 1; of the rest each sees those up to its own
    position (and within the window). With a window `masked_from` must be `begin`. A row that sees
    nothing has output 0 and log-sum-exp -inf. `paged_cache.load_tiles` describes `cache` and `run`.
    """
    BLOCK_M: tl.constexpr = C.block_m
    WIDTH: tl.constexpr = C.block_d // 2 if C.pairs else C.block_d
    denominator = tl.zeros([BLOCK_M], tl.float32)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if C.quantized:
        q, scale_log2 = product_query(q, scale_log2)
        odd_q = q
        if C.pairs:
            q, odd_q = tl.split(tl.reshape(q, [BLOCK_M, WIDTH, 2]))
        total = tl.zeros([BLOCK_M, WIDTH], tl.float32)
        odd_total = total
        for masked in tl.static_range(1 if C.has_window else 0, 2):
            total, odd_total, denominator, largest = attend_quantized_keys(
                (total, odd_total, denominator, largest),
                q,
                odd_q,
                positions,
                cache,
                run,
                masked_from if masked else begin,
                end if masked else masked_from,
                end,
                head,
                window,
                scale_log2,
                masked == 1,
                C,
            )
        if C.pairs:
            total = tl.interleave(total, odd_total)
    else:
        total = tl.zeros([BLOCK_M, WIDTH], tl.float32)
        for masked in tl.static_range(1 if C.has_window else 0, 2):
            total, denominator, largest = attend_keys(
                (total, denominator, largest),
                q,
                positions,
                cache,
                run,
                masked_from if masked else begin,
                end if masked else masked_from,
                end,
                head,
                window,
                scale_log2,
                masked == 1,
                C,
            )
    # Avoid 0 / 0 for a row that saw nothing.
    result = total / tl.where(denominator == 0.0, 1.0, denominator)[:, None]
    return result, largest + tl.log2(denominator)


@triton.jit
def beside_sink(sink, lse2):
    """Return the factor on an output with this log-sum-exp, whose head has a score without a value.

    `sink` is that score in the model's form, not in base 2.
    """
    return 1.0 / (1.0 + tl.exp2(sink.to(tl.float32) * 1.4426950408889634 - lse2))


@triton.jit
def cap_scores(scores, C: tl.constexpr):
    """Return cap x tanh(scores / cap), for scores in base 2 and the model's cap."""
    turned = tl.exp2(scores * (2.8853900817779268 / C.softcap_log2))
    return C.softcap_log2 - 2.0 * C.softcap_log2 / (turned + 1.0)


@triton.jit
def attend_keys(
    sums,
    q,
    positions,
    cache,
    run,
    begin,
    end,
    limit,
    head,
    window,
    scale_log2,
    MASKED: tl.constexpr,
    C: tl.constexpr,
):
    """Let the queries `q` `[block_m, block_d]` attend to keys `begin` … `end` - 1.

    Positions of keys are absolute; `begin` minus the first position of `run` is a multiple of
    `block_n`. Without `MASKED` every query must see every key, and the range must be whole tiles.
    With it a query sees keys up to its own position (and within the window), and keys at or beyond
    `limit` are not read. `sums` has the weighted sum of values, the denominator and the largest
    score; returns them with these keys added.
    """
    total, denominator, largest = sums
    for start in range(begin, end, C.block_n):
        keys = start + tl.arange(0, C.block_n)
        k, v, _origin = load_tiles(cache, run, start, limit, head, MASKED, C)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if C.softcap_log2 > 0.0:
            scores = cap_scores(scores * scale_log2, C) / scale_log2
        if MASKED:
            scores = hide_unseen(scores, keys, positions, window, C)
        raised = tl.maximum(largest, tl.max(scores, 1) * scale_log2)
        # A row that has seen nothing keeps -inf; -inf minus -inf would be NaN.
        anchor = tl.where(raised == float("-inf"), 0.0, raised) if MASKED else raised
        decay = tl.exp2(largest - anchor)
        weights = tl.exp2(scores * scale_log2 - anchor[:, None])
        denominator = denominator * decay + tl.sum(weights, 1)
        total = total * decay[:, None]
        total = tl.dot(weights.to(v.dtype), v, total, input_precision="ieee")
        largest = raised
    return total, denominator, largest
