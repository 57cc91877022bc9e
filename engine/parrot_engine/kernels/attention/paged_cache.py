"""Reads tiles of keys and values from a paged KV cache in any layout.

This file is independent of work lists, rows of a batch, and the use of keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class AttentionConstants:
    """Constants that the attention kernels are compiled for."""

    #: True: whole tiles of keys come through the copy engine.
    descriptors: bool
    #: True: the cache is float8 with scales (`attention.storage`) …
    quantized: bool
    #: … and is read as pairs of bytes.
    pairs: bool
    has_window: bool
    num_kv_heads: int
    #: Query heads per KV head.
    group: int
    head_dim: int
    #: `head_dim`, rounded up to a power of two.
    block_d: int
    #: Tokens per block.
    block_size: int
    #: Rows of a (block, head) tile of the cache, scales included.
    tile_rows: int
    #: Rows per query tile, and keys per key tile.
    block_m: int
    block_n: int
    #: Bound of the scores in base 2; 0: none.
    softcap_log2: float = 0.0
    #: True: each head has a score without a value beside those of keys.
    has_sinks: bool = False


@triton.jit
def load_tiles(cache, run, start, limit, head, MASKED: tl.constexpr, C: tl.constexpr):
    """Load the `block_n` keys and values from position `start` on, `[block_n, columns]` each.

    `cache` has, each for keys and values: pointers, tile descriptors, float32 pointers to the
    scales, and descriptors of these. `run` has the sequence's block ids, the index in them of the
    run's first block, and the position of its first key.

    With `MASKED` keys at or beyond `limit` are not read: their slots may contain anything. Without
    it all of them must exist. With `C.descriptors` unmasked tiles come through the copy engine.
    Descriptors see the cache as `[rows, head_dim]` in tiles of `[block_n, block_d]`, and a tile
    must lie within one block.

    Returns keys, values, and the origin for `load_scales`: the (block, head) tile of each key (or
    of all), the keys' places in it and, for descriptor loads, the row of the first scale.
    """
    pointers, descriptors, _scales, _scale_tiles = cache
    key_cache, value_cache = pointers
    key_tiles, value_tiles = descriptors
    block_ids, first_block, base = run
    # Elements per row of keys, as read.
    WIDTH: tl.constexpr = C.head_dim // 2 if C.pairs else C.head_dim
    BLOCK_W: tl.constexpr = C.block_d // 2 if C.pairs else C.block_d
    lanes = tl.arange(0, C.block_n)
    offset = start - base
    if C.block_size % C.block_n == 0 or (C.descriptors and not MASKED):
        # One block contains all of them: a scalar id, and consecutive places.
        block = tl.load(block_ids + first_block + offset // C.block_size)
        places = offset % C.block_size + lanes
    else:
        local = offset + lanes
        block = tl.load(
            block_ids + first_block + local // C.block_size, mask=local < limit - base, other=0
        )
        places = local % C.block_size
    scale_row = 0
    if C.descriptors and not MASKED:
        tile_row = (block * C.num_kv_heads + head) * C.tile_rows
        k = key_tiles.load([tile_row + offset % C.block_size, 0])
        v = value_tiles.load([tile_row + offset % C.block_size, 0])
        tiles = (block * C.num_kv_heads + head).to(tl.int64)
        scale_row = tile_row + C.block_size + offset % C.block_size * 4 // C.head_dim
    else:
        tiles = block.to(tl.int64) * C.num_kv_heads + head
        columns = tl.arange(0, BLOCK_W)
        elements = (tiles * C.tile_rows + places)[:, None] * WIDTH + columns[None, :]
        if MASKED:
            present = (start + lanes < limit)[:, None]
            if BLOCK_W != WIDTH:
                present = present & (columns < WIDTH)[None, :]
            k = tl.load(key_cache + elements, mask=present, other=0)
            v = tl.load(value_cache + elements, mask=present, other=0)
        elif BLOCK_W != WIDTH:
            present = (columns < WIDTH)[None, :]
            k = tl.load(key_cache + elements, mask=present, other=0)
            v = tl.load(value_cache + elements, mask=present, other=0)
        else:
            k = tl.load(key_cache + elements)
            v = tl.load(value_cache + elements)
    return k, v, (tiles, places, scale_row)


@triton.jit
def load_scales(cache, origin, present, MASKED: tl.constexpr, C: tl.constexpr):
    """Load the float32 scales of a tile's keys and values, `[block_n]` each.

    `origin` is the last result of `load_tiles`. With `MASKED` only those of `present` keys are
    read.
    """
    _pointers, _descriptors, pointers, descriptors = cache
    key_scales, value_scales = pointers
    key_tiles, value_tiles = descriptors
    tiles, places, row = origin
    # Rows of the cache filled by the scales of a tile of keys, if they are whole rows.
    ROWS: tl.constexpr = 4 * C.block_n // C.head_dim
    if C.descriptors and not MASKED and ROWS * C.head_dim == 4 * C.block_n:
        k_scale = tl.reshape(key_tiles.load([row, 0]), [C.block_n])
        v_scale = tl.reshape(value_tiles.load([row, 0]), [C.block_n])
    else:
        elements = tiles * (C.tile_rows * C.head_dim // 4)
        elements = elements + (C.block_size * C.head_dim // 4 + places)
        if MASKED:
            k_scale = tl.load(key_scales + elements, mask=present, other=0.0)
            v_scale = tl.load(value_scales + elements, mask=present, other=0.0)
        else:
            k_scale = tl.load(key_scales + elements)
            v_scale = tl.load(value_scales + elements)
    return k_scale, v_scale


@triton.jit
def hide_unseen(scores, keys, positions, window, C: tl.constexpr):
    """Return `scores` `[queries, keys]` with -inf for keys behind a query, or before its window."""
    seen = keys[None, :] <= positions[:, None]
    if C.has_window:
        seen = seen & (keys[None, :] > positions[:, None] - window)
    return tl.where(seen, scores, float("-inf"))
