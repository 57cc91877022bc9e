"""Low-rank additions to products (LoRA, arXiv 2106.09685) for several adapters at once.

The weights of a product's adapters are stacked in slots of one maximum rank, so loading an adapter
copies into a slot and changes no address. Tokens of a step are grouped by slot; tokens without an
adapter are in no group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

#: Limit for small steps, and tokens per tile in small and larger steps.
_FEW_TOKENS = 256
_TILE, _LARGE_TILE = 16, 64


class Run(NamedTuple):
    """Tokens of one slot: elements `begin` … `end` - 1 of the order."""

    slot: int
    begin: int
    end: int


class GroupedTokens(NamedTuple):
    """The tokens of a step with adapters, grouped by slot."""

    #: int32: tokens by slot, in their own order within a slot.
    order: npt.NDArray[np.int32]
    runs: tuple[Run, ...]

    @classmethod
    def of(cls, slots: Sequence[int], counts: Sequence[int]) -> GroupedTokens:
        """Group tokens, given each row's slot, -1 for none, and number of tokens."""
        by_token = np.repeat(np.array(slots, dtype=np.int32), counts)
        order = np.argsort(by_token, kind="stable").astype(np.int32)
        order = order[np.count_nonzero(by_token < 0) :]
        used, begins = np.unique(by_token[order], return_index=True)
        ends = [*begins[1:].tolist(), len(order)]
        return cls(order, tuple(map(Run, used.tolist(), begins.tolist(), ends)))

    def tiles(self, size: int) -> npt.NDArray[np.int32]:
        """Return `[n, 3]`: slot, begin and end of parts of the runs with up to `size` tokens."""
        parts = [
            (slot, start, min(start + size, end))
            for slot, begin, end in self.runs
            for start in range(begin, end, size)
        ]
        return np.array(parts, dtype=np.int32).reshape(-1, 3)


def tile_size(num_tokens: int) -> int:
    """Return the tokens per tile in steps of up to `num_tokens`."""
    return _TILE if num_tokens <= _FEW_TOKENS else _LARGE_TILE


def max_tiles(num_tokens: int, num_slots: int) -> int:
    """Return the maximum tiles of any step of up to `num_tokens` tokens."""
    return num_tokens // tile_size(num_tokens) + min(num_tokens, num_slots)


class AdapterRows(NamedTuple):
    """The tokens of a step by adapter slot, on the device."""

    #: int32: see `GroupedTokens.order`.
    order: Tensor
    #: int32 `[n, 3]`, see `GroupedTokens.tiles`; empty tiles have equal begin and end.
    tiles: Tensor
    tile_size: int
    #: As in `GroupedTokens`; None if they differ between replays of a graph.
    runs: tuple[Run, ...] | None = None


class LoraSlots:
    """The low-rank weights of one product: x A^T B^T for every slot, A `[r, in]`, B `[out, r]`.

    The product may stack several projections, each with its own A.
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
        """Make `count` slots of zeros; `sizes` are the rows of the projections."""
        # Round up to the smallest matrix instructions.
        max_rank = -(-max_rank // 16) * 16
        self.sizes = tuple(sizes)
        self.max_rank = max_rank
        #: `[count, projections x max_rank, in]`
        self.a = torch.zeros(count, len(sizes) * max_rank, in_size, device=device, dtype=dtype)
        #: `[count, out, max_rank]`, including the adapter's factor.
        self.b = torch.zeros(count, sum(sizes), max_rank, device=device, dtype=dtype)
        #: By slot, the rank of each projection, 0 without an addition; and the same as int32 on the
        #: device.
        self._ranks = [[0] * len(sizes) for _ in range(count)]
        self.used = torch.zeros(count, len(sizes), dtype=torch.int32, device=device)

    def write(self, slot: int, weights: Sequence[tuple[Tensor, Tensor] | None]) -> None:
        """Copy an adapter's A and B of each projection into a slot; None adds nothing.

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
    """Adapters' contribution to one product in a step."""

    slots: LoraSlots
    rows: AdapterRows
