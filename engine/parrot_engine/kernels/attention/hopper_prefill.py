"""Causal attention of prefill tiles on Hopper GPUs with specialised warps, in Gluon.

It takes the tiles and gives the results of `prefill_attention`, for 16-bit products and block sizes
that are multiples of 64. A program has a multiprocessor to itself and works through several tiles.
One warp fetches keys and values into a ring of buffers (`hopper_fetch`). Two groups of four warps
process half of a tile's rows each, without waiting for each other. A group runs two products on the
matrix units, the next keys' scores and the last values' sum, while it turns scores into weights in
between (FlashAttention-3, arXiv 2407.08608), so the matrix units need not wait for exponentials.

Keys are processed from a tile's last to its first, so that masked ones come first.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from parrot_engine.kernels.attention.hopper_fetch import (
    BOX_LAYOUT,
    CODE_LAYOUT,
    convert_tiles,
    fetch_tiles,
    nth_work,
)
from parrot_engine.kernels.attention.prefill_attention import TILE_FIELDS

#: Rows per tile, and per group of warps.
TILE_ROWS = 128
_GROUP_ROWS = gl.constexpr(64)
_BUFFER = gl.constexpr(BOX_LAYOUT)
_CODES = gl.constexpr(CODE_LAYOUT)
_BARRIER = gl.constexpr(mbarrier.MBarrierLayout())


@gluon.jit
def hopper_prefill(
    query,
    query_stride,
    key_boxes,
    value_boxes,
    key_scales,
    value_scales,
    tiles,
    num_tiles,
    block_ids,
    out,
    partial,
    lse2,
    scale_log2,
    C: gl.constexpr,
):
    """Attend; `key_boxes` and `value_boxes` describe the cache as `[rows, head_dim]`, in boxes.

    `prefill_attention` describes the other arguments. The kernel takes four warps besides those
    that it starts itself.
    """
    DTYPE: gl.constexpr = query.dtype.element_ty
    q_memory = gl.allocate_shared_memory(DTYPE, [2, _GROUP_ROWS, C.head_dim], _BUFFER)
    # A buffer is free once both groups are done with it.
    ring = _make_ring(DTYPE, _BUFFER, 2, C)
    work = (tiles, num_tiles, block_ids)
    boxes = (key_boxes, value_boxes)
    arguments = (query, query_stride, work, (out, partial, lse2), scale_log2)
    first, second = q_memory.index(0), q_memory.index(1)
    if C.quantized:
        code_ring = _make_ring(gl.uint8, _CODES, 1, C)
        gl.warp_specialize(
            [
                (_attend, (arguments, first, ring, 0, C)),
                (_attend, (arguments, second, ring, _GROUP_ROWS, C)),
                (convert_tiles, ((key_scales, value_scales), work, code_ring, ring, C)),
                (fetch_tiles, (boxes, work, code_ring, C)),
            ],
            [4, 4, 1],
            [C.consumer_registers, C.converter_registers, C.producer_registers],
        )
    else:
        gl.warp_specialize(
            [
                (_attend, (arguments, first, ring, 0, C)),
                (_attend, (arguments, second, ring, _GROUP_ROWS, C)),
                (fetch_tiles, (boxes, work, ring, C)),
            ],
            [4, 1],
            [C.consumer_registers, C.producer_registers],
        )


@gluon.jit
def _make_ring(DTYPE: gl.constexpr, LAYOUT: gl.constexpr, READERS: gl.constexpr, C: gl.constexpr):
    """Make rings for keys and values: buffers, each with two barriers, for full and for free."""
    k_memory = gl.allocate_shared_memory(DTYPE, [C.stages, C.block_n, C.head_dim], LAYOUT)
    v_memory = gl.allocate_shared_memory(DTYPE, [C.stages, C.block_n, C.head_dim], LAYOUT)
    k_full = gl.allocate_shared_memory(gl.int64, [C.stages, 1], _BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [C.stages, 1], _BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [C.stages, 1], _BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [C.stages, 1], _BARRIER)
    STAGES: gl.constexpr = C.stages
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=READERS)
        mbarrier.init(v_empty.index(stage), count=READERS)
    return (k_memory, k_full, k_empty), (v_memory, v_full, v_empty)


@gluon.jit
def _attend(arguments, q_memory, ring, FIRST_ROW: gl.constexpr, C: gl.constexpr):
    """Process a group's rows, from `FIRST_ROW` on, for all tiles of the program."""
    query, query_stride, work, results, scale_log2 = arguments
    tiles, num_tiles, _block_ids = work
    keys_ring, values_ring = ring
    k_memory, k_full, k_empty = keys_ring
    v_memory, v_full, v_empty = values_ring
    BLOCK_N: gl.constexpr = C.block_n
    HEAD_DIM: gl.constexpr = C.head_dim
    STAGES: gl.constexpr = C.stages
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    TOTAL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, TOTAL, 2)
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    DTYPE: gl.constexpr = v_memory.dtype
    num_work = gl.load(num_tiles) * C.num_kv_heads
    count = 0
    for index in range(gl.cdiv(num_work, gl.num_programs(0))):
        work_index = nth_work(index)
        if work_index < num_work:
            tile = tiles + (work_index // C.num_kv_heads) * TILE_FIELDS
            head = work_index % C.num_kv_heads
            begin = gl.load(tile + 1)
            end = gl.load(tile + 2)
            first_token = gl.load(tile + 3)
            num_tokens = gl.load(tile + 4)
            first_position = gl.load(tile + 5)
            steps = gl.cdiv(end - begin, BLOCK_N)

            _load_query(
                query, query_stride, first_token, num_tokens, head, q_memory, FIRST_ROW, COPY, C
            )
            rows = FIRST_ROW + gl.arange(0, _GROUP_ROWS, layout=gl.SliceLayout(1, SCORES))
            member = rows // C.group
            positions = gl.where(member < num_tokens, first_position + member, -1)
            start = begin + (steps - 1) * BLOCK_N
            stage = count % STAGES
            phase = (count // STAGES) & 1
            mbarrier.wait(k_full.index(stage), phase)
            scores = gl.zeros([_GROUP_ROWS, BLOCK_N], gl.float32, SCORES)
            k = k_memory.index(stage).permute((1, 0))
            scores = warpgroup_mma(q_memory, k, scores, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores])
            mbarrier.arrive(k_empty.index(stage))
            largest = gl.full([_GROUP_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
            # The last keys of a part may be visible, but still belong to another part.
            weights, _decay, largest = _weigh(
                scores, largest, gl.minimum(positions, end - 1), start, scale_log2, True
            )
            denominator = _lane_sums(weights)
            packed = _pack(weights, DTYPE)
            if start + BLOCK_N > end:
                # Slots beyond the last key may contain anything, even values whose product with 0
                # is not 0. Both groups write the same.
                mbarrier.wait(v_full.index(stage), phase)
                keys = start + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, COPY))
                values = v_memory.index(stage).load(COPY)
                v_memory.index(stage).store(gl.where((keys < end)[:, None], values, 0.0))
                fence_async_shared()
            total = gl.zeros([_GROUP_ROWS, HEAD_DIM], gl.float32, TOTAL)
            count += 1

            # Whole tiles of keys visible to the first of these tokens are visible to all.
            seen = gl.maximum(0, first_position + 1 - begin) // BLOCK_N * BLOCK_N + begin
            masked = gl.maximum(0, start - seen) // BLOCK_N
            for part in gl.static_range(2):
                for _ in range(steps - 1 - masked if part else masked):
                    start -= BLOCK_N
                    total, packed, largest, denominator = _step(
                        (total, packed, largest, denominator),
                        positions,
                        start,
                        count,
                        scale_log2,
                        q_memory,
                        ring,
                        part == 0,
                        SCORES,
                        TOTAL,
                        C,
                    )
                    count += 1
            stage = (count - 1) % STAGES
            mbarrier.wait(v_full.index(stage), ((count - 1) // STAGES) & 1)
            weights = _unpack(packed, DTYPE, WEIGHTS)
            total = warpgroup_mma(weights, v_memory.index(stage), total, is_async=True)
            total = warpgroup_mma_wait(0, deps=[total])
            mbarrier.arrive(v_empty.index(stage))

            _store_rows(
                total, gl.sum(denominator, 1), largest, tile, head, results, FIRST_ROW, TOTAL, C
            )


@gluon.jit
def _load_query(
    query,
    query_stride,
    first_token,
    num_tokens,
    head,
    q_memory,
    FIRST_ROW: gl.constexpr,
    LAYOUT: gl.constexpr,
    C: gl.constexpr,
):
    """Bring a group's rows of a tile to shared memory, where products read them."""
    rows = FIRST_ROW + gl.arange(0, _GROUP_ROWS, layout=gl.SliceLayout(1, LAYOUT))
    dims = gl.arange(0, C.head_dim, layout=gl.SliceLayout(0, LAYOUT))
    tokens = (first_token + rows // C.group).to(gl.int64)
    heads = head * C.group + rows % C.group
    q = gl.load(
        query + (tokens * query_stride + heads * C.head_dim)[:, None] + dims[None, :],
        mask=(rows // C.group < num_tokens)[:, None],
        other=0.0,
    )
    q_memory.store(q)
    fence_async_shared()


@gluon.jit
def _store_rows(
    total,
    denominator,
    largest,
    tile,
    head,
    results,
    FIRST_ROW: gl.constexpr,
    LAYOUT: gl.constexpr,
    C: gl.constexpr,
):
    """Write a group's rows, or this part's partial results if keys were cut."""
    out, partial, lse2 = results
    rows = FIRST_ROW + gl.arange(0, _GROUP_ROWS, layout=gl.SliceLayout(1, LAYOUT))
    dims = gl.arange(0, C.head_dim, layout=gl.SliceLayout(0, LAYOUT))
    member = rows // C.group
    present = member < gl.load(tile + 4)
    heads = head * C.group + rows % C.group
    denominator = gl.convert_layout(denominator, gl.SliceLayout(1, LAYOUT))
    # A row that saw none of a part's keys gets output 0 and log-sum-exp -inf instead of 0 / 0.
    result = total / gl.where(denominator == 0.0, 1.0, denominator)[:, None]
    first_slot = gl.load(tile + 6)
    if first_slot < 0:
        tokens = (gl.load(tile + 3) + member).to(gl.int64)
        places = (tokens * (C.num_kv_heads * C.group) + heads) * C.head_dim
        gl.store(
            out + places[:, None] + dims[None, :],
            result.to(out.dtype.element_ty),
            mask=present[:, None],
        )
    else:
        slots = (first_slot + member * gl.load(tile + 7)).to(gl.int64)
        entries = slots * (C.num_kv_heads * C.group) + heads
        gl.store(
            partial + entries[:, None] * C.head_dim + dims[None, :], result, mask=present[:, None]
        )
        logs = gl.convert_layout(largest, gl.SliceLayout(1, LAYOUT)) + gl.log2(denominator)
        gl.store(lse2 + entries, logs, mask=present)


@gluon.jit
def _step(
    sums,
    positions,
    start,
    count,
    scale_log2,
    q_memory,
    ring,
    MASKED: gl.constexpr,
    SCORES: gl.constexpr,
    TOTAL: gl.constexpr,
    C: gl.constexpr,
):
    """Weigh the keys from `start` on, and add the values of the previous keys."""
    total, packed, largest, denominator = sums
    keys_ring, values_ring = ring
    k_memory, k_full, k_empty = keys_ring
    v_memory, v_full, v_empty = values_ring
    BLOCK_N: gl.constexpr = C.block_n
    DTYPE: gl.constexpr = v_memory.dtype
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, TOTAL, 2)
    LANES: gl.constexpr = denominator.type.layout
    stage = count % C.stages
    before = (count - 1) % C.stages
    before_phase = ((count - 1) // C.stages) & 1
    mbarrier.wait(k_full.index(stage), (count // C.stages) & 1)
    scores = gl.zeros([_GROUP_ROWS, BLOCK_N], gl.float32, SCORES)
    k = k_memory.index(stage).permute((1, 0))
    scores = warpgroup_mma(q_memory, k, scores, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), before_phase)
    weights = _unpack(packed, DTYPE, WEIGHTS)
    total = warpgroup_mma(weights, v_memory.index(before), total, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(k_empty.index(stage))
    weights, decay, largest = _weigh(scores, largest, positions, start, scale_log2, MASKED)
    lane_decay = gl.convert_layout(decay, gl.SliceLayout(1, LANES))
    denominator = denominator * lane_decay[:, None] + _lane_sums(weights)
    # NOTE: this barrier was passed above. The compiler moves no instruction across a wait's branch,
    # but without it would move the exponentials behind the wait for the product.
    mbarrier.wait(v_full.index(before), before_phase)
    total, packed = warpgroup_mma_wait(0, deps=[total, _pack(weights, DTYPE)])
    mbarrier.arrive(v_empty.index(before))
    total = total * gl.convert_layout(decay, gl.SliceLayout(1, TOTAL))[:, None]
    return total, packed, largest, denominator


@gluon.jit
def _weigh(scores, largest, positions, start, scale_log2, MASKED: gl.constexpr):
    """Return the weights of `scores`, the decay of older weights, and the largest score so far.

    All queries see all keys or, with `MASKED`, those up to their own position.
    """
    if MASKED:
        SCORES: gl.constexpr = scores.type.layout
        keys = start + gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, SCORES))
        scores = gl.where(keys[None, :] <= positions[:, None], scores, float("-inf"))
    raised = gl.maximum(largest, gl.max(scores, 1) * scale_log2)
    anchor = raised
    if MASKED:
        # A row that has seen nothing keeps -inf; -inf minus -inf would be NaN.
        anchor = gl.where(raised == float("-inf"), 0.0, raised)
    decay = _exp2(largest - anchor)
    weights = _exp2(scores * scale_log2 - anchor[:, None])
    return weights, decay, raised


@gluon.jit
def _exp2(x):
    """Return 2^x, with 0 for subnormal results, which saves three of four instructions."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _lane_sums(weights):
    """Sum a row within each of its four lanes, `[rows, 4]`; the lanes are added later."""
    ROWS: gl.constexpr = weights.shape[0]
    COLUMNS: gl.constexpr = weights.shape[1]
    return gl.sum(gl.sum(gl.reshape(weights, [ROWS, COLUMNS // 8, 4, 2]), 3), 1)


@gluon.jit
def _pack(weights, DTYPE: gl.constexpr):
    """Pack pairs of columns into 32 bits, because 16-bit values would move through a loop one by
    one.
    """
    ROWS: gl.constexpr = weights.shape[0]
    COLUMNS: gl.constexpr = weights.shape[1]
    low, high = gl.split(gl.reshape(weights, [ROWS, COLUMNS // 2, 2]))
    TYPE: gl.constexpr = "bf16x2" if gl.bfloat16 == DTYPE else "f16x2"
    return gl.inline_asm_elementwise(
        "cvt.rn." + TYPE + ".f32 $0, $2, $1;",
        "=r,f,f",
        [low, high],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _unpack(packed, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    ROWS: gl.constexpr = packed.shape[0]
    COLUMNS: gl.constexpr = packed.shape[1] * 2
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;",
        "=h,=h,r",
        [packed],
        dtype=(gl.int16, gl.int16),
        is_pure=True,
        pack=1,
    )
    weights = gl.reshape(gl.join(low, high), [ROWS, COLUMNS])
    return gl.convert_layout(weights.to(DTYPE, bitcast=True), LAYOUT)
