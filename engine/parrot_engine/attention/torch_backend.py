"""Paged attention in plain torch: the CPU path, and the reference for kernels.

Decodes (rows of one token) are attended together: their blocks are gathered into one padded tensor,
and a mask of -inf excludes the padding. Rows of many tokens are processed one by one, in tiles of
queries, over exactly the keys that they may see. Query heads that share a KV head are folded, so K
and V are never repeated.

Padding cannot leak. A masked score is -inf, its weight exactly 0, and 0 x v is 0 unless v is NaN or
infinite. A padded slot lies either in the row's own blocks before its end, or behind the last token
in the row's last block. A block's tail is cleared when its first slot is written
(`_Writes.cleared`), so neither unwritten memory nor a former owner's NaN is ever read.

A quantized cache (`attention.storage`) is read as float32, and attended to in float32; the step's
own keys are taken as the cache would return them.

Reads of a common prefix are not shared between rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from parrot_engine.attention.interface import AttentionBackend, AttentionShape
from parrot_engine.attention.storage import (
    dequantize,
    quantize,
    read_quantized,
    tile_rows,
    write_quantized,
)
from parrot_engine.batch import BatchRow

#: Queries attended at a time, which bounds the rows of a mask.
_QUERY_TILE = 512
#: Decodes of up to this many blocks are always padded to one length: the waste costs less than
#: another group's calls.
_SMALL_GROUP_BLOCKS = 8


class _Writes(NamedTuple):
    """Targets of the new K and V."""

    #: `[num_tokens * kv_heads]` rows of the cache seen as `[.., head_dim]`.
    slots: Tensor
    #: Blocks whose first slot is written now and whose tail stays unwritten; None if there are
    #: none.
    cleared: Tensor | None


class _DecodeGroup(NamedTuple):
    """Rows of one token, padded to the same number of blocks."""

    #: Indices of their tokens in the step; None if they are all tokens, in order.
    tokens: Tensor | None
    size: int
    #: `[size * kv_heads * blocks]` rows of the cache seen as `[.., block_size * head_dim]`.
    tiles: Tensor
    #: `[size, 1, 1, keys]`, 0 or -inf; None if there is nothing to exclude.
    mask: Tensor | None


class _PrefillTile(NamedTuple):
    """Consecutive tokens of one row and the keys that they may see."""

    #: Tokens first … last-1 of the step.
    first: int
    last: int
    #: `[kv_heads * blocks]` rows of the cache seen as `[.., block_size * head_dim]`; None if the
    #: keys are those of the tile itself, all under a plain causal mask.
    tiles: Tensor | None
    #: First of the gathered keys to use.
    first_key: int
    last_key: int
    #: `[tokens, keys]`, 0 or -inf.
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """Index tensors of one step; the private tuples explain them."""

    writes: _Writes
    #: By window, because windowed layers read fewer blocks.
    decodes: dict[int | None, list[_DecodeGroup]]
    prefills: dict[int | None, list[_PrefillTile]]


class TorchAttention(AttentionBackend[TorchPlan]):
    def __init__(
        self,
        shape: AttentionShape,
        *,
        windows: Iterable[int | None],
        device: torch.device,
        dtype: torch.dtype,
        quantized: bool = False,
        softcap: float | None = None,
    ) -> None:
        """Make a back end for layers with these `windows` and a cache of `dtype`, or a quantized
        one.

        A `softcap` bounds the scores: softcap x tanh(score / softcap).
        """
        self._softcap = softcap
        self._shape = shape
        self._quantized = quantized
        #: Rows per (block, head) tile.
        self._tile_rows = tile_rows(shape.block_size, shape.head_dim, quantized=quantized)
        self._windows = sorted(set(windows), key=lambda window: window or 0)
        self._device = device
        #: Dtype of attention's operands.
        self._dtype = torch.float32 if quantized else dtype
        self._head_slots = torch.arange(shape.num_kv_heads, device=device) * self._tile_rows
        self._head_tiles = torch.arange(shape.num_kv_heads, device=device)

    def plan(self, rows: Sequence[BatchRow]) -> TorchPlan:
        """Plan a step, as in the interface; work in Python is linear in tokens and blocks."""
        rows = [row._replace(block_table=_ids_of(row)) for row in rows]
        offsets: list[int] = []
        decodes: list[int] = []
        prefills: list[int] = []
        offset = 0
        for index, row in enumerate(rows):
            offsets.append(offset)
            offset += len(row.token_ids)
            (decodes if len(row.token_ids) == 1 else prefills).append(index)
        return TorchPlan(
            writes=self._plan_writes(rows),
            decodes={
                window: [
                    self._plan_decodes(rows, offsets, group, window, num_tokens=offset)
                    for group in self._group_by_length(rows, decodes, window)
                ]
                for window in self._windows
            },
            prefills={
                window: [
                    tile
                    for index in prefills
                    for tile in self._plan_prefill(rows[index], offsets[index], window)
                ]
                for window in self._windows
            },
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layer_kv: Tensor,
        plan: TorchPlan,
        *,
        window: int | None,
        scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if plan.writes.cleared is not None:
            layer_kv.index_fill_(1, plan.writes.cleared, 0)
        slots = plan.writes.slots
        if not self._quantized:
            for part, new in zip(layer_kv, (key, value), strict=True):
                rows = part.view(-1, self._shape.head_dim)
                rows.index_copy_(0, slots, new.reshape(-1, self._shape.head_dim))
            return self._attend(query, key, value, layer_kv, plan, window, scale, sinks)
        (key_bits, key_scales), (value_bits, value_scales) = quantize(key), quantize(value)
        write_quantized(layer_kv[0], slots, key_bits.flatten(0, 1), key_scales.flatten())
        write_quantized(layer_kv[1], slots, value_bits.flatten(0, 1), value_scales.flatten())
        key, value = dequantize(key_bits, key_scales), dequantize(value_bits, value_scales)
        out = self._attend(query.float(), key, value, layer_kv, plan, window, scale, sinks)
        return out.to(query.dtype)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layer_kv: Tensor,
        plan: TorchPlan,
        window: int | None,
        scale: float,
        sinks: Tensor | None,
    ) -> Tensor:
        if sinks is not None:
            # One row per KV head, with an entry per query head.
            sinks = sinks.float().view(self._shape.num_kv_heads, -1)
        num_tokens = query.shape[0]
        decodes = plan.decodes[window]
        if len(decodes) == 1 and decodes[0].tokens is None:
            return self._decode(query, layer_kv, decodes[0], scale, sinks).view(num_tokens, -1)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for group in decodes:
            assert group.tokens is not None
            out[group.tokens] = self._decode(query[group.tokens], layer_kv, group, scale, sinks)
        for tile in plan.prefills[window]:
            span = slice(tile.first, tile.last)
            out[span] = self._prefill(
                query[span], key[span], value[span], layer_kv, tile, scale, sinks
            )
        return out.view(num_tokens, -1)

    def _plan_writes(self, rows: Sequence[BatchRow]) -> _Writes:
        block_size = self._shape.block_size
        stride = self._tile_rows * self._shape.num_kv_heads
        slots: list[int] = []
        cleared: list[int] = []
        for row in rows:
            table, start, end = row.block_table, row.start, row.start + len(row.token_ids)
            slots += [
                table[position // block_size] * stride + position % block_size
                for position in range(start, end)
            ]
            tail = end % block_size
            if tail and end - tail >= start:
                cleared.append(table[end // block_size])
        base = torch.tensor(slots, device=self._device)
        return _Writes(
            slots=(base[:, None] + self._head_slots).view(-1),
            cleared=torch.tensor(cleared, device=self._device) if cleared else None,
        )

    def _first_block(self, position: int, window: int | None) -> int:
        """Return the earliest block that the token at `position` reads."""
        if window is None:
            return 0
        return max(0, position - window + 1) // self._shape.block_size

    def _group_by_length(
        self, rows: Sequence[BatchRow], decodes: list[int], window: int | None
    ) -> list[list[int]]:
        """Group decodes so that no row is padded to more than twice its own blocks."""

        def blocks(index: int) -> int:
            position = rows[index].start
            return position // self._shape.block_size - self._first_block(position, window) + 1

        if not decodes:
            return []
        longest = max(map(blocks, decodes))
        if longest <= _SMALL_GROUP_BLOCKS:
            return [decodes]
        groups: list[list[int]] = []
        limit = 0
        for index in sorted(decodes, key=blocks):
            if blocks(index) > limit:
                limit = max(2 * blocks(index), _SMALL_GROUP_BLOCKS)
                groups.append([])
            groups[-1].append(index)
        return groups

    def _plan_decodes(
        self,
        rows: Sequence[BatchRow],
        offsets: list[int],
        group: list[int],
        window: int | None,
        *,
        num_tokens: int,
    ) -> _DecodeGroup:
        block_size = self._shape.block_size
        tables: list[list[int]] = []
        ends: list[int] = []
        starts: list[int] = []
        for index in group:
            position = rows[index].start
            first = self._first_block(position, window)
            tables.append(_ids_of(rows[index])[first : position // block_size + 1])
            ends.append(position - first * block_size)
            starts.append(
                0 if window is None else max(0, position - window + 1 - first * block_size)
            )
        num_blocks = max(map(len, tables))
        # Padding repeats a block of the row itself, so any content is the row's own.
        padded = [table + table[:1] * (num_blocks - len(table)) for table in tables]
        blocks = torch.tensor(padded, device=self._device)
        tiles = blocks[:, None, :] * self._shape.num_kv_heads + self._head_tiles[:, None]
        num_keys = num_blocks * block_size
        mask = None
        if any(starts) or min(ends) < num_keys - 1:
            keys = torch.arange(num_keys, device=self._device)
            excluded = keys > torch.tensor(ends, device=self._device)[:, None]
            if any(starts):
                excluded |= keys < torch.tensor(starts, device=self._device)[:, None]
            mask = self._mask(excluded)[:, None, None, :]
        in_order = len(group) == num_tokens and all(map(int.__le__, group, group[1:]))
        tokens = None
        if not in_order:
            tokens = torch.tensor([offsets[index] for index in group], device=self._device)
        return _DecodeGroup(tokens, len(group), tiles.view(-1), mask)

    def _plan_prefill(self, row: BatchRow, offset: int, window: int | None) -> list[_PrefillTile]:
        """Return tiles of at most `_QUERY_TILE` tokens, each over its own keys."""
        num_tokens, block_size = len(row.token_ids), self._shape.block_size
        unwindowed = window is None or window >= num_tokens
        if row.start == 0 and unwindowed and num_tokens <= _QUERY_TILE:
            return [_PrefillTile(offset, offset + num_tokens, None, 0, num_tokens, None)]
        tiles = []
        for first in range(0, num_tokens, _QUERY_TILE):
            last = min(first + _QUERY_TILE, num_tokens)
            begin, end = row.start + first, row.start + last
            first_block = self._first_block(begin, window)
            base = first_block * block_size
            table = row.block_table[first_block : (end - 1) // block_size + 1]
            blocks = torch.tensor(table, device=self._device)
            first_key = 0 if window is None else max(0, begin - window + 1 - base)
            last_key = end - base
            keys = torch.arange(base + first_key, base + last_key, device=self._device)
            queries = torch.arange(begin, end, device=self._device)[:, None]
            excluded = keys > queries
            if window is not None:
                excluded |= keys <= queries - window
            tiles.append(
                _PrefillTile(
                    first=offset + first,
                    last=offset + last,
                    tiles=(blocks * self._shape.num_kv_heads + self._head_tiles[:, None]).view(-1),
                    first_key=first_key,
                    last_key=last_key,
                    mask=self._mask(excluded),
                )
            )
        return tiles

    def _mask(self, excluded: Tensor) -> Tensor:
        mask = torch.zeros(excluded.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(excluded, float("-inf"))

    def _gather(self, layer_kv: Tensor, tiles: Tensor) -> tuple[Tensor, Tensor]:
        """Gather K and V of whole (block, head) tiles, `[len(tiles), block_size * head_dim]`."""
        key, value = (part.flatten(0, 1).index_select(0, tiles) for part in layer_kv)
        if self._quantized:
            key, value = read_quantized(key), read_quantized(value)
        return key.flatten(1), value.flatten(1)

    def _decode(
        self,
        query: Tensor,
        layer_kv: Tensor,
        group: _DecodeGroup,
        scale: float,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attend; returns `[size, num_heads, head_dim]` for queries of the same shape."""
        _, kv_heads, head_dim, _ = self._shape
        key, value = self._gather(layer_kv, group.tiles)
        attended = self._weigh(
            query.view(group.size, kv_heads, -1, head_dim),
            key.view(group.size, kv_heads, -1, head_dim),
            value.view(group.size, kv_heads, -1, head_dim),
            group.mask,
            scale,
            None if sinks is None else sinks[..., None],
        )
        return attended.reshape(group.size, -1, head_dim)

    def _prefill(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layer_kv: Tensor,
        tile: _PrefillTile,
        scale: float,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attend for one tile, whose own tokens' K and V are given; returns `[tokens, num_heads,
        head_dim]`.
        """
        num_heads, kv_heads, head_dim, _ = self._shape
        if tile.tiles is None:
            key, value = key.transpose(0, 1), value.transpose(0, 1)
        else:
            keys, values = self._gather(layer_kv, tile.tiles)
            used = slice(tile.first_key, tile.last_key)
            key = keys.view(kv_heads, -1, head_dim)[:, used]
            value = values.view(kv_heads, -1, head_dim)[:, used]
        group = num_heads // kv_heads
        # KV heads take the batch dimension; K and V are broadcast over the query heads.
        attended = self._weigh(
            query.view(-1, kv_heads, group, head_dim).permute(1, 2, 0, 3),
            key[:, None].expand(-1, group, -1, -1),
            value[:, None].expand(-1, group, -1, -1),
            tile.mask,
            scale,
            None if sinks is None else sinks[..., None, None],
            is_causal=tile.mask is None,
        )
        return attended.permute(2, 0, 1, 3).reshape(-1, num_heads, head_dim)

    def _weigh(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scale: float,
        sinks: Tensor | None,
        *,
        is_causal: bool = False,
    ) -> Tensor:
        """Return the weighted sum of values for each query; the last two axes are tokens and
        elements.

        `sinks` are broadcast over the scores of a key.
        """
        if self._softcap is None and sinks is None:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=is_causal, scale=scale
            )
        scores = query @ key.transpose(-1, -2) * scale
        if self._softcap is not None:
            scores = torch.tanh(scores / self._softcap) * self._softcap
        if is_causal:
            unseen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(unseen, float("-inf"))
        elif mask is not None:
            scores = scores + mask
        if sinks is not None:
            beside = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, beside), dim=-1)
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype)
        return weights[..., : value.shape[-2]] @ value


def _ids_of(row: BatchRow) -> list[int]:
    """Return the block table as Python integers, which are faster in lists."""
    table = row.block_table
    return table if isinstance(table, list) else table.tolist()
