"""The warps of `hopper_prefill` that bring keys and values to shared memory, in Gluon.

One warp lets the copy engine fill a ring of buffers, each with 128 keys or values. A float8 cache
comes into a separate ring. From there four more warps convert it, with scales, into the buffers
that products read, so the multiplying warps are unaware of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from parrot_engine.kernels.attention.prefill_attention import TILE_FIELDS

#: Size of one fetch by the copy engine: keys, and elements of each.
BOX_KEYS = 64
BOX_COLUMNS = 64
#: Layout of these boxes in shared memory, for 16 bits and for float8.
BOX_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
CODE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=2)


@dataclass(frozen=True, slots=True)
class HopperConstants:
    """Constants that `hopper_prefill` is compiled for."""

    #: True if the cache is float8 with scales (`attention.storage`).
    quantized: bool
    num_kv_heads: int
    #: Query heads per KV head.
    group: int
    head_dim: int
    #: Tokens per block.
    block_size: int
    #: Rows of a (block, head) tile of the cache, scales included.
    tile_rows: int
    #: Keys per buffer, and buffers per ring.
    block_n: int
    stages: int
    #: Registers per thread of each kind of warp: 65,536 in total, minus a reserve.
    consumer_registers: int
    converter_registers: int
    producer_registers: int


# Triton 3.7 and later renamed some functions of 3.6.
_fetch = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@builtin
def _boxes(memory, count, _semantic=None):
    """Split a buffer into `count` boxes; those of its first columns come first."""
    view = getattr(memory, "reinterpret", None) or memory._reinterpret
    return view(
        memory.dtype, [count, BOX_KEYS, BOX_COLUMNS], memory.type.layout, _semantic=_semantic
    )


@gluon.jit
def nth_work(index):
    """Return the program's `index`-th pair of a tile and a KV head.

    Tiles are sorted largest first. Every other round runs through the programs in the opposite
    order, so that all get about equal work.
    """
    place = gl.program_id(0)
    if index % 2 == 1:
        place = gl.num_programs(0) - 1 - place
    return index * gl.num_programs(0) + place


@gluon.jit
def fetch_tiles(boxes, work, ring, C: gl.constexpr):
    """Fetch keys and values of all the program's tiles in reading order.

    `boxes` has those of keys and values; `work` has the tiles, their number and the block ids;
    `ring` has the buffers to fill.
    """
    tiles, num_tiles, block_ids = work
    num_work = gl.load(num_tiles) * C.num_kv_heads
    count = 0
    for index in range(gl.cdiv(num_work, gl.num_programs(0))):
        work_index = nth_work(index)
        if work_index < num_work:
            tile = tiles + (work_index // C.num_kv_heads) * TILE_FIELDS
            head = work_index % C.num_kv_heads
            table = block_ids + gl.load(tile)
            begin = gl.load(tile + 1)
            end = gl.load(tile + 2)
            last_block = (end - 1) // C.block_size
            steps = gl.cdiv(end - begin, C.block_n)
            for step in range(steps):
                start = begin + (steps - 1 - step) * C.block_n
                for part in gl.static_range(2):
                    buffer = _nth_buffer(ring[part], count, C)
                    _fetch_buffer(boxes[part], buffer, start, last_block, table, head, C)
                count += 1


@gluon.jit
def _nth_buffer(buffers, count, C: gl.constexpr):
    """Return the buffer, its two barriers, and their phase at the `count`-th use."""
    memory, full, empty = buffers
    stage = count % C.stages
    return memory.index(stage), full.index(stage), empty.index(stage), (count // C.stages) & 1


@gluon.jit
def _fetch_buffer(boxes, buffer, start, last_block, table, head, C: gl.constexpr):
    """Fetch the keys or values from `start` on into a buffer once it is free."""
    memory, full, empty, phase = buffer
    ROWS: gl.constexpr = C.block_n // 64
    COLUMNS: gl.constexpr = C.head_dim // 64
    parts = _boxes(memory, ROWS * COLUMNS)
    mbarrier.wait(empty, phase ^ 1)
    mbarrier.expect(full, C.block_n * C.head_dim * memory.dtype.primitive_bitwidth // 8)
    for row in gl.static_range(ROWS):
        offset = start + row * 64
        # Beyond the last key any block will do, because its content is masked.
        block = gl.load(table + gl.minimum(offset // C.block_size, last_block))
        place = (block * C.num_kv_heads + head) * C.tile_rows + offset % C.block_size
        for column in gl.static_range(COLUMNS):
            _fetch(boxes, [place, column * 64], full, parts.index(column * ROWS + row))


@gluon.jit
def convert_tiles(scales, work, code_ring, ring, C: gl.constexpr):
    """Convert tiles from `code_ring`, filled by `fetch_tiles`, into `ring`; runs in four warps.

    `scales` are the caches of keys and of values as float32.
    """
    tiles, num_tiles, block_ids = work
    num_work = gl.load(num_tiles) * C.num_kv_heads
    count = 0
    for index in range(gl.cdiv(num_work, gl.num_programs(0))):
        work_index = nth_work(index)
        if work_index < num_work:
            tile = tiles + (work_index // C.num_kv_heads) * TILE_FIELDS
            head = work_index % C.num_kv_heads
            table = block_ids + gl.load(tile)
            begin = gl.load(tile + 1)
            end = gl.load(tile + 2)
            steps = gl.cdiv(end - begin, C.block_n)
            for step in range(steps):
                start = begin + (steps - 1 - step) * C.block_n
                for part in gl.static_range(2):
                    codes = _nth_buffer(code_ring[part], count, C)
                    buffer = _nth_buffer(ring[part], count, C)
                    _convert_buffer(scales[part], codes, buffer, start, end, table, head, C)
                count += 1


@gluon.jit
def _convert_buffer(scales, code_buffer, buffer, start, end, table, head, C: gl.constexpr):
    codes, arrived, taken, phase = code_buffer
    memory, full, empty, _phase = buffer
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0])
    ROWS: gl.constexpr = C.block_n // 64
    COLUMNS: gl.constexpr = C.head_dim // 64
    code_boxes = _boxes(codes, ROWS * COLUMNS)
    boxes = _boxes(memory, ROWS * COLUMNS)
    mbarrier.wait(arrived, phase)
    mbarrier.wait(empty, phase ^ 1)
    for row in gl.static_range(ROWS):
        keys = start + row * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
        # Beyond the last key there may be no block, so read the last one.
        keys = gl.minimum(keys, end - 1)
        block = gl.load(table + keys // C.block_size).to(gl.int64)
        first = ((block * C.num_kv_heads + head) * C.tile_rows + C.block_size) * (C.head_dim // 4)
        scale = gl.load(scales + first + keys % C.block_size)
        for column in gl.static_range(COLUMNS):
            box = column * ROWS + row
            numbers = code_boxes.index(box).load(LAYOUT).to(gl.float8e4nv, bitcast=True)
            numbers = numbers.to(gl.float32) * scale[:, None]
            boxes.index(box).store(numbers.to(memory.dtype))
    mbarrier.arrive(taken)
    fence_async_shared()
    mbarrier.arrive(full)
