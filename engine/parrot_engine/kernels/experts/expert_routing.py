"""Routing of a mixture of experts: each token's experts, and tokens sorted by expert.

A *pair* is a token and one of its experts: pair p belongs to token `p // top_k`. Products of many
pairs use tiles of one expert's pairs (`grouped_product`), padded to whole tiles. The tiles of an
expert are consecutive. The order of experts among the tiles depends on the programs' arrival and
affects only the place of results in scratch memory. All sizes follow from the number of tokens: no
value goes to the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Pairs that a program of `align` examines at once.
_BLOCK = 1024
_LARGE_BLOCK = 4096


class Chosen(NamedTuple):
    """The experts of each token."""

    #: int32 `[num_tokens, top_k]`, by falling probability: index among the experts held here, -1
    #: for others.
    experts: Tensor
    #: float32 `[num_tokens, top_k]`: factors on the experts' outputs.
    factors: Tensor
    #: int32 `[1]`: 0, in which `align` counts tiles.
    num_tiles: Tensor
    #: True if other ranks hold some of the experts.
    partial: bool = False


class Tiles(NamedTuple):
    """Pairs grouped into tiles of one expert each; int32."""

    #: `[capacity x size]`: the pairs of each tile, -1 for padding.
    pairs: Tensor
    #: `[capacity]`: the expert of each tile.
    experts: Tensor
    #: `[1]`: the number of tiles.
    count: Tensor
    #: Pairs per tile.
    size: int

    @property
    def capacity(self) -> int:
        return len(self.experts)


@triton.jit
def choose_experts(
    logits,
    experts,
    factors,
    num_tiles,
    NORMALIZE: tl.constexpr,
    EXPERTS: tl.constexpr,
    FIRST: tl.constexpr,
    HELD: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_BLOCK: tl.constexpr,
):
    """Run one program per token: softmax over all experts, then the `TOP_K` most probable ones.

    The first of equals wins. With `NORMALIZE` a token's factors add up to 1. A token with NaN
    logits gets NaN factors, and valid experts. `HELD` experts from `FIRST` on are held here.
    """
    token = tl.program_id(0)
    if token == 0:
        tl.store(num_tiles, 0)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < EXPERTS
    values = tl.load(logits + token.to(tl.int64) * EXPERTS + lanes, mask=inside, other=0.0)
    values = tl.where(inside, values.to(tl.float32), float("-inf"))
    weights = tl.exp(values - tl.max(values, 0))
    total = tl.sum(weights, 0)
    slots = tl.arange(0, TOP_K_BLOCK)
    chosen = tl.zeros([TOP_K_BLOCK], tl.int32)
    kept = tl.zeros([TOP_K_BLOCK], tl.float32)
    left = tl.where(inside, weights, -1.0)
    for slot in tl.static_range(TOP_K):
        best = tl.max(left, 0)
        expert = tl.min(tl.where(left == best, lanes, EXPERTS - 1), 0)
        chosen = tl.where(slots == slot, expert, chosen)
        kept = tl.where(slots == slot, best, kept)
        left = tl.where(lanes == expert, -1.0, left)
    # NOTE: `tl.max` drops NaN, a sum does not.
    factor = kept + total * 0.0
    factor /= tl.sum(tl.where(slots < TOP_K, kept, 0.0), 0) if NORMALIZE else total
    if HELD < EXPERTS:
        chosen -= FIRST
        chosen = tl.where((chosen >= 0) & (chosen < HELD), chosen, -1)
    tl.store(experts + token * TOP_K + slots, chosen, mask=slots < TOP_K)
    tl.store(factors + token * TOP_K + slots, factor, mask=slots < TOP_K)


@triton.jit(do_not_specialize=["num_pairs"])
def align_pairs(
    experts, pairs, tile_experts, num_tiles, num_pairs, TILE: tl.constexpr, BLOCK: tl.constexpr
):
    """Run one program per expert: find its pairs, reserve the tiles they fill, and write both."""
    expert = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    found = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_pairs, BLOCK):
        there = start + lanes < num_pairs
        own = tl.load(experts + start + lanes, mask=there, other=-1) == expert
        found += own.to(tl.int32)
    count = tl.sum(found, 0)
    if count > 0:
        tiles = tl.cdiv(count, TILE)
        first = tl.atomic_add(num_tiles, tiles, sem="relaxed")
        target = pairs + first * TILE
        before = 0
        for start in range(0, num_pairs, BLOCK):
            there = start + lanes < num_pairs
            own = tl.load(experts + start + lanes, mask=there, other=-1) == expert
            places = before + tl.cumsum(own.to(tl.int32), 0) - 1
            tl.store(target + places, start + lanes, mask=own)
            before += tl.sum(own.to(tl.int32), 0)
        padding = count + tl.arange(0, TILE)
        tl.store(target + padding, tl.full([TILE], -1, tl.int32), mask=padding < tiles * TILE)
        for start in range(0, tiles, BLOCK):
            index = start + lanes
            tl.store(
                tile_experts + first + index,
                tl.zeros([BLOCK], tl.int32) + expert,
                mask=index < tiles,
            )


def choose(logits: Tensor, top_k: int, *, normalize: bool, local: range | None = None) -> Chosen:
    """Choose the experts of each token from contiguous `logits` `[num_tokens, experts]`.

    `local` are the experts with weights here; None: all.
    """
    assert logits.is_contiguous()
    num_tokens, num_experts = logits.shape
    held = range(num_experts) if local is None else local
    experts = torch.empty((num_tokens, top_k), dtype=torch.int32, device=logits.device)
    factors = torch.empty((num_tokens, top_k), dtype=torch.float32, device=logits.device)
    num_tiles = torch.empty(1, dtype=torch.int32, device=logits.device)
    choose_experts[(num_tokens,)](
        logits,
        experts,
        factors,
        num_tiles,
        NORMALIZE=normalize,
        EXPERTS=num_experts,
        FIRST=held.start,
        HELD=len(held),
        BLOCK=triton.next_power_of_2(num_experts),
        TOP_K=top_k,
        TOP_K_BLOCK=triton.next_power_of_2(top_k),
        num_warps=1,
    )
    return Chosen(experts, factors, num_tiles, len(held) < num_experts)


def align(chosen: Chosen, num_experts: int, size: int) -> Tiles:
    """Build tiles of `size` pairs for the `num_experts` held here.

    Call it once per `chosen`, whose count of tiles it raises.
    """
    num_pairs = chosen.experts.numel()
    # The last tile of each expert with pairs may be partial.
    capacity = num_pairs // size + min(num_experts, num_pairs)
    device = chosen.experts.device
    pairs = torch.empty(capacity * size, dtype=torch.int32, device=device)
    experts = torch.empty(capacity, dtype=torch.int32, device=device)
    block = _BLOCK if num_pairs <= _BLOCK else _LARGE_BLOCK
    align_pairs[(num_experts,)](
        chosen.experts,
        pairs,
        experts,
        chosen.num_tiles,
        num_pairs,
        TILE=size,
        BLOCK=block,
        num_warps=4 if block == _BLOCK else 8,
    )
    return Tiles(pairs, experts, chosen.num_tiles, size)
