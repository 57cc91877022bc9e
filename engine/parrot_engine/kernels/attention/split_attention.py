"""Attention of few queries over long caches: split KV with a work list, then a merge.

An item is a chunk of keys from one run of blocks and the queries ("members") that read it, with the
query heads of a KV head packed together. A single decode has one item per chunk. Sequences that
share blocks are members of one item, so the chunk is read once for all of them. Items come in two
classes by the rows of a tile, each with its own launch.

Grids are fixed: programs stride through the list and read its length from device memory, so a
captured graph can be replayed with another list. An item writes (normalised output, base-2
log-sum-exp) to its members' slots; `merge_splits` combines a query's slots, always in the order of
its chunks. A query with a single chunk is written to the output directly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from parrot_engine.kernels.attention.attend import attend, beside_sink

#: Integers per item, in the order of `work_list.Items`.
ITEM_FIELDS = tl.constexpr(8)


@triton.jit
def split_attention(
    query,
    query_stride,
    key_cache,
    value_cache,
    key_tiles,
    value_tiles,
    key_scales,
    value_scales,
    key_scale_tiles,
    value_scale_tiles,
    items,
    num_items,
    member_tokens,
    member_positions,
    member_slots,
    block_ids,
    out,
    partial,
    lse2,
    window,
    scale_log2,
    sinks,
    C: tl.constexpr,
):
    """Attend as the module describes; `query` is `[num_tokens, heads, head_dim]` with any token
    stride.
    """
    NUM_HEADS: tl.constexpr = C.num_kv_heads * C.group
    cache = (
        (key_cache, value_cache),
        (key_tiles, value_tiles),
        (key_scales, value_scales),
        (key_scale_tiles, value_scale_tiles),
    )
    rows = tl.arange(0, C.block_m)
    dims = tl.arange(0, C.block_d)
    num_work = tl.load(num_items) * C.num_kv_heads
    for work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        item = items + (work // C.num_kv_heads) * ITEM_FIELDS
        head = work % C.num_kv_heads
        run = (block_ids, tl.load(item), tl.load(item + 1))
        begin = tl.load(item + 2)
        end = tl.load(item + 3)
        first_member = tl.load(item + 4)
        num_members = tl.load(item + 5)
        masked_from = begin if C.has_window else tl.load(item + 6)

        member = rows // C.group
        present = member < num_members
        tokens = tl.load(member_tokens + first_member + member, mask=present, other=0)
        positions = tl.load(member_positions + first_member + member, mask=present, other=-1)
        slots = tl.load(member_slots + first_member + member, mask=present, other=-1)
        tokens, heads = tokens.to(tl.int64), head * C.group + rows % C.group
        filled = present[:, None] & (dims < C.head_dim)[None, :]
        q = tl.load(
            query + (tokens * query_stride + heads * C.head_dim)[:, None] + dims[None, :],
            mask=filled,
            other=0.0,
        )
        # Rows without a member are computed but not stored.
        result, row_lse2 = attend(
            q, positions, cache, run, begin, masked_from, end, head, window, scale_log2, C
        )
        split = slots >= 0
        entries = slots.to(tl.int64) * NUM_HEADS + heads
        tl.store(
            partial + (entries * C.head_dim)[:, None] + dims[None, :],
            result,
            mask=filled & split[:, None],
        )
        tl.store(lse2 + entries, row_lse2, mask=present & split)
        if C.has_sinks:
            result *= beside_sink(tl.load(sinks + heads), row_lse2)[:, None]
        tl.store(
            out + ((tokens * NUM_HEADS + heads) * C.head_dim)[:, None] + dims[None, :],
            result.to(out.dtype.element_ty),
            mask=filled & (slots < 0)[:, None],
        )


@triton.jit
def merge_splits(
    partial,
    lse2,
    merges,
    num_merges,
    out,
    sinks,
    HAS_SINKS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Compute out = sum_i 2^(lse2_i - m) O_i / sum_i 2^(lse2_i - m) with m = max_i lse2_i, per
    head.

    `merges` has (token, first slot, slots) of each query whose keys were cut. A program combines
    one of `PARTS` equal parts of a head's elements.
    """
    lanes = tl.arange(0, BLOCK_C)
    num_work = tl.load(num_merges) * (NUM_HEADS * PARTS)
    for work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        dims = work % PARTS * (BLOCK_D // PARTS) + tl.arange(0, BLOCK_D // PARTS)
        merge = merges + (work // (NUM_HEADS * PARTS)) * 3
        head = work // PARTS % NUM_HEADS
        token = tl.load(merge).to(tl.int64)
        first_slot = tl.load(merge + 1).to(tl.int64)
        num_slots = tl.load(merge + 2)
        largest = tl.full([BLOCK_C], float("-inf"), tl.float32)
        for start in range(0, num_slots, BLOCK_C):
            places = (first_slot + start + lanes) * NUM_HEADS + head
            scores = tl.load(lse2 + places, mask=start + lanes < num_slots, other=float("-inf"))
            largest = tl.maximum(largest, scores)
        anchor = tl.max(largest, 0)
        anchor = tl.where(anchor == float("-inf"), 0.0, anchor)
        total = tl.zeros([BLOCK_D // PARTS], tl.float32)
        denominator = 0.0
        for start in range(0, num_slots, BLOCK_C):
            present = start + lanes < num_slots
            places = (first_slot + start + lanes) * NUM_HEADS + head
            scores = tl.load(lse2 + places, mask=present, other=float("-inf"))
            weights = tl.exp2(scores - anchor)
            parts = tl.load(
                partial + places[:, None] * HEAD_DIM + dims[None, :],
                mask=present[:, None] & (dims < HEAD_DIM)[None, :],
                other=0.0,
            )
            total += tl.sum(parts * weights[:, None], 0)
            denominator += tl.sum(weights, 0)
        result = total / denominator
        if HAS_SINKS:
            result *= beside_sink(tl.load(sinks + head), anchor + tl.log2(denominator))
        tl.store(
            out + (token * NUM_HEADS + head) * HEAD_DIM + dims,
            result.to(out.dtype.element_ty),
            mask=dims < HEAD_DIM,
        )
