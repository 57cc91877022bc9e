"""The weights of a mixture of experts; its kernels and tiles by shape and number of tokens.

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

#: By the pairs of a tile, 1 being pairs multiplied one by one. Vectors of packed experts read a row
#: in steps of `block_in` bytes, of which `num_stages` are unrolled and so fetched at once. Eight
#: warps halve a packed tile's outputs between them, so they need 128: of 64 they would halve its
#: pairs, and both turn all of W into operands.
TABLE = TABLES / "experts.csv"
#: Most tokens whose pairs are multiplied one by one, whatever the number of experts …
MAX_VECTOR_TOKENS = 4
#: … and where few of their experts can be the same: pairs are at most half as many as experts.
_MAX_SPARSE_VECTOR_TOKENS = 8
#: Pairs of a tile.
TILES = (16, 32, 64, 128)
#: The same for packed experts of 4 bits, which compute too much.
_MAX_VECTOR_TOKENS_OF_4_BITS = 2
#: Pairs of a tile from which on products are arithmetic rather than bytes: x is then put into one
#: number of 8 bits where the checkpoint asks for such activations.
_MIN_ROUNDED_PAIRS = 128


class PackedExperts(NamedTuple):
    """The matrices of all experts above each other, as codes and scales."""

    #: `[experts x 2 x size, hidden_size]`: an expert's gate above its up.
    gate_up: PackedWeight
    #: `[experts x hidden_size, size]`
    down: PackedWeight


class ExpertWeights(NamedTuple):
    """Experts: down(silu(gate(x)) * up(x)), or with a `limit` their bounded kind.

    That is down(g * sigmoid(alpha * g) * (u + 1)), g being gate(x), at most `limit`, and u up(x),
    within `limit` on both sides.
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
    #: The matrices as codes and scales; `gate_up` and `down` then hold no more than their shapes.
    packed: PackedExperts | None = None


class Mixture(NamedTuple):
    """The properties of a mixture of experts that the choice of kernels depends on."""

    num_tokens: int
    top_k: int
    #: Those that are chosen from, wherever they are held.
    num_experts: int
    #: Of a token's row, and of an expert's inner row.
    hidden_size: int
    size: int
    dtype: torch.dtype


class MixtureTuning(NamedTuple):
    """Options of the two products; `tokens` of a tile are pairs, the same for both."""

    gate_up: Tuning
    down: Tuning


def _pairs_of_tile(mixture: Mixture, max_vector_tokens: int | None = None) -> int | None:
    """None: pairs are multiplied one by one."""
    num_tokens, num_pairs = mixture.num_tokens, mixture.num_tokens * mixture.top_k
    if max_vector_tokens is None:
        is_sparse = 2 * num_pairs <= mixture.num_experts
        max_vector_tokens = _MAX_SPARSE_VECTOR_TOKENS if is_sparse else MAX_VECTOR_TOKENS
    if num_tokens <= max_vector_tokens:
        return None
    # Tiles as large as an expert's share on average: padding costs nothing that counts while
    # weights are what is waited for, and few tiles read them less often.
    share = num_pairs / mixture.num_experts
    return next((size for size in TILES if share <= size), TILES[-1])


def _measured(weight: str, tile: int | None) -> MixtureTuning:
    """The measured options for tiles of `tile` pairs; None: for single pairs."""
    table = read_table(TABLE)
    products = (table[Measured(weight, gated, 0, 0)] for gated in (True, False))
    found = (for_tokens(classes, tile or 1) for classes in products)
    return MixtureTuning(*(t._replace(tokens=tile or 1) for t in found if t is not None))


@cache
def mixture_tuning(mixture: Mixture, shared_memory: int, *, copy_engine: bool) -> MixtureTuning:
    """The kernels for `mixture` where `shared_memory` bytes can be had.

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
    """The same with as many columns, and then as many stages, as fit a program's memory."""
    itemsize = mixture.dtype.itemsize
    if itemsize > 2:
        # No matrix instructions of full precision: sums stay in registers.
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
    """The same for packed experts; of vectors `block_in` are bytes, and `num_stages` unrolled."""
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
    """The same within a group, with as many stages as fit; codes of FP8 as they are on Hopper."""
    if weight.kind == "fp8" and copy_engine:
        is_rounded = tuning.tokens >= _MIN_ROUNDED_PAIRS and weight.activations != "none"
        tuning = tuning._replace(kind="rounded" if is_rounded else "split")
    return fit(tuning, case, weight, shared_memory, copy_engine=copy_engine)
