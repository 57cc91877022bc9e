"""Tile sizes of the attention kernels, and their launches.

A small table measured offline (docs/engine-performance.md) instead of tuning at run time: what a
kernel is compiled for depends on the model and the device, never on lengths or batch sizes. The
number of pipeline stages shrinks until the tiles fit the device's shared memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from parrot_engine.attention.interface import AttentionShape
from parrot_engine.kernels.prefill_attention import TILE_FIELDS, prefill_attention
from parrot_engine.kernels.rotary_write import rotate_and_write, write_kv
from parrot_engine.kernels.split_attention import ITEM_FIELDS, merge_splits, split_attention

_LOG2_E = 1.4426950408889634
#: Shared memory of a program where there is no device to ask (the interpreter).
_ASSUMED_SHARED_MEMORY = 227 * 1024
#: Slots that one step of the merge reads.
MERGE_BLOCK = 8


class Tuning(NamedTuple):
    """How one attention kernel is compiled and launched."""

    #: Rows of a tile: query heads of a group times tokens.
    block_m: int
    #: Keys of a tile.
    block_n: int
    num_warps: int
    num_stages: int
    #: Programs per multiprocessor of a persistent grid.
    programs_per_sm: int = 1


class DeviceLimits(NamedTuple):
    """What launches need to know of a device."""

    num_sms: int
    shared_memory: int


def device_limits(device: torch.device) -> DeviceLimits:
    """Limits of `device`; stand-ins for anything but CUDA."""
    if device.type != "cuda":
        return DeviceLimits(num_sms=4, shared_memory=_ASSUMED_SHARED_MEMORY)
    properties = torch.cuda.get_device_properties(device)
    return DeviceLimits(properties.multi_processor_count, properties.shared_memory_per_block_optin)


class Tunings(NamedTuple):
    """The three tile classes of one model on one device."""

    narrow: Tuning
    wide: Tuning
    prefill: Tuning


def tunings(shape: AttentionShape, dtype: torch.dtype, shared_memory: int) -> Tunings:
    """Tile sizes for heads of `shape` in `dtype`.

    All split classes use the same `block_n`, so that what a query gets from a chunk is summed in
    the same order whoever shares the chunk.
    """
    group = shape.num_heads // shape.num_kv_heads
    row_bytes = triton.next_power_of_2(shape.head_dim) * dtype.itemsize
    least = triton.next_power_of_2(max(16, group))
    if row_bytes <= 256:
        narrow = Tuning(least, 64, 4, 3, 4)
        wide = Tuning(max(128, least), 64, 8, 3, 2)
        prefill = Tuning(max(128, least), 64, 8, 3)
    elif row_bytes <= 512:
        narrow = Tuning(least, 32, 4, 3, 4)
        wide = Tuning(max(64, least), 32, 4, 3, 2)
        prefill = Tuning(max(64, least), 32, 4, 3)
    else:
        narrow = Tuning(least, 16, 4, 3, 4)
        wide = Tuning(max(32, least), 16, 4, 3, 2)
        prefill = Tuning(max(32, least), 16, 4, 3)
    return Tunings(*(_fit(tuning, row_bytes, shared_memory) for tuning in (narrow, wide, prefill)))


def _fit(tuning: Tuning, row_bytes: int, shared_memory: int) -> Tuning:
    """The same with as many pipeline stages as fit."""
    keys_and_values = 2 * tuning.block_n * row_bytes
    queries = tuning.block_m * row_bytes
    scratch = tuning.block_m * tuning.block_n * 4 + 4096
    affordable = (shared_memory - queries - scratch) // keys_and_values
    return tuning._replace(num_stages=max(1, min(tuning.num_stages, affordable)))


class CacheView(NamedTuple):
    """One layer of the KV cache, keys and values apart."""

    key: Tensor
    value: Tensor


def cache_view(layer_kv: Tensor) -> CacheView:
    """Split `[2, num_blocks, kv_heads, block_size, head_dim]`, which must be contiguous."""
    assert layer_kv.is_contiguous()
    return CacheView(layer_kv[0], layer_kv[1])


def run_split(
    query: Tensor,
    cache: CacheView,
    items: Tensor,
    num_items: Tensor,
    members: tuple[Tensor, Tensor, Tensor],
    block_ids: Tensor,
    out: Tensor,
    partial: Tensor,
    lse2: Tensor,
    *,
    shape: AttentionShape,
    window: int | None,
    scale: float,
    tuning: Tuning,
    grid: int,
) -> None:
    """Run the items of one tile class; see `split_attention`."""
    split_attention[(grid,)](
        query,
        query.stride(0),
        cache.key,
        cache.value,
        items,
        num_items,
        *members,
        block_ids,
        out,
        partial,
        lse2,
        window or 0,
        scale * _LOG2_E,
        HAS_WINDOW=window is not None,
        NUM_KV_HEADS=shape.num_kv_heads,
        GROUP=shape.num_heads // shape.num_kv_heads,
        HEAD_DIM=shape.head_dim,
        BLOCK_D=max(16, triton.next_power_of_2(shape.head_dim)),
        BLOCK_SIZE=shape.block_size,
        BLOCK_M=tuning.block_m,
        BLOCK_N=tuning.block_n,
        ITEM_FIELDS=ITEM_FIELDS,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )


def run_merge(
    partial: Tensor,
    lse2: Tensor,
    merges: Tensor,
    num_merges: Tensor,
    out: Tensor,
    *,
    shape: AttentionShape,
    grid: int,
) -> None:
    """Combine the slots of every query that was cut; see `merge_splits`."""
    merge_splits[(grid,)](
        partial,
        lse2,
        merges,
        num_merges,
        out,
        NUM_HEADS=shape.num_heads,
        HEAD_DIM=shape.head_dim,
        BLOCK_D=triton.next_power_of_2(shape.head_dim),
        BLOCK_C=MERGE_BLOCK,
        num_warps=2,
    )


def run_prefill(
    query: Tensor,
    cache: CacheView,
    tiles: Tensor,
    block_ids: Tensor,
    out: Tensor,
    *,
    shape: AttentionShape,
    window: int | None,
    scale: float,
    tuning: Tuning,
) -> None:
    """Run prefill tiles `[n, TILE_FIELDS]`; see `prefill_attention`."""
    prefill_attention[(tiles.shape[0] * shape.num_kv_heads,)](
        query,
        query.stride(0),
        cache.key,
        cache.value,
        tiles,
        block_ids,
        out,
        window or 0,
        scale * _LOG2_E,
        HAS_WINDOW=window is not None,
        NUM_KV_HEADS=shape.num_kv_heads,
        GROUP=shape.num_heads // shape.num_kv_heads,
        HEAD_DIM=shape.head_dim,
        BLOCK_D=max(16, triton.next_power_of_2(shape.head_dim)),
        BLOCK_SIZE=shape.block_size,
        BLOCK_M=tuning.block_m,
        BLOCK_N=tuning.block_n,
        TILE_FIELDS=TILE_FIELDS,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )


def run_rotate_and_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: tuple[Tensor, Tensor, float] | None,
    slots: Tensor,
    cache: CacheView,
    *,
    shape: AttentionShape,
) -> Tensor:
    """Rotate (and with `norms` = weights of q and k, eps: normalise) and write K and V.

    `qkv` is `[num_tokens, (heads + 2 x kv_heads) x head_dim]`. Returns the rotated queries
    `[num_tokens, heads, head_dim]`.
    """
    assert qkv.stride(1) == 1
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    num_tokens = qkv.shape[0]
    query = torch.empty(
        (num_tokens, shape.num_heads, shape.head_dim), dtype=qkv.dtype, device=qkv.device
    )
    num_heads = shape.num_heads + 2 * shape.num_kv_heads
    half = shape.head_dim // 2
    block_h = 8
    q_weight, k_weight, eps = norms or (qkv, qkv, 0.0)
    rotate_and_write[(num_tokens, triton.cdiv(num_heads, block_h))](
        qkv,
        qkv.stride(0),
        cos,
        sin,
        q_weight,
        k_weight,
        eps,
        slots,
        query,
        cache.key,
        cache.value,
        QK_NORM=norms is not None,
        NUM_HEADS=shape.num_heads,
        NUM_KV_HEADS=shape.num_kv_heads,
        HEAD_DIM=shape.head_dim,
        HALF=half,
        BLOCK_HALF=triton.next_power_of_2(half),
        BLOCK_SIZE=shape.block_size,
        BLOCK_H=block_h,
        num_warps=2,
    )
    return query


def run_write_kv(
    key: Tensor, value: Tensor, slots: Tensor, cache: CacheView, *, shape: AttentionShape
) -> None:
    """Write `key` and `value` `[num_tokens, kv_heads, head_dim]` to their slots."""
    assert key.stride()[1:] == value.stride()[1:] == (shape.head_dim, 1)
    write_kv[(key.shape[0],)](
        key,
        key.stride(0),
        value,
        value.stride(0),
        slots,
        cache.key,
        cache.value,
        NUM_KV_HEADS=shape.num_kv_heads,
        HEAD_DIM=shape.head_dim,
        BLOCK_D=triton.next_power_of_2(shape.head_dim),
        BLOCK_SIZE=shape.block_size,
        BLOCK_H=triton.next_power_of_2(shape.num_kv_heads),
        num_warps=4,
    )
