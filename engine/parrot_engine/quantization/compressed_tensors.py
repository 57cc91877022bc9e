"""compressed-tensors, as LLM Compressor writes it: W4A16, W8A16, W8A8 of int8 and of FP8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from parrot_engine.exceptions import CheckpointError
from parrot_engine.quantization.fp8 import Float8, read_scaled
from parrot_engine.quantization.interface import (
    Activations,
    Quantization,
    centred,
    checked_scales,
    integer,
    names_of,
    refuse,
    required,
    unpack,
)
from parrot_engine.quantization.weights import QuantizedWeight

_FORMATS = "pack-quantized, int-quantized, float-quantized, naive-quantized"


@dataclass(frozen=True)
class PackedIntegers(Quantization):
    """Format `pack-quantized`: `weight_packed` `[out, words of in]`, unsigned codes."""

    suffixes: ClassVar[tuple[str, ...]] = (
        "weight_packed",
        "weight_scale",
        "weight_zero_point",
        "weight_g_idx",
        "weight_shape",
    )

    def read(self, prefix: str, stored: Mapping[str, Tensor]) -> Tensor | QuantizedWeight:
        packed = required(prefix, "weight_packed", stored)
        codes = unpack(f"{prefix}.weight_packed", packed, self.bits)
        # The last word of a row may be partial.
        rows, columns = (int(size) for size in required(prefix, "weight_shape", stored))
        if rows != codes.shape[0] or not 0 <= codes.shape[1] - columns < 32 // self.bits:
            raise CheckpointError(
                f"tensor {prefix}.weight_packed holds codes of shape {list(codes.shape)}, "
                f"{prefix}.weight_shape says {[rows, columns]}"
            )
        codes = centred(codes[:, :columns], self.bits).contiguous()
        width = self.block[1] or columns
        shape = (rows, -(-columns // width))
        scales = checked_scales(
            f"{prefix}.weight_scale", required(prefix, "weight_scale", stored), shape
        )
        return QuantizedWeight(
            codes,
            scales,
            (1, width),
            self._zeros(prefix, stored, shape),
            self._groups(prefix, stored, columns, shape[1]),
            bits=self.bits,
        )

    def _zeros(
        self, prefix: str, stored: Mapping[str, Tensor], shape: tuple[int, int]
    ) -> Tensor | None:
        if not self.zero_points:
            return None
        name = f"{prefix}.weight_zero_point"
        words = required(prefix, "weight_zero_point", stored)
        # Packed along the rows.
        zeros = centred(unpack(name, words.t(), self.bits).t()[: shape[0]], self.bits)
        if zeros.shape != shape:
            raise CheckpointError(
                f"tensor {name} stands for shape {list(zeros.shape)}, its scales for {list(shape)}"
            )
        return zeros.to(torch.int16).contiguous()

    @staticmethod
    def _groups(
        prefix: str, stored: Mapping[str, Tensor], columns: int, num_groups: int
    ) -> Tensor | None:
        if "weight_g_idx" not in stored:
            return None
        groups = stored["weight_g_idx"].long()
        if groups.shape != (columns,) or bool(((groups < 0) | (groups >= num_groups)).any()):
            raise CheckpointError(f"tensor {prefix}.weight_g_idx does not fit its weight")
        return groups


@dataclass(frozen=True)
class Integers(Quantization):
    """Formats `int-quantized` and `naive-quantized`: int8 codes in `weight`, scales beside them."""

    suffixes: ClassVar[tuple[str, ...]] = ("weight", "weight_scale", "input_scale")

    def read(self, prefix: str, stored: Mapping[str, Tensor]) -> Tensor | QuantizedWeight:
        codes = stored["weight"]
        if codes.dtype == torch.int8:
            return read_scaled(prefix, codes, stored, self.block)
        if codes.is_floating_point() and codes.itemsize >= 2:
            return codes
        raise CheckpointError(f"tensor {prefix}.weight holds {codes.dtype}; int8 can be read")


def read_config(config: Mapping[str, Any]) -> Quantization:
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise CheckpointError("quantization_config: `config_groups` must hold at least one group")
    kinds = [_object(group, "a group of config_groups") for group in groups.values()]
    if any(kind.get("weights") != kinds[0].get("weights") for kind in kinds[1:]):
        raise refuse("compressed-tensors with several kinds of weights", "one kind")
    if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise refuse("sparse compressed-tensors", "dense ones")
    form = config.get("format") or kinds[0].get("format")
    weights = _object(kinds[0].get("weights"), "`weights` of compressed-tensors")
    bits, number = integer(weights, "num_bits"), weights.get("type", "int")
    activations, static = kinds[0].get("input_activations"), False
    if activations is not None:
        static = not _object(activations, "`input_activations`").get("dynamic", False)
    scheme: Activations = "none" if activations is None else "static" if static else "dynamic"
    skipped, block = names_of(config, "ignore"), _block(weights)
    symmetric = bool(weights.get("symmetric", True))
    match block:
        case (0, 0):
            kind = "tensors"
        case (1, 0):
            kind = "rows"
        case (1, size):
            kind = f"groups of {size}"
        case (height, width):
            kind = f"blocks of {height} x {width}"
    text = f"compressed-tensors, {number} of {bits} bits, scales of {kind}, {scheme} activations"
    if form == "pack-quantized" and number == "int" and bits in (4, 8) and scheme == "none":
        if block[0] != 1:
            raise refuse(f"{text}, packed", "scales of rows or groups")
        return PackedIntegers(text, bits, block, scheme, skipped, not symmetric)
    if form in ("int-quantized", "naive-quantized") and (number, bits) == ("int", 8):
        if not symmetric:
            raise refuse(f"{text} with zero points", "symmetric weights")
        return Integers(text, bits, _unless_groups(block, text), scheme, skipped)
    if form in ("float-quantized", "naive-quantized") and (number, bits) == ("float", 8):
        return Float8(text, bits, _unless_groups(block, text), scheme, skipped)
    raise refuse(f"{text}, format {form!r}", _FORMATS)


def _unless_groups(block: tuple[int, int], text: str) -> tuple[int, int]:
    """Return a block size for `read_scaled`; refuses groups."""
    if block[0] == 1 and block[1]:
        raise refuse(text, "scales of tensors, rows or blocks")
    return block if all(block) else (0, 0)


def _block(weights: Mapping[str, Any]) -> tuple[int, int]:
    match weights.get("strategy", "tensor"):
        case "tensor":
            return (0, 0)
        case "channel":
            return (1, 0)
        case "group":
            return (1, integer(weights, "group_size"))
        case "block":
            match weights.get("block_structure"):
                case [int(rows), int(columns)] if rows > 0 and columns > 0:
                    return (rows, columns)
                case other:
                    raise CheckpointError(
                        f"quantization_config: `block_structure` must be two sizes, found {other!r}"
                    )
        case other:
            raise refuse(
                f"compressed-tensors of strategy {other!r}", "tensor, channel, group, block"
            )


def _object(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise CheckpointError(f"quantization_config: {what} must be an object, found {value!r}")
    return value
