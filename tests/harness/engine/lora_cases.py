"""Cases of low-rank products, for the interpreter and for a device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from parrot_engine.kernels.matmul.lora_product import StackedWeights, add_lora
from parrot_engine.models.lora import GroupedTokens, LoraSlots
from torch import Tensor


class LoraCase(NamedTuple):
    """A product, its adapters' ranks (0: none of that projection), and the rows of a step."""

    in_size: int
    sizes: tuple[int, ...]
    max_rank: int
    #: By slot, of each projection.
    ranks: tuple[tuple[int, ...], ...]
    #: By row: slot or -1, and tokens.
    rows: tuple[tuple[int, int], ...]
    num_cores: int = 1


CASES = {
    "one adapter, one token": LoraCase(64, (48,), 16, ((4,),), ((0, 1),)),
    "fused, mixed with the base": LoraCase(
        100, (70, 16, 30), 8, ((8, 0, 3), (1, 8, 0), (0, 0, 0)),
        ((1, 1), (-1, 3), (0, 17), (2, 2), (1, 20), (-1, 1), (0, 1)),
    ),
    "columns are divided": LoraCase(700, (40, 40), 16, ((16, 5),), ((-1, 2), (0, 5)), 64),
    "large ranks": LoraCase(130, (33,), 100, ((100,), (65,)), ((1, 3), (0, 2)), 8),
}  # fmt: skip


def make_slots(case: LoraCase, dtype: torch.dtype, device: torch.device) -> LoraSlots:
    """Slots with random weights; those overwritten held others before."""
    slots = LoraSlots(
        case.in_size,
        case.sizes,
        count=len(case.ranks),
        max_rank=case.max_rank,
        device=device,
        dtype=dtype,
    )
    for turn in (1, 0):
        for slot, ranks in enumerate(case.ranks):
            drawn: list[tuple[Tensor, Tensor] | None] = []
            for size, rank in zip(case.sizes, ranks, strict=True):
                rank = case.max_rank if turn else rank
                a, b = torch.randn(rank, case.in_size), torch.randn(size, rank)
                drawn.append((a.to(dtype), b.to(dtype)) if rank else None)
            slots.write(slot, drawn)
    return slots


def error_of(case: LoraCase, dtype: torch.dtype, device: torch.device, tile_size: int) -> float:
    """The largest difference from float64, over the largest number there; rows without an adapter
    are as they were."""
    torch.manual_seed(0)
    slots = make_slots(case, dtype, device)
    num_tokens = sum(count for _, count in case.rows)
    x = torch.randn(num_tokens, case.in_size).to(device, dtype)
    out = torch.randn(num_tokens, sum(case.sizes)).to(device, dtype)
    expected, before = out.double(), out.clone()
    grouped = GroupedTokens.of(*zip(*case.rows, strict=True))
    for slot, begin, end in grouped.runs:
        tokens, row = grouped.order[begin:end].tolist(), 0
        for index, size in enumerate(case.sizes):
            first = index * slots.max_rank
            a = slots.a[slot, first : first + slots.max_rank].double()
            b = slots.b[slot, row : row + size].double()
            expected[tokens, row : row + size] += x[tokens].double() @ a.T @ b.T
            row += size
    tiles = torch.zeros(len(grouped.tiles(tile_size)) + 2, 3, dtype=torch.int32)
    tiles[:-2] = torch.from_numpy(grouped.tiles(tile_size))
    add_lora(
        out,
        x,
        StackedWeights(slots.a, slots.b, slots.used, slots.sizes),
        torch.from_numpy(grouped.order).to(device),
        tiles.to(device),
        tile_size,
        num_cores=case.num_cores,
    )
    untouched = sorted(set(range(num_tokens)) - set(grouped.order.tolist()))
    assert torch.equal(out[untouched], before[untouched])
    return float((out.double() - expected).abs().max() / expected.abs().max())
