"""Which kernel and tile a product of few tokens takes: a table measured offline.

Found by `python -m parrot_engine.bench.matmul --sweep` (docs/engine-performance.md) instead of
tuning at run time: what is compiled depends on the model and five classes of batch sizes, never
on timing. Does not import triton.
"""

from __future__ import annotations

from functools import cache
from typing import Literal, NamedTuple

import torch

#: Most tokens that the kernels take.
MAX_TOKENS = 16


class Tuning(NamedTuple):
    """How a product is computed; see `skinny_matmul`."""

    kind: Literal["vector", "tile"]
    #: Most tokens, a power of two: 1 to 4 for vectors, 8 or 16 for tiles.
    tokens: int
    #: Outputs of a program (of either half where gate and up are multiplied).
    block_out: int
    #: Columns of a step.
    block_in: int
    num_warps: int
    num_stages: int
    #: Parts that the columns are cut into.
    splits: int = 1


class Product(NamedTuple):
    """What is multiplied, as far as the choice of a kernel depends on it."""

    num_tokens: int
    #: Width of the output.
    out_size: int
    in_size: int
    dtype: torch.dtype
    #: Two weights of that width, gate and up, are read.
    gated: bool = False
    #: x is normalised on the way.
    norm: bool = False


@cache
def tuning_for(product: Product, shared_memory: int) -> Tuning | None:
    """The kernel for `product` where `shared_memory` bytes can be had; None: torch's own.

    float32 beyond four tokens has no matrix instructions of full precision to gain from. Nor is
    a norm fused in float16 there: the scaled row is rounded before it is divided by its root
    mean square, and could overflow.
    """
    tokens = next((size for size in (1, 2, 4, 8, 16) if product.num_tokens <= size), None)
    if tokens is None:
        return None
    if tokens <= 4:
        return _vector(product, tokens)
    if product.dtype is torch.float32 or (product.norm and product.dtype is torch.float16):
        return None
    return _fit(_tile(product, tokens), product, shared_memory)


def _vector(product: Product, tokens: int) -> Tuning:
    num_warps = 4 if product.in_size >= 1024 else 2
    block_out = 4 if product.out_size >= 16_384 else 2 if product.out_size >= 2048 else 1
    # Each token and each output of a tile holds eight sums a lane in registers.
    while block_out * tokens * (2 if product.gated else 1) > 8:
        block_out //= 2
    return Tuning("vector", tokens, max(1, block_out), 256 * num_warps, num_warps, 1)


def _tile(product: Product, tokens: int) -> Tuning:
    block_out = 16 if product.out_size < 4096 else 32
    # A narrow weight has too few tiles for the device, unless its columns are cut as well.
    fused = product.norm or product.gated
    splits = 4 if product.out_size < 2048 and product.in_size > 2048 and not fused else 1
    return Tuning("tile", tokens, block_out, 256, 4, 4, splits)


def _fit(tuning: Tuning, product: Product, shared_memory: int) -> Tuning:
    """The same with as many stages as fit the shared memory of a program."""
    rows = tuning.block_out * (2 if product.gated else 1) + tuning.tokens
    stage = rows * tuning.block_in * product.dtype.itemsize
    stages = max(1, min(tuning.num_stages, (shared_memory - 4096) // stage))
    return tuning._replace(num_stages=stages)
