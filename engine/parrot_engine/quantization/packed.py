"""Quantised weights in the layout that the kernels read (`kernels/matmul/quantized_matmul.py`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from parrot_engine.quantization.interface import Activations
from parrot_engine.quantization.weights import QuantizedWeight, stack

#: Rows and columns of cuBLAS's blocks.
BLOCK = 128
#: Columns of a chunk: with 4 bits, byte i of its 16 has columns i (lower half) and 16 + i.
CHUNK = 32


class PackedWeight(NamedTuple):
    """A matrix `[out, in]` of codes and scales; columns are in the order of their groups."""

    kind: Literal["fp8", "int8", "int4"]
    #: `[out, in]` float8_e4m3fn or int8; `[out, in / 2]` uint8 for 4 bits.
    codes: Tensor
    #: float32 `[groups, blocks of rows]`. Asynchronous copies need four bytes: with smaller scales
    #: each step of a kernel would wait for them.
    scales: Tensor
    #: float32, in the shape of `scales`; None: all are 0.
    zeros: Tensor | None
    #: The position in x of each column, int32 `[in]`; None: unchanged.
    order: Tensor | None
    #: Columns per group, rows per block.
    group: int
    rows: int
    activations: Activations
    #: `scales` of 128 by 128 blocks in cuBLAS's layout: float32 `[blocks of rows, groups]`, with
    #: the number of groups rounded up to a multiple of 4. None for other weights.
    block_scales: Tensor | None = None

    @property
    def in_size(self) -> int:
        return int(self.codes.shape[1]) * (2 if self.kind == "int4" else 1)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return `[out, in]` in `dtype`, with columns in the order of x."""
        if self.kind == "int4":
            pairs = self.codes.unflatten(1, (-1, CHUNK // 2))
            codes = torch.stack((pairs & 15, pairs >> 4), dim=2).flatten(1).to(dtype) - 8
        else:
            codes = self.codes.to(dtype)
        scales = self.scales.t().repeat_interleave(self.rows, dim=0)[: len(codes)]
        by_group = codes.unflatten(1, (-1, self.group))
        if self.zeros is not None:
            zeros = self.zeros.t().repeat_interleave(self.rows, dim=0)[: len(codes)]
            by_group = by_group - zeros[..., None].to(dtype)
        weight = (by_group * scales[..., None]).to(dtype).flatten(1)
        if self.order is None:
            return weight
        in_place = torch.empty_like(weight)
        in_place[:, self.order] = weight
        return in_place


def pack(
    weight: QuantizedWeight, device: torch.device, activations: Activations = "none"
) -> PackedWeight | None:
    """Pack a weight for the kernels, on `device`; None if they do not support it.

    They need whole chunks of columns, and groups of equal size.
    """
    out_size, in_size = weight.shape
    group = min(weight.block[1], in_size)
    order = None
    if group == in_size:
        weight = weight.by_row()
    if weight.groups is not None:
        places = torch.argsort(weight.groups, stable=True)
        if not torch.equal(
            weight.groups[places], torch.arange(in_size, device=places.device) // group
        ):
            return None
        order = places.to(device, torch.int32)
        weight = weight._replace(codes=weight.codes[:, places])
    if in_size % CHUNK or in_size % group or group % CHUNK:
        return None
    if group < in_size and group & (group - 1):
        return None
    codes = weight.codes.to(device)
    if weight.bits == 4:
        pairs = (codes + 8).to(torch.uint8).unflatten(1, (-1, 2, CHUNK // 2))
        codes = (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).flatten(1)
    zeros = weight.zeros
    kind: Literal["fp8", "int8", "int4"] = "int8" if codes.dtype is torch.int8 else "fp8"
    scales = weight.scales.to(device, torch.float32)
    has_blocks = kind == "fp8" and weight.bits == 8 and order is None and zeros is None
    return PackedWeight(
        "int4" if weight.bits == 4 else kind,
        codes.contiguous(),
        scales.t().contiguous(),
        None if zeros is None else zeros.to(device, torch.float32).t().contiguous(),
        order,
        group,
        min(weight.block[0], out_size),
        activations,
        _block_scales(scales) if has_blocks and _is_blocked(weight) else None,
    )


def _is_blocked(weight: QuantizedWeight) -> bool:
    """Return true if the weight consists of whole 128 by 128 blocks with a scale each."""
    return weight.block == (BLOCK, BLOCK) and not any(size % BLOCK for size in weight.shape)


def _block_scales(scales: Tensor) -> Tensor:
    """Pad scales `[blocks of rows, groups]` to a multiple of four groups."""
    return F.pad(scales, (0, -scales.shape[1] % 4)).contiguous()


def pack_stacked(
    weights: Sequence[Tensor | QuantizedWeight], device: torch.device, activations: Activations
) -> PackedWeight | None:
    """Pack stacked weights; None also if some are dense, or quantised differently."""
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    stacked = stack(quantized) if len(quantized) == len(weights) else None
    return None if stacked is None else pack(stacked, device, activations)


def above_each_other(weights: Iterable[PackedWeight | None], count: int) -> PackedWeight | None:
    """Stack `count` equally large weights; None if they differ or one is missing.

    Their columns may not have an order, because each weight would have its own.
    """
    whole: PackedWeight | None = None
    for index, weight in enumerate(weights):
        if weight is None or weight.order is not None:
            return None
        rows, blocks = len(weight.codes), weight.scales.shape[1]
        if whole is None:
            if rows % weight.rows:
                return None
            zeros = weight.zeros
            whole = weight._replace(
                codes=weight.codes.new_empty(count * rows, weight.codes.shape[1]),
                scales=weight.scales.new_empty(len(weight.scales), count * blocks),
                zeros=None if zeros is None else zeros.new_empty(len(zeros), count * blocks),
            )
        if not _are_alike(weight, whole):
            return None
        whole.codes[index * rows : (index + 1) * rows] = weight.codes
        whole.scales[:, index * blocks : (index + 1) * blocks] = weight.scales
        if whole.zeros is not None and weight.zeros is not None:
            whole.zeros[:, index * blocks : (index + 1) * blocks] = weight.zeros
    return whole


def _are_alike(a: PackedWeight, b: PackedWeight) -> bool:
    of_a = (a.kind, a.group, a.rows, a.zeros is None)
    return of_a == (b.kind, b.group, b.rows, b.zeros is None)
