"""Paged attention with Triton kernels: split KV for decodes, tiles for prefill, shared prefixes.

`lay_out` builds one work list per window on the CPU, `send` brings them all to the device in one
transfer, and `forward` launches kernels without reading anything back. A plan of fixed capacity
(`fixed_plan`) reads its work from a buffer at each launch: CUDA graphs are captured with it.
Unwritten slots may contain anything: masked keys are never read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from parrot_engine.attention import launch
from parrot_engine.attention.host_plan import (
    Capacity,
    HostPlan,
    HostPlanner,
    Parts,
    PlanLayout,
    sizes_of,
)
from parrot_engine.attention.interface import AttentionShape, FusedAttention, HeadNorms, Rotation
from parrot_engine.attention.policy import MAX_MIXED_TOKENS, MAX_SLOTS, Cuts, Policy, TileCuts
from parrot_engine.attention.storage import token_bytes
from parrot_engine.batch import BatchRow

#: Measured (engine-log, 17 and 23). All are rounded up to whole blocks and tiles.
DEFAULT_CUTS = Cuts(512, tail=256, fine=(64, 128, 192, 256), coarse=1024)
#: Measured (engine-log, 18).
DEFAULT_TILE_CUTS = TileCuts(
    (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32),
    least=128,
    start=128,
    merge=512,
    rounds=2,
    crowded=1.15,
)
#: The same parameters for tiles that have a multiprocessor to themselves (engine-log, 22).
SPECIALIZED_TILE_CUTS = DEFAULT_TILE_CUTS._replace(
    least=512, rounds=1, crowded=1.0, last=(2, 3, 4, 5, 6)
)
#: Parameters that never cut a tile.
_UNCUT = TileCuts((1,), least=1 << 29, start=0, merge=0)
#: See `Policy`.
_SPLIT_TOKENS = 8
_LONG_SPLIT_TOKENS = 64
_LONG_CONTEXT = 2048
_WIDE_MIN_ROWS = 32
_WIDE_MIN_BYTES = 40_000_000
#: Merge programs per multiprocessor.
_MERGE_PROGRAMS = 16


class Programs(NamedTuple):
    """Programs of each launch, over all heads; 0 if there is no launch."""

    narrow: int
    wide: int
    merges: int
    tiles: int


class LayerWork(NamedTuple):
    """A `WorkList` on the device: flat int32 views of one buffer, with a bucket's capacity."""

    #: `[8 x capacity]` each: items.
    narrow: Tensor
    wide: Tensor
    #: `[capacity]` each: tokens, positions and slots of the members.
    members: tuple[Tensor, Tensor, Tensor]
    #: `[3 x capacity]`.
    merges: Tensor
    #: `[8 x capacity]`.
    tiles: Tensor
    #: `[1]` each: numbers of narrow items, wide items, merges and tiles.
    counts: tuple[Tensor, Tensor, Tensor, Tensor]
    programs: Programs
    partials: launch.Partials


class TritonPlan(NamedTuple):
    """One step on the device; int32."""

    #: `[num_tokens]`: target of each token's KV; -1: none.
    slots: Tensor
    #: `[num_block_ids]`: the block tables of all rows, concatenated.
    block_ids: Tensor
    #: By the layers' window.
    work: dict[int | None, LayerWork]


class TritonAttention(FusedAttention[TritonPlan]):
    def __init__(
        self,
        shape: AttentionShape,
        *,
        windows: Iterable[int | None],
        device: torch.device,
        dtype: torch.dtype,
        quantized: bool = False,
        softcap: float | None = None,
        cuts: Cuts = DEFAULT_CUTS,
        tile_cuts: TileCuts | None = None,
        share_prefixes: bool = True,
        wide_min_bytes: int = _WIDE_MIN_BYTES,
        tunings: launch.Tunings | None = None,
        limits: launch.DeviceLimits | None = None,
        deterministic: bool = False,
    ) -> None:
        """Make a back end for layers with these `windows` and a cache of `dtype`, or a quantized
        one.

        A `softcap` bounds the scores: softcap x tanh(score / softcap). `cuts` and `tile_cuts`
        decide where keys are cut (None: the best measured values for the kernel in use).
        `share_prefixes` is the initial value for the method of this name. `tunings` and another
        device's `limits` serve measurements. A `deterministic` back end reads every query's keys in
        the same order, whatever else is in the step.
        """
        limits = limits or launch.device_limits(device)
        if softcap is not None or deterministic:
            # The Hopper kernel supports neither score bounds nor rows alone.
            limits = limits._replace(hopper=False)
        if deterministic:
            tile_cuts, share_prefixes = _UNCUT, False
        self._deterministic = deterministic
        self._softcap = softcap
        self._shape = shape
        self._windows = sorted(set(windows), key=lambda window: window or 0)
        self._device = device
        self._on_cuda = device.type == "cuda"
        self._num_sms = limits.num_sms
        self._shares_prefixes = share_prefixes
        self._tunings = tunings or launch.tunings(shape, dtype, limits, quantized=quantized)
        if tile_cuts is None:
            specialized = self._tunings.prefill.specialized
            tile_cuts = SPECIALIZED_TILE_CUTS if specialized else DEFAULT_TILE_CUTS
        group = shape.num_heads // shape.num_kv_heads
        # Whole blocks, and whole tiles of keys.
        step = int(np.lcm(shape.block_size, self._tunings.narrow.block_n))
        chunks = sorted({-(-chunk // step) * step for chunk in (*cuts.fine, cuts.chunk)})
        coarse = -(-cuts.coarse // step) * step
        self._policy = Policy(
            cuts=Cuts(chunks[-1], cuts.tail, tuple(chunks[:-1]), coarse),
            # One program per multiprocessor: more gain less than merging their results costs.
            fine_readings=limits.num_sms // shape.num_kv_heads,
            align=max(self._tunings.narrow.block_n, self._tunings.prefill.block_n),
            narrow_rows=self._tunings.narrow.block_m,
            wide_rows=self._tunings.wide.block_m,
            group=group,
            tile_tokens=self._tunings.prefill.block_m // group,
            tile_cuts=tile_cuts,
            tile_round=_round(self._tunings.prefill, limits.num_sms, shape.num_kv_heads),
            tiles_alone=limits.num_sms // shape.num_kv_heads,
            num_sms=limits.num_sms,
            num_kv_heads=shape.num_kv_heads,
            max_slots=MAX_SLOTS,
            token_bytes=token_bytes(shape.num_kv_heads, shape.head_dim, dtype, quantized=quantized),
            split_tokens=0 if deterministic else _SPLIT_TOKENS,
            long_split_tokens=0 if deterministic else _LONG_SPLIT_TOKENS,
            long_context=_LONG_CONTEXT,
            wide_min_rows=_WIDE_MIN_ROWS,
            wide_min_bytes=wide_min_bytes,
            wide_round=_round(self._tunings.wide, limits.num_sms, shape.num_kv_heads),
        )
        self._planner = HostPlanner(shape, self._policy, self._windows)
        #: Wide and narrow items are independent, and neither fills the device.
        self._side_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._partials = self.partials(0)

    def plan(self, rows: Sequence[BatchRow]) -> TritonPlan:
        return self.send(self.lay_out(rows))

    def lay_out(self, rows: Sequence[BatchRow]) -> HostPlan:
        """Do the CPU's half of `plan`; touches no device."""
        host = self._planner.lay_out(rows, share=self._shares_prefixes)
        self.read_once_tokens += host.read_once
        return host

    def share_prefixes(self, enabled: bool) -> bool:
        if self._deterministic:
            return False
        self._shares_prefixes = enabled
        return True

    def send(self, host: HostPlan) -> TritonPlan:
        """Send a plan of exactly this size in one asynchronous transfer."""
        tables, lists = host
        sizes = [sizes_of(work) for work in lists.values()]
        capacity = Capacity(*(max(column) for column in zip(*sizes, strict=True)))
        layout = PlanLayout(self._windows, tables.num_tokens, capacity, len(tables.block_ids))
        # NOTE: pinned memory comes from torch's cache, which does not reuse it before copies from
        # it have ended.
        packed = torch.empty(layout.size, dtype=torch.int32, pin_memory=self._on_cuda)
        layout.write(packed.numpy(), tables, lists)
        self._reserve(capacity.slots)
        programs = {window: self._programs(size) for window, size in zip(lists, sizes, strict=True)}
        buffer = packed.to(self._device, non_blocking=True)
        return self._views(buffer, layout, programs, self._partials)

    def min_tokens(self, parts: Parts) -> int:
        """Return the fewest tokens of a step that can need any of these parts."""
        policy = self._policy
        if self._deterministic and not parts.tiles:
            # Every row becomes tiles.
            return MAX_MIXED_TOKENS + 1
        for_tiles = policy.split_tokens + 1 if parts.tiles else None
        for_wide = -(-policy.wide_min_rows // policy.group) if parts.wide else None
        return min((least for least in (for_tiles, for_wide) if least is not None), default=1)

    def fixed_layout(
        self, num_tokens: int, max_rows: int, max_context: int, max_slots: int, start: int
    ) -> PlanLayout:
        """Return the layout for any step of up to `num_tokens` tokens and `max_rows` rows.

        `max_slots` bounds a step's partial results, and with them the items: a step with many long
        contexts may still not fit. The layout starts at integer `start`.
        """
        policy = self._policy
        tile_parts = min(max_context // policy.tile_cuts.least, max(policy.tile_cuts.parts))
        parts = max(-(-max_context // policy.cuts.chunk), tile_parts)
        most = max(max_slots, policy.fine_readings)
        slots = min(num_tokens * parts + policy.fine_readings, most)
        readings = slots + num_tokens
        tiles = num_tokens // policy.tile_tokens + num_tokens // (policy.split_tokens + 1)
        tiles += min(policy.tile_round * policy.tile_cuts.rounds, tiles * max(0, tile_parts - 1))
        capacity = Capacity(
            narrow=readings,
            # Wide items have at least this many members, except the last of a group with several.
            wide=2 * readings // max(1, policy.wide_min_rows // policy.group),
            members=readings,
            merges=num_tokens,
            tiles=tiles,
            slots=slots,
        )
        blocks = min(num_tokens, max_rows) * -(-max_context // self._shape.block_size)
        return PlanLayout(self._windows, num_tokens, capacity, blocks, start=start)

    def fixed_plan(
        self, buffer: Tensor, layout: PlanLayout, parts: Parts, partials: launch.Partials
    ) -> TritonPlan:
        """Return a plan that executes the content of `buffer`, as `layout.write` left it, at each
        launch.

        Launches depend only on the layout. Work outside `parts` is not launched.
        """
        capacity = layout.capacity
        if not parts.tiles:
            capacity = capacity._replace(tiles=0)
        if not parts.wide:
            capacity = capacity._replace(wide=0)
        if not parts.merges:
            capacity = capacity._replace(merges=0)
        programs = self._programs(capacity)
        return self._views(buffer, layout, dict.fromkeys(self._windows, programs), partials)

    def partials(self, num_slots: int) -> launch.Partials:
        entries = num_slots * self._shape.num_heads
        return launch.Partials(
            torch.empty(entries * self._shape.head_dim, dtype=torch.float32, device=self._device),
            torch.empty(entries, dtype=torch.float32, device=self._device),
        )

    def _views(
        self,
        buffer: Tensor,
        layout: PlanLayout,
        programs: dict[int | None, Programs],
        partials: launch.Partials,
    ) -> TritonPlan:
        def view(place: int, count: int) -> Tensor:
            return buffer[place : place + count]

        capacity = layout.capacity
        work: dict[int | None, LayerWork] = {}
        for window, places in layout.lists.items():
            tokens, positions, slots = (view(p, capacity.members) for p in places.members)
            narrow, wide, merges, tiles = (view(place, 1) for place in places.counts)
            work[window] = LayerWork(
                view(places.narrow, 8 * capacity.narrow),
                view(places.wide, 8 * capacity.wide),
                (tokens, positions, slots),
                view(places.merges, 3 * capacity.merges),
                view(places.tiles, 8 * capacity.tiles),
                (narrow, wide, merges, tiles),
                programs[window],
                partials,
            )
        return TritonPlan(
            view(layout.slots, layout.num_tokens),
            view(layout.block_ids, layout.num_block_ids),
            work,
        )

    def _programs(self, capacity: Capacity) -> Programs:
        heads = self._shape.num_kv_heads
        narrow, wide, _ = self._tunings
        merges = capacity.merges * self._shape.num_heads
        merges *= launch.merge_tuning(capacity.merges).parts
        return Programs(
            self._grid(capacity.narrow * heads, narrow.programs_per_sm),
            self._grid(capacity.wide * heads, wide.programs_per_sm),
            self._grid(merges, _MERGE_PROGRAMS),
            capacity.tiles * heads,
        )

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
        sinks: Tensor | None = None,
    ) -> Tensor:
        cache = launch.cache_view(layer_kv)
        launch.run_write_kv(key, value, plan.slots, cache, shape=self._shape)
        return self._attend(query, cache, plan, window, scale, sinks)

    def forward_fused(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        norms: HeadNorms | None,
        layer_kv: Tensor,
        plan: TritonPlan,
        *,
        rotation: Rotation,
        window: int | None,
        scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        cache = launch.cache_view(layer_kv)
        query = launch.run_rotate_and_write(
            qkv, cos, sin, norms, plan.slots, cache, shape=self._shape, rotation=rotation
        )
        return self._attend(query, cache, plan, window, scale, sinks)

    def _attend(
        self,
        query: Tensor,
        cache: launch.CacheView,
        plan: TritonPlan,
        window: int | None,
        scale: float,
        sinks: Tensor | None,
    ) -> Tensor:
        shape, work = self._shape, plan.work[window]
        assert query.stride()[1:] == (shape.head_dim, 1)
        out = torch.empty(
            (query.shape[0], shape.num_heads * shape.head_dim),
            dtype=query.dtype,
            device=query.device,
        )
        call = launch.AttentionCall(
            query,
            cache,
            plan.block_ids,
            out,
            work.partials,
            shape,
            window,
            scale,
            self._softcap,
            sinks,
        )
        narrow, wide, prefill = self._tunings
        num_narrow, num_wide, num_merges, num_tiles = work.counts
        programs = work.programs
        if programs.tiles:
            launch.run_prefill(
                call,
                work.tiles,
                num_tiles,
                tuning=prefill,
                grid=programs.tiles,
                num_sms=self._num_sms,
            )
        main = torch.cuda.current_stream(self._device) if self._side_stream is not None else None
        if programs.wide:
            # NOTE: `out` and the partial outputs belong to the main stream, which waits here, so
            # that their memory is not reused too early.
            if self._side_stream is not None:
                self._side_stream.wait_stream(main)
            with torch.cuda.stream(self._side_stream):
                launch.run_split(
                    call, work.wide, num_wide, work.members, tuning=wide, grid=programs.wide
                )
        if programs.narrow:
            launch.run_split(
                call, work.narrow, num_narrow, work.members, tuning=narrow, grid=programs.narrow
            )
        if programs.wide and main is not None:
            main.wait_stream(self._side_stream)
        if programs.merges:
            tuning = launch.merge_tuning(len(work.merges) // 3)
            launch.run_merge(call, work.merges, num_merges, tuning=tuning, grid=programs.merges)
        return out

    def _grid(self, work: int, programs_per_sm: int) -> int:
        return min(work, self._num_sms * programs_per_sm)

    def _reserve(self, num_slots: int) -> None:
        """Reserve room for partial outputs; steps share it, as they follow each other on one
        stream.
        """
        if num_slots * self._shape.num_heads > len(self._partials.lse2):
            self._partials = self.partials(2 * num_slots)


def _round(tuning: launch.Tuning, num_sms: int, num_kv_heads: int) -> int:
    """Return the items or tiles, each one program per KV head, that the device runs
    concurrently.
    """
    return max(1, num_sms * tuning.programs_per_sm // num_kv_heads)
