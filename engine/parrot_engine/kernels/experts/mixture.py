"""Launches the kernels of a mixture of experts with weights as tensors or as codes and scales."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from parrot_engine.kernels.experts.expert_routing import Chosen, Tiles, align
from parrot_engine.kernels.experts.grouped_product import (
    sum_experts,
    tile_product,
    vector_down,
    vector_gate_up,
)
from parrot_engine.kernels.experts.grouped_tuning import ExpertWeights, MixtureTuning
from parrot_engine.kernels.experts.packed_experts import (
    packed_tile_product,
    packed_vector_down,
    packed_vector_gate_up,
)
from parrot_engine.kernels.matmul.quantized_tuning import is_grouped
from parrot_engine.kernels.matmul.skinny_matmul import INTERPRETED
from parrot_engine.kernels.matmul.split_rows import split_rows
from parrot_engine.kernels.tuning import Tuning
from parrot_engine.quantization.packed import PackedWeight

_SUM_BLOCK = 1024


class _Matrix(NamedTuple):
    """One of the two matrices of all experts, with their biases."""

    dense: Tensor
    packed: PackedWeight | None
    bias: Tensor | None
    out_size: int

    def operands(self) -> tuple[Tensor, ...]:
        """Return the matrix in the form of the vector kernels."""
        weight = self.packed
        if weight is None:
            return (self.dense,)
        return weight.codes, weight.scales, weight.scales if weight.zeros is None else weight.zeros

    def constants(self, tuning: Tuning) -> dict[str, Any]:
        """Return a kernel's constants that depend on the matrix and on `tuning`."""
        if self.packed is not None:
            layout, blocks = layout_of(self.packed), blocks_of(tuning)
        else:
            layout = {"IN": self.dense.shape[2]}
            blocks = blocks_of(tuning._replace(kind="tile"))
        return {"HAS_BIAS": self.bias is not None, "OUT": self.out_size, **layout, **blocks}


def _gate_up(experts: ExpertWeights) -> _Matrix:
    packed = None if experts.packed is None else experts.packed.gate_up
    size = experts.gate_up.shape[1] // 2
    return _Matrix(experts.gate_up, packed, experts.gate_up_bias, size)


def _down(experts: ExpertWeights) -> _Matrix:
    packed = None if experts.packed is None else experts.packed.down
    return _Matrix(experts.down, packed, experts.down_bias, experts.down.shape[1])


def layout_of(weight: PackedWeight) -> dict[str, Any]:
    """Return the kernel constants that describe the layout of codes and scales."""
    return {
        "BITS": 4 if weight.kind == "int4" else 8,
        "HAS_ZEROS": weight.zeros is not None,
        "IN": weight.in_size,
        "GROUP": weight.group,
        "SCALE_ROWS": weight.rows,
        "SCALES": weight.scales.shape[1],
    }


def blocks_of(tuning: Tuning) -> dict[str, int]:
    """Return the kernel constants that describe a program's blocks."""
    return {
        "BLOCK_OUT": tuning.block_out,
        "BLOCK_IN": tuning.block_in,
        "UNROLL" if tuning.kind == "vector" else "STAGES": tuning.num_stages,
        "num_warps": tuning.num_warps,
    }


def _gate_up_vectors(x: Tensor, experts: ExpertWeights, chosen: Chosen, tuning: Tuning) -> Tensor:
    """Compute the inner row of each pair, `[pairs, size]`, for `x` `[num_tokens, in]`.

    For packed experts `tuning.block_in` counts bytes, here and in `_down_vectors`.
    """
    matrix, num_pairs = _gate_up(experts), chosen.experts.numel()
    size = matrix.out_size
    out = torch.empty((num_pairs, size), dtype=x.dtype, device=x.device)
    kernel = vector_gate_up if matrix.packed is None else packed_vector_gate_up
    kernel[(num_pairs, triton.cdiv(size, tuning.block_out))](
        x,
        *matrix.operands(),
        x if matrix.bias is None else matrix.bias,
        chosen.experts,
        out,
        ALPHA=experts.alpha,
        LIMIT=experts.limit or 0.0,
        PARTIAL=chosen.partial,
        TOP_K=chosen.experts.shape[1],
        **matrix.constants(tuning),
    )
    return out


def _down_vectors(
    x: Tensor, experts: ExpertWeights, chosen: Chosen, tuning: Tuning, residual: Tensor | None
) -> Tensor:
    """Compute each token's sum over its experts, `[num_tokens, out]`, with the residual."""
    matrix, (num_tokens, top_k) = _down(experts), chosen.experts.shape
    size = matrix.out_size
    out = torch.empty((num_tokens, size), dtype=x.dtype, device=x.device)
    kernel = vector_down if matrix.packed is None else packed_vector_down
    kernel[(num_tokens, triton.cdiv(size, tuning.block_out))](
        x,
        *matrix.operands(),
        x if matrix.bias is None else matrix.bias,
        chosen.experts,
        chosen.factors,
        x if residual is None else residual,
        out,
        HAS_RESIDUAL=residual is not None,
        PARTIAL=chosen.partial,
        TOP_K=top_k,
        **matrix.constants(tuning),
    )
    return out


def _tiled(
    x: Tensor,
    experts: ExpertWeights,
    tiles: Tiles,
    tuning: Tuning,
    *,
    num_pairs: int,
    factors: Tensor | None = None,
) -> Tensor:
    """Compute a product per pair, `[num_pairs, out]`; `tiles` have `tuning.tokens` pairs.

    Without `factors` it is the inner row, and `x` has a row per token. With factors, one per pair,
    it is the product with down, and `x` has a row per pair. For packed experts `tuning` decides
    whether x is multiplied as 8-bit numbers.
    """
    matrix = _gate_up(experts) if factors is None else _down(experts)
    weight, size = matrix.packed, matrix.out_size
    assert x.is_contiguous()
    assert tiles.size == tuning.tokens
    out = torch.empty((num_pairs, size), dtype=x.dtype, device=x.device)
    behind: tuple[Any, ...] = (
        x if matrix.bias is None else matrix.bias,
        tiles.pairs,
        tiles.experts,
        tiles.count,
        tiles.pairs if factors is None else factors,
        out,
    )
    constants = {
        "ALPHA": experts.alpha,
        "LIMIT": experts.limit or 0.0,
        "GATED": factors is None,
        "HAS_FACTORS": factors is not None,
        "TOP_K": num_pairs // len(x),
        "TILE": tuning.tokens,
        "DESCRIPTORS": tuning.descriptors,
        **matrix.constants(tuning),
    }
    # Neighbouring programs compute one tile's outputs, because they read the same rows of x.
    grid = triton.cdiv(size, tuning.block_out), tiles.capacity
    if weight is None:
        dense = matrix.dense
        assert dense.is_contiguous()
        boxes = _boxes(dense.view(-1, dense.shape[2]), tuning, tuning.block_in)
        tile_product[grid](x, dense, boxes, *behind, DOT_IN_FLOAT32=INTERPRETED, **constants)
        return out
    grouped = is_grouped(weight)
    assert not grouped or weight.group % tuning.block_in == 0
    parts = {"rounded": 1, "split": 2}.get(tuning.kind, 0)
    source, x_scales = x, weight.scales
    if parts:
        assert weight.kind == "fp8"
        source, x_scales = split_rows(x)
    codes, *scales = matrix.operands()
    boxes = _boxes(codes, tuning, tuning.block_in * constants["BITS"] // 8)
    packed_tile_product[grid](
        source,
        x_scales,
        codes,
        boxes,
        *scales,
        *behind,
        len(x),
        X_PARTS=parts,
        GROUPED=grouped,
        INTERPRETED=INTERPRETED,
        **constants,
    )
    return out


def _boxes(rows: Tensor, tuning: Tuning, columns: int) -> Any:
    """Return tile descriptors of a matrix for the copy engine, or the matrix itself."""
    if not tuning.descriptors:
        return rows
    return TensorDescriptor.from_tensor(rows, [tuning.block_out, columns])


def _sum_pairs(parts: Tensor, chosen: Chosen, residual: Tensor | None) -> Tensor:
    """Compute each token's sum over its pairs, `[num_tokens, size]`, with the residual."""
    num_tokens, size = len(chosen.experts), parts.shape[1]
    out = torch.empty((num_tokens, size), dtype=parts.dtype, device=parts.device)
    block = min(_SUM_BLOCK, triton.next_power_of_2(size))
    sum_experts[(num_tokens, triton.cdiv(size, block))](
        parts,
        chosen.experts,
        parts if residual is None else residual,
        out,
        HAS_RESIDUAL=residual is not None,
        PARTIAL=chosen.partial,
        TOP_K=len(parts) // num_tokens,
        SIZE=size,
        BLOCK=block,
        num_warps=4,
    )
    return out


def mixture(
    x: Tensor,
    experts: ExpertWeights,
    chosen: Chosen,
    tuning: MixtureTuning,
    residual: Tensor | None = None,
) -> Tensor:
    """Compute the sum of each token's experts, `[num_tokens, hidden_size]`, with the residual.

    `x` must be contiguous.
    """
    if tuning.gate_up.kind == "vector":
        inner = _gate_up_vectors(x, experts, chosen, tuning.gate_up)
        return _down_vectors(inner, experts, chosen, tuning.down, residual)
    num_pairs = chosen.experts.numel()
    tiles = align(chosen, len(experts.down), tuning.gate_up.tokens)
    inner = _tiled(x, experts, tiles, tuning.gate_up, num_pairs=num_pairs)
    parts = _tiled(inner, experts, tiles, tuning.down, num_pairs=num_pairs, factors=chosen.factors)
    return _sum_pairs(parts, chosen, residual)
