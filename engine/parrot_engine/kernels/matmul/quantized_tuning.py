"""The kernel and tile of a product with packed weights: a table measured offline.

Found by `python tools/engine_study.py quantized_matmul`, as `skinny_tuning` is by `matmul_sweep`.
Does not import triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log2
from typing import NamedTuple, TypeVar

import torch

from parrot_engine.kernels.matmul.skinny_tuning import GROUP_ROWS, MAX_NORM_TOKENS, Product, Tuning
from parrot_engine.quantization.packed import PackedWeight

#: Most tokens that the kernels take: beyond, torch multiplies, in 8 bits or a dequantised weight.
MAX_PACKED_TOKENS = {"fp8": 128, "fp8 in groups": 256}
_MAX_OTHER_TOKENS = 64

#: Columns of a step of `hopper_product`.
STEP_COLUMNS = 128

#: Programs of one token read rows in steps of so many bytes a warp: 16 a lane.
VECTOR_COLUMNS = 512


class Vector(NamedTuple):
    """Rows of a program of one token, and its warps, which read a row in one step."""

    block_out: int
    num_warps: int


class Tile(NamedTuple):
    """A tile that the copy engine fetches."""

    block_out: int
    block_in: int
    num_warps: int
    num_stages: int
    splits: int = 1


#: Best of the sweeps for (kind, gated, outputs, columns) and 1, up to 16, and more tokens.
MEASURED: dict[tuple[str, bool, int, int], tuple[Vector, Tile, Tile]] = {
    ("fp8", False, 6144, 4096): (Vector(4, 2), Tile(64, 256, 4, 5), Tile(64, 128, 4, 3, 4)),
    ("fp8", False, 4096, 4096): (Vector(4, 4), Tile(64, 256, 4, 3, 4), Tile(64, 256, 4, 4, 2)),
    ("fp8", True, 14336, 4096): (Vector(8, 2), Tile(128, 256, 8, 3), Tile(128, 128, 8, 4)),
    ("fp8", False, 4096, 14336): (Vector(4, 4), Tile(64, 256, 4, 3, 4), Tile(128, 128, 8, 6, 4)),
    ("fp8 in groups", False, 6144, 4096): (
        Vector(4, 2),
        Tile(64, 128, 4, 3, 4),
        Tile(64, 128, 4, 3, 4),
    ),
    ("fp8 in groups", False, 4096, 4096): (
        Vector(4, 4),
        Tile(64, 128, 4, 5, 4),
        Tile(64, 128, 4, 3, 4),
    ),
    ("fp8 in groups", True, 14336, 4096): (
        Vector(4, 4),
        Tile(128, 128, 4, 5),
        Tile(128, 128, 8, 4),
    ),
    ("fp8 in groups", False, 4096, 14336): (
        Vector(4, 4),
        Tile(64, 128, 4, 5, 4),
        Tile(128, 128, 8, 6, 4),
    ),
    ("int4 in groups", False, 6144, 4096): (
        Vector(8, 2),
        Tile(64, 128, 4, 3, 4),
        Tile(128, 128, 8, 3, 4),
    ),
    ("int4 in groups", False, 4096, 4096): (
        Vector(4, 4),
        Tile(64, 128, 4, 3, 4),
        Tile(128, 128, 8, 3, 4),
    ),
    ("int4 in groups", True, 14336, 4096): (
        Vector(4, 4),
        Tile(64, 128, 4, 3),
        Tile(128, 128, 8, 3),
    ),
    ("int4 in groups", False, 4096, 14336): (
        Vector(8, 2),
        Tile(64, 128, 4, 3, 4),
        Tile(128, 128, 8, 3, 4),
    ),
}


class Ring(NamedTuple):
    """A program of `hopper_product`: its outputs, buffers at most, and parts of the columns."""

    block_out: int
    num_stages: int
    splits: int = 1


#: The same for (kind, gated, outputs, columns) of `hopper_product` (engine-log, 48), up to
#: 32, up to 64, and more tokens.
MEASURED_RINGS: dict[tuple[str, bool, int, int], tuple[Ring, Ring, Ring]] = {
    ("fp8", False, 6144, 4096): (Ring(64, 4, 2), Ring(128, 4, 2), Ring(64, 3)),
    ("fp8", False, 4096, 4096): (Ring(64, 3, 4), Ring(64, 4, 2), Ring(64, 3, 2)),
    ("fp8", True, 14336, 4096): (Ring(64, 3), Ring(128, 3), Ring(128, 3)),
    ("fp8", False, 4096, 14336): (Ring(64, 4, 4), Ring(64, 9, 2), Ring(64, 5, 2)),
    ("fp8 in groups", False, 6144, 4096): (Ring(64, 3, 2), Ring(64, 3, 2), Ring(64, 3)),
    ("fp8 in groups", False, 4096, 4096): (Ring(64, 3, 4), Ring(64, 3, 2), Ring(64, 3, 2)),
    ("fp8 in groups", True, 14336, 4096): (Ring(64, 3), Ring(128, 3), Ring(128, 3)),
    ("fp8 in groups", False, 4096, 14336): (Ring(64, 3, 4), Ring(64, 3, 4), Ring(64, 4, 2)),
    ("fp8 in groups", False, 5120, 2048): (Ring(64, 3, 2), Ring(64, 3, 2), Ring(64, 4)),
    ("fp8 in groups", False, 2048, 4096): (Ring(64, 3, 4), Ring(64, 3, 4), Ring(64, 4, 3)),
}


def kind_of(weight: PackedWeight) -> str:
    """What a weight's speed depends on: `fp8`, `int8`, `fp8 in groups`, `int4 in groups`, …"""
    return f"{weight.kind} in groups" if is_grouped(weight) else weight.kind


def is_grouped(weight: PackedWeight) -> bool:
    """Whether scales differ along a row, or zero points have to be subtracted."""
    return weight.group < weight.in_size or weight.zeros is not None


def quantized_tuning(
    case: Product,
    weight: PackedWeight,
    shared_memory: int,
    *,
    copy_engine: bool,
    hopper: bool = False,
) -> Tuning | None:
    """The kernel for `case` with `weight`; None where the norm, or the product, is torch's.

    What was not measured gets what the nearest size did, codes of 8 bits that are integers what
    those of 4 bits did. `hopper`: of compute capability 9.0.
    """
    num_tokens, kind = case.num_tokens, kind_of(weight)
    most = MAX_PACKED_TOKENS.get(kind, _MAX_OTHER_TOKENS)
    if hopper and weight.block_scales is not None:
        # cuBLAS multiplies blocks of 128 by 128 in 8 bits.
        most = MAX_PACKED_TOKENS["fp8"]
    if num_tokens > most:
        return None
    measured = kind if weight.kind == "fp8" else "int4 in groups"
    vector, small, large = _nearest(MEASURED, case, measured)
    fuses = num_tokens <= MAX_NORM_TOKENS and case.dtype is not torch.float16
    if num_tokens == 1:
        columns = vector_columns(weight) * vector.num_warps
        tuning = Tuning("vector", 1, vector.block_out, columns, vector.num_warps, 1)
        if takes_vector(tuning, case, weight):
            return tuning if fuses or not case.norm else None
    tokens = min(128, max(16, 1 << (num_tokens - 1).bit_length()))
    # More blocks of tokens than one have not been compared with float64 on a device.
    if hopper and takes_ring(weight) and num_tokens <= tokens:
        few, more, many = _nearest(MEASURED_RINGS, case, kind)
        ring = few if tokens <= 32 else more if tokens <= 64 else many
        tuning = Tuning(
            "specialized",
            tokens,
            ring.block_out,
            STEP_COLUMNS,
            ring.block_out // GROUP_ROWS * 4,
            ring.num_stages,
            1 if case.gated else ring.splits,
            descriptors=True,
        )
        return fit(tuning, case, weight, shared_memory, copy_engine=copy_engine)
    tile = small if num_tokens <= 16 else large
    # The norm is part of what splits x; programs would each compute it anew.
    splits_x = weight.kind == "fp8" and copy_engine
    if case.norm and not splits_x and (not fuses or (tile.splits > 1 and not case.gated)):
        return None
    tuning = Tuning(
        "split" if splits_x else "tile",
        tokens,
        tile.block_out,
        tile.block_in,
        tile.num_warps,
        tile.num_stages,
        1 if case.gated or num_tokens > tokens else tile.splits,
        descriptors=True,
    )
    return fit(tuning, case, weight, shared_memory, copy_engine=copy_engine)


_Choice = TypeVar("_Choice")


def _nearest(
    table: Mapping[tuple[str, bool, int, int], _Choice], case: Product, kind: str
) -> _Choice:
    """What was best for the size of `kind` that is nearest to that of `case`."""
    sizes = [key for key in table if key[0] == kind]
    return table[min(sizes, key=lambda key: _distance(case, *key[1:]))]


def takes_ring(weight: PackedWeight) -> bool:
    """Whether `hopper_product` can multiply `weight`: in whole steps, within a group each."""
    return (
        weight.kind == "fp8"
        and weight.in_size % STEP_COLUMNS == 0
        and weight.group % STEP_COLUMNS == 0
    )


def _distance(case: Product, gated: bool, out_size: int, in_size: int) -> float:
    """The distance from a measured size: factors of two, and as much for the gate."""
    return (
        abs(log2(case.out_size / out_size))
        + abs(log2(case.in_size / in_size))
        + (case.gated != gated)
    )


def vector_columns(weight: PackedWeight) -> int:
    """Columns that a warp reads of a row in one go."""
    return VECTOR_COLUMNS * (2 if weight.kind == "int4" else 1)


def takes_vector(tuning: Tuning, case: Product, weight: PackedWeight) -> bool:
    """Whether the kernels of one token can multiply `weight`."""
    if weight.order is not None:
        return False
    if weight.kind == "int4":
        group = weight.group
        return (
            case.dtype is torch.bfloat16
            and weight.rows == 1
            and group & (group - 1) == 0
            and tuning.block_in % group == 0
        )
    if weight.zeros is not None:
        return False
    if weight.group == weight.in_size:
        return True
    # The rows of a program share their scales.
    return weight.rows % tuning.block_out == 0 and case.out_size % tuning.block_out == 0


def fit(
    tuning: Tuning, case: Product, weight: PackedWeight, shared_memory: int, *, copy_engine: bool
) -> Tuning:
    """The same within a group, with as many stages as fit a program's memory."""
    bits = 4 if weight.kind == "int4" else 8
    block_in = min(tuning.block_in, 1 << int(log2(weight.in_size)))
    if is_grouped(weight):
        # Groups are powers of two, or all columns.
        while weight.group % block_in:
            block_in //= 2
    row = block_in * bits // 8
    # The copy engine fetches rows of whole 16 bytes, and boxes of at least as many.
    descriptors = (
        tuning.descriptors and copy_engine and weight.codes.shape[1] % 16 == 0 and row >= 16
    )
    halves = 2 if case.gated else 1
    # Of 16 bits, or twice of 8.
    stage = tuning.block_out * halves * row + tuning.tokens * block_in * 2
    # Outputs on their way to whole lines take memory of their own where warps are of several kinds.
    other = 1024 + tuning.block_out * 128 if tuning.kind == "specialized" else 8192
    stages = max(1, min(tuning.num_stages, (shared_memory - other) // stage))
    return tuning._replace(block_in=block_in, num_stages=stages, descriptors=descriptors)
