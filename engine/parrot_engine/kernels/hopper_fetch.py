"""Keys and values for `hopper_prefill`: the warps that bring them to shared memory, in Gluon.

One warp has the copy engine write a ring of buffers of which each is 128 keys or values. A cache of
float8 comes into a ring of its own, from which four more warps convert it, scales included, into
the buffers that products read: those who multiply know nothing of it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

#: What the copy engine fetches at a time: so many keys, so many of their elements.
BOX_KEYS = 64
BOX_COLUMNS = 64
#: How such boxes lie in shared memory, of 16 bits and of float8.
BOX_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
CODE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=2)

# Triton 3.7 and later have other names for some of what 3.6 has.
_fetch = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@builtin
def _boxes(memory, count, _semantic=None):
    """A buffer as `count` boxes: those of its first columns come first."""
    view = getattr(memory, "reinterpret", None) or memory._reinterpret
    return view(
        memory.dtype, [count, BOX_KEYS, BOX_COLUMNS], memory.type.layout, _semantic=_semantic
    )


@gluon.jit
def nth_work(index):
    """The program's `index`-th pair of a tile and a KV head.

    Tiles come largest first: every other round goes to the programs in the opposite order, so that
    all get about as much.
    """
    place = gl.program_id(0)
    if index % 2 == 1:
        place = gl.num_programs(0) - 1 - place
    return index * gl.num_programs(0) + place


@gluon.jit
def fetch_tiles(
    key_boxes,
    value_boxes,
    tiles,
    num_tiles,
    block_ids,
    ring,
    NUM_KV_HEADS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    CACHE_ROWS: gl.constexpr,
    TILE_FIELDS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Keys and values of all tiles of the program, in the order in which they are read.

    A (block, head) tile of the cache has `CACHE_ROWS` rows.
    """
    k_memory, v_memory, k_full, k_empty, v_full, v_empty = ring
    num_work = gl.load(num_tiles) * NUM_KV_HEADS
    count = 0
    for index in range(gl.cdiv(num_work, gl.num_programs(0))):
        work = nth_work(index)
        if work < num_work:
            tile = tiles + (work // NUM_KV_HEADS) * TILE_FIELDS
            head = work % NUM_KV_HEADS
            first_block = gl.load(tile)
            begin = gl.load(tile + 1)
            end = gl.load(tile + 2)
            last_block = (end - 1) // BLOCK_SIZE
            steps = gl.cdiv(end - begin, BLOCK_N)
            for step in range(steps):
                start = begin + (steps - 1 - step) * BLOCK_N
                stage = count % STAGES
                phase = (count // STAGES) & 1
                _fetch_buffer(
                    key_boxes,
                    k_memory.index(stage),
                    k_full.index(stage),
                    k_empty.index(stage),
                    phase,
                    start,
                    last_block,
                    block_ids + first_block,
                    head,
                    NUM_KV_HEADS,
                    BLOCK_SIZE,
                    CACHE_ROWS,
                )
                _fetch_buffer(
                    value_boxes,
                    v_memory.index(stage),
                    v_full.index(stage),
                    v_empty.index(stage),
                    phase,
                    start,
                    last_block,
                    block_ids + first_block,
                    head,
                    NUM_KV_HEADS,
                    BLOCK_SIZE,
                    CACHE_ROWS,
                )
                count += 1


@gluon.jit
def _fetch_buffer(
    boxes,
    memory,
    full,
    empty,
    phase,
    start,
    last_block,
    table,
    head,
    NUM_KV_HEADS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    CACHE_ROWS: gl.constexpr,
):
    """Fetch the keys or values from `start` on into a buffer, as soon as it is free."""
    KEYS: gl.constexpr = memory.shape[0]
    HEAD_DIM: gl.constexpr = memory.shape[1]
    ROWS: gl.constexpr = KEYS // 64
    COLUMNS: gl.constexpr = HEAD_DIM // 64
    parts = _boxes(memory, ROWS * COLUMNS)
    mbarrier.wait(empty, phase ^ 1)
    mbarrier.expect(full, KEYS * HEAD_DIM * memory.dtype.primitive_bitwidth // 8)
    for row in gl.static_range(ROWS):
        offset = start + row * 64
        # Behind the last key any block will do: what comes from there is masked.
        block = gl.load(table + gl.minimum(offset // BLOCK_SIZE, last_block))
        place = (block * NUM_KV_HEADS + head) * CACHE_ROWS + offset % BLOCK_SIZE
        for column in gl.static_range(COLUMNS):
            _fetch(boxes, [place, column * 64], full, parts.index(column * ROWS + row))


@gluon.jit
def convert_tiles(
    key_scales,
    value_scales,
    tiles,
    num_tiles,
    block_ids,
    code_ring,
    ring,
    NUM_KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    CACHE_ROWS: gl.constexpr,
    TILE_FIELDS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    """What `fetch_tiles` brings to `code_ring`, converted to `ring`; by four warps.

    `key_scales` and `value_scales` are the cache as float32.
    """
    k_codes, v_codes, k_arrived, k_taken, v_arrived, v_taken = code_ring
    k_memory, v_memory, k_full, k_empty, v_full, v_empty = ring
    num_work = gl.load(num_tiles) * NUM_KV_HEADS
    count = 0
    for index in range(gl.cdiv(num_work, gl.num_programs(0))):
        work = nth_work(index)
        if work < num_work:
            tile = tiles + (work // NUM_KV_HEADS) * TILE_FIELDS
            head = work % NUM_KV_HEADS
            table = block_ids + gl.load(tile)
            begin = gl.load(tile + 1)
            end = gl.load(tile + 2)
            steps = gl.cdiv(end - begin, BLOCK_N)
            for step in range(steps):
                start = begin + (steps - 1 - step) * BLOCK_N
                stage = count % STAGES
                phase = (count // STAGES) & 1
                _convert_buffer(
                    key_scales,
                    k_codes.index(stage),
                    k_arrived.index(stage),
                    k_taken.index(stage),
                    k_memory.index(stage),
                    k_full.index(stage),
                    k_empty.index(stage),
                    phase,
                    start,
                    end,
                    table,
                    head,
                    NUM_KV_HEADS,
                    HEAD_DIM,
                    BLOCK_SIZE,
                    CACHE_ROWS,
                    BLOCK_N,
                )
                _convert_buffer(
                    value_scales,
                    v_codes.index(stage),
                    v_arrived.index(stage),
                    v_taken.index(stage),
                    v_memory.index(stage),
                    v_full.index(stage),
                    v_empty.index(stage),
                    phase,
                    start,
                    end,
                    table,
                    head,
                    NUM_KV_HEADS,
                    HEAD_DIM,
                    BLOCK_SIZE,
                    CACHE_ROWS,
                    BLOCK_N,
                )
                count += 1


@gluon.jit
def _convert_buffer(
    scales,
    codes,
    arrived,
    taken,
    memory,
    full,
    empty,
    phase,
    start,
    end,
    table,
    head,
    NUM_KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    CACHE_ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """Convert the keys or values from `start` on, box by box."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0])
    ROWS: gl.constexpr = BLOCK_N // 64
    COLUMNS: gl.constexpr = HEAD_DIM // 64
    code_boxes = _boxes(codes, ROWS * COLUMNS)
    boxes = _boxes(memory, ROWS * COLUMNS)
    mbarrier.wait(arrived, phase)
    mbarrier.wait(empty, phase ^ 1)
    for row in gl.static_range(ROWS):
        keys = start + row * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
        # Behind the last key there may be no block: that of the last will do.
        keys = gl.minimum(keys, end - 1)
        block = gl.load(table + keys // BLOCK_SIZE).to(gl.int64)
        first = ((block * NUM_KV_HEADS + head) * CACHE_ROWS + BLOCK_SIZE) * (HEAD_DIM // 4)
        scale = gl.load(scales + first + keys % BLOCK_SIZE)
        for column in gl.static_range(COLUMNS):
            box = column * ROWS + row
            numbers = code_boxes.index(box).load(LAYOUT).to(gl.float8e4nv, bitcast=True)
            numbers = numbers.to(gl.float32) * scale[:, None]
            boxes.index(box).store(numbers.to(memory.dtype))
    mbarrier.arrive(taken)
    fence_async_shared()
    mbarrier.arrive(full)
