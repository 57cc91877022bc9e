"""Chooses the kernel and tile of a product with packed weights from offline measurements.

`parrot-gateway bench studies quantized_matmul` writes the tables. Does not import triton.
"""

from __future__ import annotations

from math import log2
from pathlib import Path

import torch

from parrot_engine.kernels.matmul.skinny_tuning import MAX_NORM_TOKENS
from parrot_engine.kernels.tuning import TABLES, Product, Tuning, for_tokens, nearest, read_table
from parrot_engine.quantization.packed import PackedWeight

#: Tables of tiles for any GPU, and of programs of `hopper_product`.
TABLE, HOPPER_TABLE = TABLES / "packed.csv", TABLES / "packed_hopper.csv"

#: Most tokens for the kernels; beyond it torch multiplies, in 8 bits or with a dequantised weight.
MAX_PACKED_TOKENS = {"fp8": 128, "fp8 in groups": 256}
_MAX_OTHER_TOKENS = 64

#: Columns per step of `hopper_product`.
STEP_COLUMNS = 128

#: One-token programs read rows in steps of this many bytes per warp: 16 per lane.
VECTOR_COLUMNS = 512


def kind_of(weight: PackedWeight) -> str:
    """Return the format that determines a weight's speed: `fp8`, `int8`, `fp8 in groups`, …"""
    return f"{weight.kind} in groups" if is_grouped(weight) else weight.kind


def is_grouped(weight: PackedWeight) -> bool:
    """Return true if scales differ along a row, or zero points must be subtracted."""
    return weight.group < weight.in_size or weight.zeros is not None


def quantized_tuning(
    case: Product,
    weight: PackedWeight,
    shared_memory: int,
    *,
    copy_engine: bool,
    hopper: bool = False,
) -> Tuning | None:
    """Choose the kernel for `case` with `weight`; None if torch does the norm or the product.

    Unmeasured sizes get the nearest size's result; 8-bit integer codes get that of 4-bit codes.
    `hopper` means compute capability 9.0.
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
    # More than one block of tokens has not been compared with float64 on a device.
    if hopper and takes_ring(weight) and num_tokens <= tokens:
        tuning = _measured(HOPPER_TABLE, kind, case)
        tuning = tuning._replace(tokens=tokens, splits=1 if case.gated else tuning.splits)
        return fit(tuning, case, weight, shared_memory, copy_engine=copy_engine)
    # The kernel that splits x also normalises; otherwise every program would compute the norm anew.
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
    # `quantized_tuning` decides which sizes are torch's, not a row of the table.
    assert tuning is not None
    return tuning


def takes_ring(weight: PackedWeight) -> bool:
    """Return true if `hopper_product` can multiply `weight`: in whole steps within a group."""
    return (
        weight.kind == "fp8"
        and weight.in_size % STEP_COLUMNS == 0
        and weight.group % STEP_COLUMNS == 0
    )


def vector_columns(weight: PackedWeight) -> int:
    """Return the columns that a warp reads of a row at once."""
    return VECTOR_COLUMNS * (2 if weight.kind == "int4" else 1)


def takes_vector(tuning: Tuning, case: Product, weight: PackedWeight) -> bool:
    """Return true if the one-token kernels can multiply `weight`."""
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
    """Fit columns into a group, then stages into a program's memory."""
    bits = 4 if weight.kind == "int4" else 8
    block_in = min(tuning.block_in, 1 << int(log2(weight.in_size)))
    if is_grouped(weight):
        # Groups are powers of two, or all columns.
        while weight.group % block_in:
            block_in //= 2
    row = block_in * bits // 8
    # The copy engine fetches rows of whole 16 bytes, and boxes of at least 16 bytes.
    descriptors = (
        tuning.descriptors and copy_engine and weight.codes.shape[1] % 16 == 0 and row >= 16
    )
    halves = 2 if case.gated else 1
    # 16 bits, or two parts of 8.
    stage = tuning.block_out * halves * row + tuning.tokens * block_in * 2
    # Specialised warps need extra memory for outputs on their way to whole lines.
    other = 1024 + tuning.block_out * 128 if tuning.kind == "specialized" else 8192
    stages = max(1, min(tuning.num_stages, (shared_memory - other) // stage))
    return tuning._replace(block_in=block_in, num_stages=stages, descriptors=descriptors)
