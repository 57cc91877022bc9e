"""FP8 (e4m3): one scale a tensor, a row, or a block of 128 x 128, as DeepSeek and Qwen publish."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from parrot_engine.exceptions import CheckpointError
from parrot_engine.quantization.interface import (
    Activations,
    Quantization,
    checked_scales,
    names_of,
    refuse,
)
from parrot_engine.quantization.weights import QuantizedWeight


@dataclass(frozen=True)
class Float8(Quantization):
    """Codes in `weight`, multipliers in `weight_scale` or `weight_scale_inv`."""

    suffixes: ClassVar[tuple[str, ...]] = (
        "weight",
        "weight_scale_inv",
        "weight_scale",
        "input_scale",
        "activation_scale",
    )

    @property
    def codes_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn

    def read(self, prefix: str, stored: Mapping[str, Tensor]) -> Tensor | QuantizedWeight:
        codes = stored["weight"]
        if codes.dtype != torch.float8_e4m3fn:
            if codes.is_floating_point() and codes.itemsize >= 2:
                return codes
            raise CheckpointError(
                f"tensor {prefix}.weight holds {codes.dtype}; float8_e4m3fn can be read"
            )
        return read_scaled(prefix, codes, stored, self.block)


def read_scaled(
    prefix: str, codes: Tensor, stored: Mapping[str, Tensor], block: tuple[int, int]
) -> QuantizedWeight:
    """Read 8-bit codes with scales per block of `block`; without a block, per tensor or row.

    Raises:
        CheckpointError: scales are missing or do not match.
    """
    if codes.ndim != 2:
        raise CheckpointError(f"tensor {prefix}.weight has shape {list(codes.shape)}, no matrix")
    suffix = next((s for s in ("weight_scale_inv", "weight_scale") if s in stored), None)
    if suffix is None:
        raise CheckpointError(
            f"the checkpoint lacks {prefix}.weight_scale (or weight_scale_inv), "
            f"while {prefix}.weight holds {codes.dtype}"
        )
    rows, columns = codes.shape
    scales, name = stored[suffix], f"{prefix}.{suffix}"
    if all(block):
        shape = (-(-rows // block[0]), -(-columns // block[1]))
        return QuantizedWeight(codes, checked_scales(name, scales, shape), block)
    if scales.numel() == 1:
        scales = checked_scales(name, scales.reshape(1, 1), (1, 1))
        return QuantizedWeight(codes, scales, (rows, columns))
    scales = scales[:, None] if scales.ndim == 1 else scales
    return QuantizedWeight(codes, checked_scales(name, scales, (rows, 1)), (1, columns))


def read_config(config: Mapping[str, Any]) -> Float8:
    """Read `quant_method` fp8, fbgemm_fp8, or FP8 of modelopt."""
    if config.get("quant_method") == "modelopt" and config.get("quant_algo") != "FP8":
        raise refuse(f"quantization 'modelopt' {config.get('quant_algo')!r}", "its FP8")
    number = config.get("fmt", "e4m3")
    if number not in ("e4m3", "float8_e4m3fn"):
        raise refuse(f"FP8 numbers of kind {number!r}", "e4m3")
    size = config.get("weight_block_size")
    block = (0, 0)
    if size is not None:
        if (
            not isinstance(size, list)
            or len(size) != 2
            or not all(isinstance(count, int) and count > 0 for count in size)
        ):
            raise CheckpointError(
                f"quantization_config: `weight_block_size` must be two sizes, found {size!r}"
            )
        block = (size[0], size[1])
    scheme: Activations
    match config.get("activation_scheme", "dynamic"):
        case "dynamic":
            scheme = "dynamic"
        case "static":
            scheme = "static"
        case other:
            raise refuse(f"FP8 with activation_scheme {other!r}", "dynamic, static")
    kind = f"blocks of {block[0]} x {block[1]}" if all(block) else "a scale each tensor or row"
    return Float8(
        description=f"FP8, {kind}, {scheme} activations",
        bits=8,
        block=block,
        activations=scheme,
        skipped=names_of(config, "modules_to_not_convert", "ignored_layers", "ignore"),
    )
