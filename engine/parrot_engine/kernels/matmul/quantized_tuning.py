"""The kernel and tile of a product with packed weights: tables measured offline.

`parrot-gateway bench studies quantized_matmul` writes them. Does not import triton.
"""

from __future__ import annotations

from math import log2
from pathlib import Path

import torch

from parrot_engine.kernels.matmul.skinny_tuning import MAX_NORM_TOKENS
from parrot_engine.kernels.tuning import TABLES, Product, Tuning, for_tokens, nearest, read_table
from parrot_engine.quantization.packed import PackedWeight

#: Of tiles for any GPU, and of the programs of `hopper_product`.
TABLE, HOPPER_TABLE = TABLES / "packed.csv", TABLES / "packed_hopper.csv"

#: Most tokens that the kernels take: beyond, torch multiplies, in 8 bits or a dequantised weight.
MAX_PACKED_TOKENS = {"fp8": 128, "fp8 in groups": 256}
_MAX_OTHER_TOKENS = 64

#: Columns of a step of `hopper_product`.
STEP_COLUMNS = 128

#: Programs of one token read rows in steps of so many bytes a warp: 16 a lane.
VECTOR_COLUMNS = 512


def kind_of(weight: PackedWeight) -> str:
    """The format that a weight's speed depends on: `fp8`, `int8`, `fp8 in groups`, …"""
    return f"{weight.kind} in groups" if is_grouped(weight) else weight.kind


def is_grouped(weight: PackedWeight) -> bool:
    """Return True if scales differ along a row, or zero points have to be subtracted."""
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
    choice = _measured(TABLE, measured, case)
    fuses = num_tokens <= MAX_NORM_TOKENS and case.dtype is not torch.float16
    if num_tokens == 1:
        vector = choice._replace(block_in=vector_columns(weight) * choice.num_warps)
        if takes_vector(vector, case, weight):
            return vector if fuses or not case.norm else None
        choice = _measured(TABLE, measured, case._replace(num_tokens=2))
    tokens = min(128, max(16, 1 << (num_tokens - 1).bit_length()))
    # More blocks of tokens than one have not been compared with float64 on a device.
    if hopper and takes_ring(weight) and num_tokens <= tokens:
        tuning = _measured(HOPPER_TABLE, kind, case)
        tuning = tuning._replace(tokens=tokens, splits=1 if case.gated else tuning.splits)
        return fit(tuning, case, weight, shared_memory, copy_engine=copy_engine)
    # The norm is part of what splits x; programs would each compute it anew.
    splits_x = weight.kind == "fp8" and copy_engine
    if case.norm and not splits_x and (not fuses or (choice.splits > 1 and not case.gated)):
        return None
    tuning = choice._replace(
        kind="split" if splits_x else "tile",
        tokens=tokens,
        splits=1 if case.gated or num_tokens > tokens else choice.splits,
    )
    return fit(tuning, case, weight, shared_memory, copy_engine=copy_engine)


def _measured(table: Path, kind: str, case: Product) -> Tuning:
    tuning = for_tokens(nearest(read_table(table), kind, case), case.num_tokens)
    # Which sizes are torch's is decided by `quantized_tuning`, not by a row.
    assert tuning is not None
    return tuning


def takes_ring(weight: PackedWeight) -> bool:
    """Return True if `hopper_product` can multiply `weight`: in whole steps within a group."""
    return (
        weight.kind == "fp8"
        and weight.in_size % STEP_COLUMNS == 0
        and weight.group % STEP_COLUMNS == 0
    )


def vector_columns(weight: PackedWeight) -> int:
    """Columns that a warp reads of a row in one go."""
    return VECTOR_COLUMNS * (2 if weight.kind == "int4" else 1)


def takes_vector(tuning: Tuning, case: Product, weight: PackedWeight) -> bool:
    """Return True if the kernels of one token can multiply `weight`."""
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
