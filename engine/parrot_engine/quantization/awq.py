"""AWQ (arXiv 2306.00978) as AutoAWQ writes it: 4 bits with zero points, layout `gemm`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from parrot_engine.exceptions import CheckpointError
from parrot_engine.quantization.interface import (
    Quantization,
    centred,
    checked_scales,
    group_size,
    integer,
    names_of,
    refuse,
    required,
    unpack,
)
from parrot_engine.quantization.weights import QuantizedWeight

#: Position of columns 0 to 7 in a word of eight codes, lowest bits first.
_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class Awq(Quantization):
    """`qweight` `[in, out / 8]`, `qzeros` `[groups, out / 8]`, `scales` `[groups, out]`."""

    suffixes: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales")

    def read(self, prefix: str, stored: Mapping[str, Tensor]) -> QuantizedWeight:
        codes = _ordered(unpack(f"{prefix}.qweight", required(prefix, "qweight", stored), 4))
        in_size, out_size = codes.shape
        group = self.block[1] or in_size
        shape = (-(-in_size // group), out_size)
        scales = checked_scales(f"{prefix}.scales", required(prefix, "scales", stored), shape)
        zeros = _ordered(unpack(f"{prefix}.qzeros", required(prefix, "qzeros", stored), 4))
        if zeros.shape != scales.shape:
            raise CheckpointError(
                f"tensor {prefix}.qzeros stands for shape {list(zeros.shape)}, "
                f"its scales for {list(shape)}"
            )
        return QuantizedWeight(
            centred(codes.t(), 4).contiguous(),
            scales.t().contiguous(),
            (1, group),
            centred(zeros.t(), 4).to(torch.int16).contiguous(),
            bits=4,
        )


def _ordered(codes: Tensor) -> Tensor:
    return codes.unflatten(1, (-1, 8))[..., list(_ORDER)].flatten(1)


def read_config(config: Mapping[str, Any]) -> Awq:
    bits = integer(config, "bits" if "bits" in config else "w_bit")
    if bits != 4:
        raise refuse(f"AWQ of {bits} bits", "4")
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm":
        raise refuse(f"AWQ of version {version!r}", "gemm")
    if not config.get("zero_point", True):
        raise refuse("AWQ without zero points", "with them")
    if "group_size" not in config and "q_group_size" in config:
        config = {**config, "group_size": config["q_group_size"]}
    size = group_size(config)
    return Awq(
        description=f"AWQ, 4 bits{f' in groups of {size}' if size else ''}",
        bits=4,
        block=(1, size),
        skipped=names_of(config, "modules_to_not_convert"),
        zero_points=True,
    )
