"""The kernel and tile of a product of few tokens: a table measured offline.

Found by `python tools/engine_study.py matmul_sweep` (bench/results/engine.md) instead of
tuning at run time: what is compiled depends on the model and eight classes of batch sizes, never
on timing. Does not import triton.
"""

from __future__ import annotations

from functools import cache
from math import log2
from typing import Literal, NamedTuple

import torch

#: Most tokens that the kernels take.
MAX_TOKENS = 128
#: Most tokens of which a norm is fused: every program computes it anew.
MAX_NORM_TOKENS = 16
#: Most tokens that tiles read by pointer were measured with.
_MAX_POINTER_TOKENS = 16


class Tuning(NamedTuple):
    """Options of a product's kernel; see `skinny_matmul`."""

    #: `split`: a tile for x in two numbers of 8 bits, weights of FP8 only; `rounded`: in one;
    #: `specialized`: as `split`, by warps of different kinds (`hopper_product`).
    kind: Literal["vector", "tile", "split", "rounded", "specialized"]
    #: Most tokens, a power of two: 1 to 4 for vectors, 8 to 128 for tiles.
    tokens: int
    #: Outputs of a program (of either half where gate and up are multiplied).
    block_out: int
    #: Columns of a step.
    block_in: int
    num_warps: int
    num_stages: int
    #: Parts that the columns are cut into.
    splits: int = 1
    #: The copy engine fetches what it can (compute capability 9.0 and later; tiles only).
    descriptors: bool = False


#: Outputs of each group of warps of a `specialized` kernel.
GROUP_ROWS = 64


def num_counters(tuning: Tuning, out_size: int) -> int:
    """Counters of a product whose columns are cut: by program, or by group of its warps."""
    groups = tuning.block_out // GROUP_ROWS if tuning.kind == "specialized" else 1
    return -(-out_size // tuning.block_out) * groups


class Product(NamedTuple):
    """The properties of a product that the choice of a kernel depends on."""

    num_tokens: int
    #: Width of the output.
    out_size: int
    in_size: int
    dtype: torch.dtype
    #: Two weights of that width, gate and up, are read.
    gated: bool = False
    #: x is normalised on the way.
    norm: bool = False


#: Largest number of tokens of each class.
CLASSES = (1, 2, 4, 8, 16, 32, 64, 128)


class Vector(NamedTuple):
    """`vector_product`, a step having 256 columns a warp."""

    block_out: int
    num_warps: int
    num_stages: int


class Tile(NamedTuple):
    block_out: int
    block_in: int
    num_warps: int
    num_stages: int
    splits: int = 1
    descriptors: bool = False


def _streamed(
    block_out: int, block_in: int, num_warps: int, num_stages: int, splits: int = 1
) -> Tile:
    """A tile that the copy engine fetches."""
    return Tile(block_out, block_in, num_warps, num_stages, splits, descriptors=True)


#: Best of the sweeps for (gated, outputs, columns) and each of `CLASSES`; None: torch's is faster.
MEASURED: dict[tuple[bool, int, int], tuple[Vector | Tile | None, ...]] = {
    (False, 6144, 4096): (
        Vector(2, 8, 1),
        *(5 * (_streamed(64, 256, 4, 4),)),
        _streamed(64, 128, 4, 5),
        None,
    ),
    (False, 4096, 4096): (
        Vector(1, 8, 1),
        *(4 * (_streamed(64, 256, 4, 5),)),
        _streamed(64, 256, 4, 4),
        None,
        None,
    ),
    (True, 14336, 4096): (
        Vector(1, 8, 1),
        *(4 * (_streamed(64, 128, 4, 3),)),
        _streamed(128, 128, 4, 3),
        _streamed(64, 64, 4, 3),
        _streamed(64, 64, 4, 3),
    ),
    (True, 7168, 4096): (
        Vector(1, 8, 1),
        *(4 * (_streamed(64, 128, 8, 4),)),
        _streamed(64, 128, 4, 5),
        _streamed(64, 128, 4, 4),
        _streamed(64, 64, 4, 5),
    ),
    (False, 4096, 14336): (
        Vector(8, 2, 3),
        *(4 * (_streamed(64, 256, 4, 5),)),
        _streamed(64, 128, 4, 8),
        _streamed(64, 128, 4, 6),
        None,
    ),
    (False, 128256, 4096): (
        Vector(4, 8, 1),
        *(4 * (_streamed(128, 128, 4, 3),)),
        _streamed(64, 128, 4, 3),
        _streamed(128, 128, 4, 2),
        _streamed(128, 64, 4, 3),
    ),
    (False, 1152, 896): (
        Vector(2, 4, 3),
        Vector(2, 4, 3),
        Vector(1, 2, 1),
        Tile(16, 128, 2, 5),
        _streamed(64, 256, 4, 3),
        _streamed(64, 256, 4, 4),
        _streamed(64, 128, 4, 6),
        None,
    ),
    (False, 896, 896): (
        Vector(1, 1, 1),
        Vector(1, 1, 1),
        Vector(2, 2, 1),
        Tile(16, 128, 2, 5),
        Tile(16, 128, 2, 5),
        _streamed(64, 256, 4, 4),
        None,
        None,
    ),
    (True, 4864, 896): (
        Vector(2, 4, 3),
        Tile(64, 128, 2, 5),
        Tile(64, 128, 2, 5),
        Tile(64, 128, 2, 5),
        _streamed(64, 256, 4, 3),
        _streamed(64, 128, 4, 4),
        _streamed(64, 128, 4, 4),
        _streamed(64, 64, 4, 5),
    ),
    (False, 896, 4864): (
        Vector(1, 4, 1),
        Vector(2, 8, 1),
        Vector(2, 4, 3),
        *(2 * (_streamed(64, 256, 4, 5, 4),)),
        *(2 * (_streamed(64, 128, 4, 6, 4),)),
        None,
    ),
    (False, 151936, 896): (
        Vector(8, 4, 1),
        Tile(64, 128, 2, 5),
        Tile(64, 128, 2, 5),
        Tile(64, 128, 2, 5),
        _streamed(128, 128, 4, 3),
        _streamed(64, 128, 4, 3),
        _streamed(64, 64, 4, 6),
        None,
    ),
}


@cache
def tuning_for(product: Product, shared_memory: int, *, copy_engine: bool) -> Tuning | None:
    """The kernel for `product` where `shared_memory` bytes can be had; None: torch's own.

    A size that was not measured gets what the nearest one got. float32 beyond four tokens has no
    matrix instructions of full precision to gain from. Nor is a norm fused in float16 there: the
    scaled row is rounded before it is divided by its root mean square, and could overflow. Without
    a `copy_engine` (compute capability 9.0 and later) up to 16 tokens take tiles of the same
    size by pointer, which was not measured on such a device, and more tokens torch's product.
    """
    tokens = next((size for size in CLASSES if product.num_tokens <= size), None)
    if tokens is None:
        return None
    nearest = min(MEASURED, key=lambda size: _distance(product, *size))
    choice = MEASURED[nearest][CLASSES.index(tokens)]
    if choice is None:
        return None
    if isinstance(choice, Vector):
        block_in = 256 * choice.num_warps
        return Tuning(
            "vector", tokens, choice.block_out, block_in, choice.num_warps, choice.num_stages
        )
    if product.dtype is torch.float32 or (product.norm and not _fuses_norm(product)):
        return None
    # The copy engine fetches rows of whole 16 bytes.
    streams = copy_engine and product.in_size * product.dtype.itemsize % 16 == 0
    if choice.descriptors and not streams:
        if tokens > _MAX_POINTER_TOKENS:
            return None
        choice = choice._replace(descriptors=False)
    # Measured: 16 tokens in a tile of 16 take less time than 8 in a tile of 8.
    tuning = Tuning("tile", max(tokens, 16 if choice.descriptors else 8), *choice)
    if product.norm or product.gated:
        tuning = tuning._replace(splits=1)
    return _fit(tuning, product, shared_memory)


def _fuses_norm(product: Product) -> bool:
    return product.num_tokens <= MAX_NORM_TOKENS and product.dtype is not torch.float16


def _distance(product: Product, gated: bool, out_size: int, in_size: int) -> float:
    """The distance from a measured size: factors of two, and as much for the gate."""
    return (
        abs(log2(product.out_size / out_size))
        + abs(log2(product.in_size / in_size))
        + (product.gated != gated)
    )


def _fit(tuning: Tuning, product: Product, shared_memory: int) -> Tuning:
    """The same with as many columns, and then as many stages, as fit a program's memory."""
    rows = tuning.block_out * (2 if product.gated else 1) + tuning.tokens
    column = rows * product.dtype.itemsize
    budget = shared_memory - 4096
    block_in = tuning.block_in
    while block_in > 64 and 2 * block_in * column > budget:
        block_in //= 2
    # The last stage multiplies what the others have fetched: it has no buffer, unless four warps
    # multiply together, which read their operands where they were fetched to.
    spare = 0 if tuning.num_warps >= 4 else 1
    stages = min(tuning.num_stages, spare + budget // (block_in * column))
    return tuning._replace(block_in=block_in, num_stages=stages)
