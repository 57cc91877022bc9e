"""Chooses the kernel and tile of a product of few tokens from offline measurements.

`parrot-gateway bench studies matmul_sweep` writes the table. Does not import triton.
"""

from __future__ import annotations

from functools import cache

import torch

from parrot_engine.kernels.tuning import TABLES, Product, Tuning, for_tokens, nearest, read_table

TABLE = TABLES / "dense.csv"
#: Most tokens that the kernels accept.
MAX_TOKENS = 128
#: Most tokens with a fused norm, because every program computes it anew.
MAX_NORM_TOKENS = 16
#: Most tokens for which tiles read by pointer were measured.
_MAX_POINTER_TOKENS = 16


@cache
def tuning_for(product: Product, shared_memory: int, *, copy_engine: bool) -> Tuning | None:
    """Choose the kernel for `product` with `shared_memory` bytes; None: torch's own.

    Unmeasured sizes get the nearest size's result. Beyond four tokens float32 has no full-precision
    matrix instructions to gain from, and float16 fuses no norm: the scaled row is rounded before it
    is divided by its root mean square, and could overflow. Without a `copy_engine` (compute
    capability 9.0 and later) up to 16 tokens use tiles of the same size by pointer, which was not
    measured on such a device, and more tokens use torch's product.
    """
    if product.num_tokens > MAX_TOKENS:
        return None
    tuning = for_tokens(nearest(read_table(TABLE), "dense", product), product.num_tokens)
    if tuning is None or tuning.kind == "vector":
        return tuning
    if product.dtype is torch.float32 or (product.norm and not _fuses_norm(product)):
        return None
    # The copy engine fetches rows of whole 16 bytes.
    streams = copy_engine and product.in_size * product.dtype.itemsize % 16 == 0
    if tuning.descriptors and not streams:
        if tuning.tokens > _MAX_POINTER_TOKENS:
            return None
        tuning = tuning._replace(descriptors=False)
    # Measured: 16 tokens in a tile of 16 take less time than 8 in a tile of 8.
    tuning = tuning._replace(tokens=max(tuning.tokens, 16 if tuning.descriptors else 8))
    if product.norm or product.gated:
        tuning = tuning._replace(splits=1)
    return _fit(tuning, product, shared_memory)


def _fuses_norm(product: Product) -> bool:
    return product.num_tokens <= MAX_NORM_TOKENS and product.dtype is not torch.float16


def _fit(tuning: Tuning, product: Product, shared_memory: int) -> Tuning:
    """Fit columns, then stages, into a program's memory."""
    rows = tuning.block_out * (2 if product.gated else 1) + tuning.tokens
    column = rows * product.dtype.itemsize
    budget = shared_memory - 4096
    block_in = tuning.block_in
    while block_in > 64 and 2 * block_in * column > budget:
        block_in //= 2
    # The last stage multiplies data that others fetched and needs no buffer, unless four warps
    # multiply together, which read operands from the fetch buffers.
    spare = 0 if tuning.num_warps >= 4 else 1
    stages = min(tuning.num_stages, spare + budget // (block_in * column))
    return tuning._replace(block_in=block_in, num_stages=stages)
