"""Low-rank additions to products (LoRA, arXiv 2106.09685) of several adapters at once.

The weights of a product's adapters are stacked, one slot each, of one rank at most, so that
loading an adapter copies into a slot and changes no address. Tokens of a step are grouped by slot;
tokens without an adapter are in no group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

#: Tokens of a tile up to so many tokens of a step, and beyond.
_FEW_TOKENS = 256
_TILE, _LARGE_TILE = 16, 64


class Run(NamedTuple):
    """Tokens of one slot: elements `begin` … `end` - 1 of the order."""

    slot: int
    begin: int
    end: int


class GroupedTokens(NamedTuple):
    """The tokens of a step that have adapters, grouped by slot."""

    #: int32: tokens by slot, those of one slot in their own order.
    order: npt.NDArray[np.int32]
    runs: tuple[Run, ...]

    @classmethod
    def of(cls, slots: Sequence[int], counts: Sequence[int]) -> GroupedTokens:
        """By row of a step its slot, -1 for none, and its number of tokens."""
        by_token = np.repeat(np.array(slots, dtype=np.int32), counts)
        order = np.argsort(by_token, kind="stable").astype(np.int32)
        order = order[np.count_nonzero(by_token < 0) :]
        used, begins = np.unique(by_token[order], return_index=True)
        ends = [*begins[1:].tolist(), len(order)]
        return cls(order, tuple(map(Run, used.tolist(), begins.tolist(), ends)))

    def tiles(self, size: int) -> npt.NDArray[np.int32]:
        """`[n, 3]`: slot, begin and end of parts of the runs of up to `size` tokens."""
        parts = [
            (slot, start, min(start + size, end))
            for slot, begin, end in self.runs
            for start in range(begin, end, size)
        ]
        return np.array(parts, dtype=np.int32).reshape(-1, 3)


def tile_size(num_tokens: int) -> int:
    """Tokens of a tile in steps of up to `num_tokens`."""
    return _TILE if num_tokens <= _FEW_TOKENS else _LARGE_TILE


def max_tiles(num_tokens: int, num_slots: int) -> int:
    """Tiles of any step of up to `num_tokens` tokens."""
    return num_tokens // tile_size(num_tokens) + min(num_tokens, num_slots)


class AdapterRows(NamedTuple):
    """The tokens of a step by the adapter slot they use, on the device."""

    #: int32: see `GroupedTokens.order`.
    order: Tensor
    #: int32 `[n, 3]`, see `GroupedTokens.tiles`; those of no tokens have equal begin and end.
    tiles: Tensor
    tile_size: int
    #: As in `GroupedTokens`; None where they differ from one replay of a graph to the next.
    runs: tuple[Run, ...] | None = None


class LoraSlots:
    """The low-rank weights of one product: x A^T B^T of every slot, A `[r, in]`, B `[out, r]`.

    The product may be several projections above each other, which have an A each.
    """

    def __init__(
        self,
        in_size: int,
        sizes: Sequence[int],
        *,
        count: int,
        max_rank: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """`count` slots of zeros; `sizes` are the rows of the projections."""
        # What the smallest matrix instructions take.
        max_rank = -(-max_rank // 16) * 16
        self.sizes = tuple(sizes)
        self.max_rank = max_rank
        #: `[count, projections x max_rank, in]`
        self.a = torch.zeros(count, len(sizes) * max_rank, in_size, device=device, dtype=dtype)
        #: `[count, out, max_rank]`, with the adapter's factor.
        self.b = torch.zeros(count, sum(sizes), max_rank, device=device, dtype=dtype)
        #: By slot the rank of each projection, 0 where there is no addition, and the same as int32
        #: on the device.
        self._ranks = [[0] * len(sizes) for _ in range(count)]
        self.used = torch.zeros(count, len(sizes), dtype=torch.int32, device=device)

    def write(self, slot: int, weights: Sequence[tuple[Tensor, Tensor] | None]) -> None:
        """Put an adapter's A and B of each projection into a slot; None adds nothing.

        On a GPU the copies are ordered on the current stream.
        """
        rank, begin = self.max_rank, 0
        a, b = self.a[slot], self.b[slot]
        for index, (pair, size) in enumerate(zip(weights, self.sizes, strict=True)):
            own_a = a[index * rank : (index + 1) * rank]
            own_b = b[begin : begin + size]
            used = 0
            if pair is not None:
                used = len(pair[0])
                own_a[:used].copy_(pair[0], non_blocking=True)
                own_b[:, :used].copy_(pair[1], non_blocking=True)
            own_a[used:].zero_()
            own_b[:, used:].zero_()
            self._ranks[slot][index] = used
            begin += size
        self.used[slot].copy_(torch.tensor(self._ranks[slot], dtype=torch.int32))

    def add(self, out: Tensor, x: Tensor, rows: AdapterRows) -> None:
        """Add the products of `x` `[num_tokens, in]` to `out` `[num_tokens, out]`."""
        assert rows.runs is not None
        for slot, begin, end in rows.runs:
            tokens = rows.order[begin:end]
            own, added = x[tokens], out[tokens]
            row = 0
            for index, (size, rank) in enumerate(zip(self.sizes, self._ranks[slot], strict=True)):
                if rank:
                    first = index * self.max_rank
                    inner = own @ self.a[slot, first : first + rank].t()
                    added[:, row : row + size] += inner @ self.b[slot, row : row + size, :rank].t()
                row += size
            out[tokens] = added


class LoraProduct(NamedTuple):
    """The contribution of adapters to one product in a step."""

    slots: LoraSlots
    rows: AdapterRows
