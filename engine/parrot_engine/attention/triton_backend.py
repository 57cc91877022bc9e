"""Paged attention with Triton kernels: split KV for decodes, tiles for prefill, shared prefixes.

`plan` builds one work list per window on the CPU and sends all of it to the device in one
transfer; `forward` launches, without asking the device for anything. Slots that were never
written may hold anything: masked keys are not read at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from parrot_engine.attention.interface import (
    AttentionShape,
    FusedAttention,
    HeadNorms,
)
from parrot_engine.attention.work_list import Policy, WorkList, build, flatten_tables
from parrot_engine.builtin.batch import BatchRow
from parrot_engine.kernels import launch

#: Keys of a chunk, rounded up to whole blocks.
DEFAULT_CHUNK = 512
#: Parts of the packed transfer begin at multiples of this many integers: Triton compiles another
#: variant for a pointer that is not aligned to 16 bytes.
_ALIGN = 32
#: See `Policy`.
_SPLIT_TOKENS = 8
_LONG_SPLIT_TOKENS = 64
_LONG_CONTEXT = 2048
_WIDE_MIN_ROWS = 32
_WIDE_MIN_BYTES = 40_000_000
#: Programs of the merge per multiprocessor.
_MERGE_PROGRAMS = 16


class LayerWork(NamedTuple):
    """A work list on the device, and what launches need to know of it on the host."""

    narrow: Tensor
    wide: Tensor
    members: tuple[Tensor, Tensor, Tensor]
    merges: Tensor
    tiles: Tensor
    #: Number of narrow items, wide items and merges, each a tensor of one integer.
    counts: tuple[Tensor, Tensor, Tensor]
    num_slots: int


class TritonPlan(NamedTuple):
    """One step, by window."""

    slots: Tensor
    block_ids: Tensor
    work: dict[int | None, LayerWork]


class TritonAttention(FusedAttention[TritonPlan]):
    """See the module's docstring."""

    def __init__(
        self,
        shape: AttentionShape,
        *,
        windows: Iterable[int | None],
        device: torch.device,
        dtype: torch.dtype,
        chunk: int = DEFAULT_CHUNK,
        share_prefixes: bool = True,
        wide_min_bytes: int = _WIDE_MIN_BYTES,
        tunings: launch.Tunings | None = None,
    ) -> None:
        """A back end for layers with these `windows` and a cache of `dtype`.

        `chunk` is where keys are cut. `share_prefixes` False and other `tunings` are for
        measuring.
        """
        limits = launch.device_limits(device)
        self._shape = shape
        self._windows = sorted(set(windows), key=lambda window: window or 0)
        self._device = device
        self._num_sms = limits.num_sms
        self._share = share_prefixes
        self._tunings = tunings or launch.tunings(shape, dtype, limits)
        group = shape.num_heads // shape.num_kv_heads
        # Whole blocks, and whole tiles of keys.
        step = int(np.lcm(shape.block_size, self._tunings.narrow.block_n))
        self._policy = Policy(
            chunk=-(-chunk // step) * step,
            align=max(self._tunings.narrow.block_n, self._tunings.prefill.block_n),
            narrow_rows=self._tunings.narrow.block_m,
            wide_rows=self._tunings.wide.block_m,
            group=group,
            tile_tokens=self._tunings.prefill.block_m // group,
            token_bytes=2 * shape.num_kv_heads * shape.head_dim * dtype.itemsize,
            split_tokens=_SPLIT_TOKENS,
            long_split_tokens=_LONG_SPLIT_TOKENS,
            long_context=_LONG_CONTEXT,
            wide_min_rows=_WIDE_MIN_ROWS,
            wide_min_bytes=wide_min_bytes,
        )
        #: Wide and narrow items have nothing to do with each other, and neither fills the device.
        self._side_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._partial = torch.empty(0, dtype=torch.float32, device=device)
        self._lse2 = torch.empty(0, dtype=torch.float32, device=device)

    def plan(self, rows: Sequence[BatchRow]) -> TritonPlan:
        """See the interface."""
        tables = flatten_tables(rows, self._shape.block_size)
        packer = _Packer()
        packer.add(tables.slots)
        packer.add(tables.block_ids)
        lists: dict[int | None, WorkList] = {}
        for window in self._windows:
            work = build(rows, tables, self._shape, self._policy, window, share=self._share)
            lists[window] = work
            counts = [len(work.narrow), len(work.wide), len(work.merges)]
            for part in (
                work.narrow,
                work.wide,
                work.member_tokens,
                work.member_positions,
                work.member_slots,
                work.merges,
                work.tiles,
                *(np.array([count], dtype=np.int32) for count in counts),
            ):
                packer.add(part)
        parts = iter(packer.send(self._device))
        slots, block_ids = next(parts), next(parts)
        layers: dict[int | None, LayerWork] = {}
        for window, work in lists.items():
            narrow, wide, tokens, positions, member_slots, merges, tiles = (
                next(parts) for _ in range(7)
            )
            layers[window] = LayerWork(
                narrow,
                wide,
                (tokens, positions, member_slots),
                merges,
                tiles,
                (next(parts), next(parts), next(parts)),
                work.num_slots,
            )
        return TritonPlan(slots, block_ids, layers)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layer_kv: Tensor,
        plan: TritonPlan,
        *,
        window: int | None,
        scale: float,
    ) -> Tensor:
        """See the interface."""
        cache = launch.cache_view(layer_kv)
        launch.run_write_kv(key, value, plan.slots, cache, shape=self._shape)
        return self._attend(query, cache, plan, window, scale)

    def forward_fused(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        norms: HeadNorms | None,
        layer_kv: Tensor,
        plan: TritonPlan,
        *,
        window: int | None,
        scale: float,
    ) -> Tensor:
        """See the interface."""
        cache = launch.cache_view(layer_kv)
        query = launch.run_rotate_and_write(
            qkv, cos, sin, norms, plan.slots, cache, shape=self._shape
        )
        return self._attend(query, cache, plan, window, scale)

    def _attend(
        self,
        query: Tensor,
        cache: launch.CacheView,
        plan: TritonPlan,
        window: int | None,
        scale: float,
    ) -> Tensor:
        shape, work = self._shape, plan.work[window]
        assert query.stride()[1:] == (shape.head_dim, 1)
        out = torch.empty(
            (query.shape[0], shape.num_heads * shape.head_dim),
            dtype=query.dtype,
            device=query.device,
        )
        if len(work.tiles):
            launch.run_prefill(
                query,
                cache,
                work.tiles,
                plan.block_ids,
                out,
                shape=shape,
                window=window,
                scale=scale,
                tuning=self._tunings.prefill,
            )
        self._reserve(work.num_slots)
        main = torch.cuda.current_stream(self._device) if self._side_stream is not None else None
        if len(work.wide):
            # NOTE: `out` and the partial outputs are the main stream's; it waits before it goes
            # on, so that their memory is not used again too early.
            if self._side_stream is not None:
                self._side_stream.wait_stream(main)
            with torch.cuda.stream(self._side_stream):
                self._run_split(query, cache, plan, out, window, scale, wide=True)
        if len(work.narrow):
            self._run_split(query, cache, plan, out, window, scale, wide=False)
        if len(work.wide) and main is not None:
            main.wait_stream(self._side_stream)
        if len(work.merges):
            launch.run_merge(
                self._partial,
                self._lse2,
                work.merges,
                work.counts[2],
                out,
                shape=shape,
                grid=self._grid(len(work.merges) * shape.num_heads, _MERGE_PROGRAMS),
            )
        return out

    def _run_split(
        self,
        query: Tensor,
        cache: launch.CacheView,
        plan: TritonPlan,
        out: Tensor,
        window: int | None,
        scale: float,
        *,
        wide: bool,
    ) -> None:
        work = plan.work[window]
        items = work.wide if wide else work.narrow
        tuning = self._tunings.wide if wide else self._tunings.narrow
        launch.run_split(
            query,
            cache,
            items,
            work.counts[1] if wide else work.counts[0],
            work.members,
            plan.block_ids,
            out,
            self._partial,
            self._lse2,
            shape=self._shape,
            window=window,
            scale=scale,
            tuning=tuning,
            grid=self._grid(len(items) * self._shape.num_kv_heads, tuning.programs_per_sm),
        )

    def _grid(self, work: int, programs_per_sm: int) -> int:
        return min(work, self._num_sms * programs_per_sm)

    def _reserve(self, num_slots: int) -> None:
        """Room for partial outputs; layers follow each other on one stream and share it."""
        if num_slots * self._shape.num_heads > len(self._lse2):
            entries = 2 * num_slots * self._shape.num_heads
            self._lse2 = torch.empty(entries, dtype=torch.float32, device=self._device)
            self._partial = torch.empty(
                entries * self._shape.head_dim, dtype=torch.float32, device=self._device
            )


class _Packer:
    """Many small arrays in one transfer."""

    def __init__(self) -> None:
        self._arrays: list[np.ndarray] = []
        self._starts: list[int] = []
        self._size = 0

    def add(self, array: np.ndarray) -> None:
        """Take an int32 array."""
        self._arrays.append(array)
        self._starts.append(self._size)
        self._size += -(-array.size // _ALIGN) * _ALIGN

    def send(self, device: torch.device) -> list[Tensor]:
        """The arrays on the device, in the order they were added."""
        packed = torch.empty(self._size, dtype=torch.int32, pin_memory=device.type == "cuda")
        view = packed.numpy()
        for array, start in zip(self._arrays, self._starts, strict=True):
            view[start : start + array.size] = array.reshape(-1)
        sent = packed.to(device, non_blocking=True)
        return [
            sent[start : start + array.size].view(array.shape)
            for array, start in zip(self._arrays, self._starts, strict=True)
        ]
