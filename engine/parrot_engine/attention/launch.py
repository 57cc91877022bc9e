"""Tile sizes of the attention kernels, and their launches.

A small table measured offline (bench/results/engine.md) replaces tuning at run time: compilation
depends on the model and the device, never on lengths or batch sizes. The number of pipeline stages
shrinks until the tiles fit the device's shared memory.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as BoxDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from parrot_engine.attention.interface import AttentionShape, Rotation
from parrot_engine.attention.storage import QUANTIZED_DTYPE
from parrot_engine.kernels.attention import hopper_fetch, hopper_prefill
from parrot_engine.kernels.attention.paged_cache import AttentionConstants
from parrot_engine.kernels.attention.prefill_attention import prefill_attention
from parrot_engine.kernels.attention.rotary_write import rotate_and_write, write_kv
from parrot_engine.kernels.attention.split_attention import merge_splits, split_attention

_LOG2_E = 1.4426950408889634
#: Assumed shared memory of a program without a device (in the interpreter).
_ASSUMED_SHARED_MEMORY = 227 * 1024
#: Measured (engine-log, 23).
_FEW_MERGES = 16


class Tuning(NamedTuple):
    """Compile and launch options of one attention kernel."""

    #: Rows per tile: query heads of a group times tokens.
    block_m: int
    #: Keys per tile.
    block_n: int
    num_warps: int
    num_stages: int
    #: Programs per multiprocessor of a persistent grid; for prefill tiles, the number that fits
    #: one.
    programs_per_sm: int = 1
    #: True: whole tiles of keys come through the copy engine (compute capability 9.0 and later).
    descriptors: bool = False
    #: True: prefill without a window uses `hopper_prefill`, which has its own key tiles.
    specialized: bool = False


class MergeTuning(NamedTuple):
    """Compile and launch options of the merge."""

    #: Slots read per step.
    block: int
    #: Programs per query and head, each with a part of the head's elements.
    parts: int
    num_warps: int


class DeviceLimits(NamedTuple):
    """The properties of a device that launches depend on."""

    num_sms: int
    #: Bytes available to one program.
    shared_memory: int
    #: True if tiles can be fetched by descriptor (compute capability 9.0 and later).
    copy_engine: bool
    #: True for the Hopper generation (exactly compute capability 9.0).
    hopper: bool = False


def device_limits(device: torch.device) -> DeviceLimits:
    """Return the limits of `device`; placeholders for anything but CUDA."""
    if device.type != "cuda":
        return DeviceLimits(4, _ASSUMED_SHARED_MEMORY, copy_engine=False)
    properties = torch.cuda.get_device_properties(device)
    return DeviceLimits(
        properties.multi_processor_count,
        properties.shared_memory_per_block_optin,
        copy_engine=properties.major >= 9,
        hopper=properties.major == 9,
    )


class Tunings(NamedTuple):
    """The three tile classes of one model on one device."""

    narrow: Tuning
    wide: Tuning
    prefill: Tuning


def tunings(
    shape: AttentionShape, dtype: torch.dtype, limits: DeviceLimits, *, quantized: bool = False
) -> Tunings:
    """Choose tile sizes for heads of `shape` in `dtype`, to which a quantized cache is converted.

    All split classes use the same `block_n`, so a query sums a chunk in the same order however the
    chunk is shared.
    """
    group = shape.num_heads // shape.num_kv_heads
    row_bytes = triton.next_power_of_2(shape.head_dim) * dtype.itemsize
    least = triton.next_power_of_2(max(16, group))
    # The copy engine fetches contiguous memory: a tile of keys must be within one block.
    whole = limits.copy_engine and shape.block_size % 64 == 0 and dtype.itemsize == 2
    # … and its rows must be multiples of 16 bytes.
    whole = whole and shape.head_dim * (1 if quantized else dtype.itemsize) % 16 == 0
    if row_bytes <= 256 and whole:
        narrow = Tuning(least, 64, 4, 5, 6, descriptors=True)
        wide = Tuning(max(128, least), 64, 8, 5, 1, descriptors=True)
        prefill = Tuning(max(128, least), 64, 4, 3, 2, descriptors=True)
        if quantized:
            # Conversion costs instructions, and two warps repeat fewer of them per tile.
            narrow = Tuning(least, 64, 2, 5, 4, descriptors=True)
            prefill = prefill._replace(num_stages=2)
        if limits.hopper and shape.head_dim in (64, 128) and least <= hopper_prefill.TILE_ROWS:
            prefill = prefill._replace(programs_per_sm=1, specialized=True)
    elif row_bytes <= 256:
        narrow = Tuning(least, 64, 4, 3, 6)
        wide = Tuning(max(128, least), 64, 8, 5, 2)
        prefill = Tuning(max(128, least), 128, 8, 3)
    elif row_bytes <= 512:
        narrow = Tuning(least, 32, 4, 3, 4)
        wide = Tuning(max(64, least), 32, 4, 3, 2)
        prefill = Tuning(max(64, least), 32, 4, 3, 2)
    else:
        narrow = Tuning(least, 16, 4, 3, 4)
        wide = Tuning(max(32, least), 16, 4, 3, 2)
        prefill = Tuning(max(32, least), 16, 4, 3, 2)
    # Split classes shrink together: see above.
    block_n = min(_fit(tuning, row_bytes, limits).block_n for tuning in (narrow, wide))
    narrow, wide = narrow._replace(block_n=block_n), wide._replace(block_n=block_n)
    return Tunings(*(_fit(tuning, row_bytes, limits) for tuning in (narrow, wide, prefill)))


def merge_tuning(num_queries: int) -> MergeTuning:
    """Choose how to merge up to this many queries: a few alone would leave the device idle."""
    return MergeTuning(64, 4, 4) if num_queries <= _FEW_MERGES else MergeTuning(16, 1, 2)


def _fit(tuning: Tuning, row_bytes: int, limits: DeviceLimits) -> Tuning:
    """Fit keys per tile, then pipeline stages, into shared memory."""
    fixed = tuning.block_m * row_bytes + 4096
    pair = 2 * tuning.block_n * row_bytes
    for stages in range(tuning.num_stages, 1, -1):
        # Fetching block ids and the products take stages too, but no key buffers.
        if fixed + max(1, stages // 2) * pair <= limits.shared_memory:
            return tuning._replace(num_stages=stages)
    if tuning.block_n > 16:
        return _fit(tuning._replace(block_n=tuning.block_n // 2), row_bytes, limits)
    return tuning._replace(num_stages=1)


class CacheView(NamedTuple):
    """One layer of the KV cache, with keys and values separate."""

    key: Tensor
    value: Tensor

    @property
    def is_quantized(self) -> bool:
        return self.key.dtype is QUANTIZED_DTYPE

    @property
    def tile_rows(self) -> int:
        """Return the rows of a (block, head) tile, scales included."""
        return int(self.key.shape[2])

    @property
    def scales(self) -> tuple[Tensor, Tensor]:
        """Return both as float32, for the scales in them; meaningless if there are none."""
        if not self.is_quantized:
            return self.key, self.value
        return self.key.view(torch.float32), self.value.view(torch.float32)

    @property
    def pairs(self) -> CacheView:
        """Return a quantized cache as pairs of bytes."""
        return CacheView(self.key.view(torch.int16), self.value.view(torch.int16))

    def scale_tiles(self, tuning: Tuning) -> tuple[TensorDescriptor | Tensor, ...]:
        """Return descriptors of key tiles' scales for the copy engine, or the plain `scales`."""
        columns = self.key.shape[-1] // 4
        if tuning.block_n % columns or not self.is_quantized:
            return self.scales
        return tuple(
            TensorDescriptor.from_tensor(
                part.view(-1, part.shape[-1]), [tuning.block_n // columns, columns]
            )
            for part in self.scales
        )

    @property
    def boxes(self) -> tuple[BoxDescriptor, BoxDescriptor]:
        """Return both as rows of a head, in the boxes that `hopper_prefill` fetches."""
        box = [hopper_fetch.BOX_KEYS, hopper_fetch.BOX_COLUMNS]
        layout = hopper_fetch.CODE_LAYOUT if self.is_quantized else hopper_fetch.BOX_LAYOUT
        key, value = (
            BoxDescriptor.from_tensor(part.view(-1, part.shape[-1]), box, layout) for part in self
        )
        return key, value

    def tiles(self, rows: int, columns: int) -> tuple[TensorDescriptor, TensorDescriptor]:
        """Return both as rows of a head in tiles of `rows` x `columns`, for the copy engine."""
        key, value = (
            TensorDescriptor.from_tensor(part.view(-1, part.shape[-1]), [rows, columns])
            for part in self
        )
        return key, value


def reads_pairs(tuning: Tuning, block_d: int) -> bool:
    """Return true if tiles of a quantized cache are read as pairs of bytes.

    This applies to tiles of few rows, whose matrix instructions take all operands from registers. A
    product has at least 16 columns.
    """
    return tuning.block_m < 64 and block_d >= 32


def cache_view(layer_kv: Tensor) -> CacheView:
    """Split a layer of the cache (see `attention.interface`), which must be contiguous."""
    assert layer_kv.is_contiguous()
    return CacheView(layer_kv[0], layer_kv[1])


class Partials(NamedTuple):
    """Results of items, slot by slot, before they are merged; float32."""

    #: `[num_slots x num_heads x head_dim]`: weighted sums of values.
    out: Tensor
    #: `[num_slots x num_heads]`: log-sum-exp of the scores in base 2.
    lse2: Tensor


class AttentionCall(NamedTuple):
    """The arguments that one layer's attention kernels share in a step."""

    #: `[num_tokens, num_heads, head_dim]`
    query: Tensor
    cache: CacheView
    #: The block tables of all rows, concatenated.
    block_ids: Tensor
    #: `[num_tokens, num_heads * head_dim]`
    out: Tensor
    partials: Partials
    shape: AttentionShape
    window: int | None
    scale: float
    softcap: float | None = None
    #: `[num_heads]`; see `AttentionBackend.forward`.
    sinks: Tensor | None = None


class _ReadArguments(NamedTuple):
    """Arguments with which `split_attention` and `prefill_attention` read the cache."""

    #: Keys and values, their tiles, the scales of both, and the scales' tiles.
    tensors: tuple[Tensor | TensorDescriptor, ...]
    #: Constants and compiler options.
    options: dict[str, Any]


def _read_arguments(call: AttentionCall, tuning: Tuning) -> _ReadArguments:
    cache = call.cache
    constants = attention_constants(
        call.shape,
        tuning,
        has_window=call.window is not None,
        quantized=cache.is_quantized,
        tile_rows=cache.tile_rows,
        softcap=call.softcap,
        has_sinks=call.sinks is not None,
    )
    read = cache.pairs if constants.pairs else cache
    tiles: tuple[Any, ...] = read
    scale_tiles: tuple[Any, ...] = cache.scales
    if constants.descriptors:
        columns = constants.block_d // 2 if constants.pairs else constants.block_d
        tiles, scale_tiles = read.tiles(tuning.block_n, columns), cache.scale_tiles(tuning)
    return _ReadArguments(
        (*read, *tiles, *cache.scales, *scale_tiles),
        {"C": constants, "num_warps": tuning.num_warps, "num_stages": tuning.num_stages},
    )


@functools.cache
def attention_constants(
    shape: AttentionShape,
    tuning: Tuning,
    *,
    has_window: bool,
    quantized: bool,
    tile_rows: int,
    softcap: float | None = None,
    has_sinks: bool = False,
) -> AttentionConstants:
    """Return the constants that `split_attention` and `prefill_attention` are compiled for."""
    block_d = max(16, triton.next_power_of_2(shape.head_dim))
    return AttentionConstants(
        descriptors=tuning.descriptors and not has_window,
        quantized=quantized,
        pairs=quantized and reads_pairs(tuning, block_d),
        has_window=has_window,
        num_kv_heads=shape.num_kv_heads,
        group=shape.num_heads // shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_d=block_d,
        block_size=shape.block_size,
        tile_rows=tile_rows,
        block_m=tuning.block_m,
        block_n=tuning.block_n,
        softcap_log2=(softcap or 0.0) * _LOG2_E,
        has_sinks=has_sinks,
    )


@functools.cache
def hopper_constants(
    shape: AttentionShape, *, quantized: bool, tile_rows: int
) -> hopper_fetch.HopperConstants:
    """Return the constants of `hopper_prefill`, from measurements (engine-log, 22)."""
    return hopper_fetch.HopperConstants(
        quantized=quantized,
        num_kv_heads=shape.num_kv_heads,
        group=shape.num_heads // shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=shape.block_size,
        tile_rows=tile_rows,
        block_n=128,
        stages=2,
        # A float8 cache needs four more warps.
        consumer_registers=208 if quantized else 240,
        converter_registers=72,
        producer_registers=24,
    )


def run_split(
    call: AttentionCall,
    items: Tensor,
    num_items: Tensor,
    members: tuple[Tensor, Tensor, Tensor],
    *,
    tuning: Tuning,
    grid: int,
) -> None:
    """Run the items of one tile class; see `split_attention`."""
    read = _read_arguments(call, tuning)
    split_attention[(grid,)](
        call.query,
        call.query.stride(0),
        *read.tensors,
        items,
        num_items,
        *members,
        call.block_ids,
        call.out,
        *call.partials,
        call.window or 0,
        call.scale * _LOG2_E,
        call.out if call.sinks is None else call.sinks,
        **read.options,
    )


def run_merge(
    call: AttentionCall, merges: Tensor, num_merges: Tensor, *, tuning: MergeTuning, grid: int
) -> None:
    """Combine the slots of every query with cut keys; see `merge_splits`."""
    merge_splits[(grid,)](
        *call.partials,
        merges,
        num_merges,
        call.out,
        call.out if call.sinks is None else call.sinks,
        HAS_SINKS=call.sinks is not None,
        NUM_HEADS=call.shape.num_heads,
        HEAD_DIM=call.shape.head_dim,
        BLOCK_D=triton.next_power_of_2(call.shape.head_dim),
        BLOCK_C=tuning.block,
        PARTS=tuning.parts,
        num_warps=tuning.num_warps,
    )


def run_prefill(
    call: AttentionCall,
    tiles: Tensor,
    num_tiles: Tensor,
    *,
    tuning: Tuning,
    grid: int,
    num_sms: int,
) -> None:
    """Run prefill tiles `[n, 8]`; see `prefill_attention`.

    `grid` is at least the number of tiles times the number of KV heads.
    """
    work = (tiles, num_tiles, call.block_ids, call.out, *call.partials)
    if tuning.specialized and call.window is None and call.sinks is None:
        cache = call.cache
        constants = hopper_constants(
            call.shape, quantized=cache.is_quantized, tile_rows=cache.tile_rows
        )
        hopper_prefill.hopper_prefill[(min(grid, num_sms),)](
            call.query,
            call.query.stride(0),
            *cache.boxes,
            *cache.scales,
            *work,
            call.scale * _LOG2_E,
            C=constants,
            num_warps=4,
        )
        return
    read = _read_arguments(call, tuning)
    prefill_attention[(grid,)](
        call.query,
        call.query.stride(0),
        *read.tensors,
        *work,
        call.window or 0,
        call.scale * _LOG2_E,
        call.out if call.sinks is None else call.sinks,
        **read.options,
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
    rotation: Rotation | None = None,
) -> Tensor:
    """Rotate (and with `norms` = weights of q and k, eps: normalise) and write K and V.

    Without `rotation` a whole head is rotated, element i with i + head_dim / 2. `qkv` is
    `[num_tokens, (heads + 2 x kv_heads) x head_dim]`; tokens with slot -1 are not written. Returns
    the rotated queries `[num_tokens, heads, head_dim]`.
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
    rotation = rotation or Rotation(shape.head_dim)
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
        *cache.scales,
        QK_NORM=norms is not None,
        QUANTIZED=cache.is_quantized,
        NUM_HEADS=shape.num_heads,
        NUM_KV_HEADS=shape.num_kv_heads,
        HEAD_DIM=shape.head_dim,
        HALF=half,
        ROTATED=rotation.size // 2,
        INTERLEAVED=rotation.interleaved,
        BLOCK_HALF=triton.next_power_of_2(half),
        BLOCK_SIZE=shape.block_size,
        TILE_ROWS=cache.tile_rows,
        BLOCK_H=block_h,
        num_warps=2,
    )
    return query


def run_write_kv(
    key: Tensor, value: Tensor, slots: Tensor, cache: CacheView, *, shape: AttentionShape
) -> None:
    """Write `key` and `value` `[num_tokens, kv_heads, head_dim]` to their slots (-1: nowhere)."""
    assert key.stride()[1:] == value.stride()[1:] == (shape.head_dim, 1)
    write_kv[(key.shape[0],)](
        key,
        key.stride(0),
        value,
        value.stride(0),
        slots,
        cache.key,
        cache.value,
        *cache.scales,
        QUANTIZED=cache.is_quantized,
        NUM_KV_HEADS=shape.num_kv_heads,
        HEAD_DIM=shape.head_dim,
        BLOCK_D=triton.next_power_of_2(shape.head_dim),
        BLOCK_SIZE=shape.block_size,
        TILE_ROWS=cache.tile_rows,
        BLOCK_H=triton.next_power_of_2(shape.num_kv_heads),
        num_warps=4,
    )
