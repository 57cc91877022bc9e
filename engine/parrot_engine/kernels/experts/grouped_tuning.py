"""The weights of a mixture of experts, and the choice of its kernels and tiles by shape and tokens.

Does not import triton.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from parrot_engine.kernels.matmul.quantized_tuning import fit
from parrot_engine.kernels.tuning import TABLES, Measured, Product, Tuning, for_tokens, read_table
from parrot_engine.quantization.packed import PackedWeight

#: Measured options by pairs per tile; 1 means pairs multiplied one by one. Vector kernels of packed
#: experts read a row in steps of `block_in` bytes, of which `num_stages` are unrolled and so
#: fetched at once. Eight warps halve a packed tile's outputs between them, so they need 128: with
#: 64 they would halve its pairs, and both halves would convert all of W.
TABLE = TABLES / "experts.csv"
#: Most tokens whose pairs are multiplied one by one, for any number of experts …
MAX_VECTOR_TOKENS = 4
#: … and if few pairs can share an expert: pairs are at most half as many as experts.
_MAX_SPARSE_VECTOR_TOKENS = 8
#: Possible numbers of pairs per tile.
TILES = (16, 32, 64, 128)
#: The same limit for packed 4-bit experts, whose kernels are bound by arithmetic.
_MAX_VECTOR_TOKENS_OF_4_BITS = 2
#: Pairs per tile from which products are bound by arithmetic instead of memory. x is then one 8-bit
#: number if the checkpoint asks for such activations.
_MIN_ROUNDED_PAIRS = 128


class PackedExperts(NamedTuple):
    """The matrices of all experts, stacked, as codes and scales."""

    #: `[experts x 2 x size, hidden_size]`: each expert's gate above its up.
    gate_up: PackedWeight
    #: `[experts x hidden_size, size]`
    down: PackedWeight


class ExpertWeights(NamedTuple):
    """Weights of experts: down(silu(gate(x)) * up(x)), or the bounded variant with a `limit`.

    The bounded variant is down(g * sigmoid(alpha * g) * (u + 1)), where g is gate(x), at most
    `limit`, and u is up(x), within `limit` on both sides.
    """

    #: `[experts, 2 x size, hidden_size]`: gate above up.
    gate_up: Tensor
    #: `[experts, hidden_size, size]`
    down: Tensor
    #: `[experts, 2 x size]`, `[experts, hidden_size]`.
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    alpha: float = 1.0
    limit: float | None = None
    #: The matrices as codes and scales; `gate_up` and `down` then have only shapes.
    packed: PackedExperts | None = None


class Mixture(NamedTuple):
    """The properties of a mixture of experts that determine the kernels."""

    num_tokens: int
    top_k: int
    #: All experts to choose from, wherever they are held.
    num_experts: int
    #: Sizes of a token's row, and of an expert's inner row.
    hidden_size: int
    size: int
    dtype: torch.dtype


class MixtureTuning(NamedTuple):
    """Options of the two products; `tokens` of a tile means pairs, equal for both."""

    gate_up: Tuning
    down: Tuning


def _pairs_of_tile(mixture: Mixture, max_vector_tokens: int | None = None) -> int | None:
    """Return the pairs per tile; None if pairs are multiplied one by one."""
    num_tokens, num_pairs = mixture.num_tokens, mixture.num_tokens * mixture.top_k
    if max_vector_tokens is None:
        is_sparse = 2 * num_pairs <= mixture.num_experts
        max_vector_tokens = _MAX_SPARSE_VECTOR_TOKENS if is_sparse else MAX_VECTOR_TOKENS
    if num_tokens <= max_vector_tokens:
        return None
    # Tiles as large as an expert's average share: while weights are the bottleneck, padding is
    # free, and fewer tiles read the weights less often.
    share = num_pairs / mixture.num_experts
    return next((size for size in TILES if share <= size), TILES[-1])


def _measured(weight: str, tile: int | None) -> MixtureTuning:
    """Return the measured options for tiles of `tile` pairs, or None for single pairs."""
    table = read_table(TABLE)
    products = (table[Measured(weight, gated, 0, 0)] for gated in (True, False))
    found = (for_tokens(classes, tile or 1) for classes in products)
    return MixtureTuning(*(t._replace(tokens=tile or 1) for t in found if t is not None))


@cache
def mixture_tuning(mixture: Mixture, shared_memory: int, *, copy_engine: bool) -> MixtureTuning:
    """Choose the kernels for `mixture` with `shared_memory` bytes.

    A `copy_engine` (compute capability 9.0 and later) fetches the weights of tiles.
    """
    tile = _pairs_of_tile(mixture)
    gate_up, down = _measured("dense", tile)
    if tile is None:
        return MixtureTuning(gate_up, down)
    return MixtureTuning(
        _fit(
            gate_up, mixture.hidden_size, mixture, shared_memory, copy_engine=copy_engine, halves=2
        ),
        _fit(down, mixture.size, mixture, shared_memory, copy_engine=copy_engine, halves=1),
    )


def _fit(
    tuning: Tuning,
    in_size: int,
    mixture: Mixture,
    shared_memory: int,
    *,
    copy_engine: bool,
    halves: int,
) -> Tuning:
    """Fit columns, then stages, of a tuning into a program's memory."""
    itemsize = mixture.dtype.itemsize
    if itemsize > 2:
        # Full precision has no matrix instructions, so sums stay in registers.
        tuning = tuning._replace(block_out=32, block_in=32, tokens=min(tuning.tokens, 32))
    column = (tuning.block_out * halves + tuning.tokens) * itemsize
    budget = shared_memory - 4096
    block_in = tuning.block_in
    while block_in > 32 and 2 * block_in * column > budget:
        block_in //= 2
    stages = max(1, min(tuning.num_stages, budget // (block_in * column)))
    # The copy engine fetches rows of whole 16 bytes.
    descriptors = copy_engine and itemsize == 2 and in_size * itemsize % 16 == 0
    return tuning._replace(block_in=block_in, num_stages=stages, descriptors=descriptors)


def packed_mixture_tuning(
    mixture: Mixture, packed: PackedExperts, shared_memory: int, *, copy_engine: bool
) -> MixtureTuning:
    """Choose the kernels for packed experts; for vectors `block_in` counts bytes, `num_stages`
    unrolled steps.
    """
    is_4_bits = packed.gate_up.kind == "int4"
    tile = _pairs_of_tile(mixture, _MAX_VECTOR_TOKENS_OF_4_BITS if is_4_bits else None)
    gate_up, down = _measured("int4" if is_4_bits else "packed", tile)
    if tile is None:
        return MixtureTuning(gate_up, down)
    hidden_size, size, dtype = mixture.hidden_size, mixture.size, mixture.dtype
    fitted = (
        _fit_packed(
            tuning._replace(descriptors=True),
            Product(mixture.num_tokens, out_size, weight.in_size, dtype, gated),
            weight,
            shared_memory,
            copy_engine=copy_engine,
        )
        for tuning, weight, out_size, gated in (
            (gate_up, packed.gate_up, size, True),
            (down, packed.down, hidden_size, False),
        )
    )
    return MixtureTuning(*fitted)


def _fit_packed(
    tuning: Tuning, case: Product, weight: PackedWeight, shared_memory: int, *, copy_engine: bool
) -> Tuning:
    """Fit columns into a group, then stages into memory; FP8 codes are multiplied directly on
    Hopper.
    """
    if weight.kind == "fp8" and copy_engine:
        is_rounded = tuning.tokens >= _MIN_ROUNDED_PAIRS and weight.activations != "none"
        tuning = tuning._replace(kind="rounded" if is_rounded else "split")
    return fit(tuning, case, weight, shared_memory, copy_engine=copy_engine)
