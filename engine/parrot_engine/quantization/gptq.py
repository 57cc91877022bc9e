"""GPTQ (arXiv 2210.17323) as AutoGPTQ and GPTQModel write it, with and without act-order."""

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

_BITS = (4, 8)


@dataclass(frozen=True)
class Gptq(Quantization):
    """`qweight` `[words of in, out]`, `qzeros` `[groups, words of out]`, `scales`, `g_idx` `[in]`.

    With act-order, `g_idx` gives the groups of columns.
    """

    suffixes: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales", "g_idx")

    #: Added to stored zero points: 1 in the first version of the format.
    zero_offset: int = 1

    def read(self, prefix: str, stored: Mapping[str, Tensor]) -> QuantizedWeight:
        codes = unpack(f"{prefix}.qweight", required(prefix, "qweight", stored).t(), self.bits)
        out_size, in_size = codes.shape
        group = self.block[1] or in_size
        shape = (-(-in_size // group), out_size)
        scales = checked_scales(f"{prefix}.scales", required(prefix, "scales", stored), shape)
        zeros = unpack(f"{prefix}.qzeros", required(prefix, "qzeros", stored), self.bits)
        if zeros.shape != scales.shape:
            raise CheckpointError(
                f"tensor {prefix}.qzeros stands for shape {list(zeros.shape)}, "
                f"its scales for {list(shape)}"
            )
        offset = self.zero_offset - (1 << (self.bits - 1))
        shifted = zeros.t().to(torch.int16).add_(offset).contiguous()
        return QuantizedWeight(
            centred(codes, self.bits),
            scales.t().contiguous(),
            (1, group),
            # Symmetric quantisation stores the middle of the range.
            shifted if bool(shifted.any()) else None,
            self._groups(prefix, stored, in_size, group),
            bits=self.bits,
        )

    def _groups(
        self, prefix: str, stored: Mapping[str, Tensor], in_size: int, group: int
    ) -> Tensor | None:
        if "g_idx" not in stored:
            return None
        groups = stored["g_idx"].long()
        if groups.shape != (in_size,):
            raise CheckpointError(
                f"tensor {prefix}.g_idx has shape {list(groups.shape)}, "
                f"its weight asks for {[in_size]}"
            )
        num_groups = -(-in_size // group)
        if bool(((groups < 0) | (groups >= num_groups)).any()):
            raise CheckpointError(f"tensor {prefix}.g_idx names groups that are not there")
        plain = torch.arange(in_size, device=groups.device) // group
        return None if torch.equal(groups, plain) else groups


def read_config(config: Mapping[str, Any]) -> Gptq:
    bits = integer(config, "bits")
    if bits not in _BITS:
        raise refuse(f"GPTQ of {bits} bits", "4, 8")
    version = config.get("checkpoint_format", "gptq")
    if version not in ("gptq", "gptq_v2"):
        raise refuse(f"GPTQ in the format {version!r}", "gptq, gptq_v2")
    overrides = config.get("dynamic") or {}
    if any(not key.startswith("-:") for key in overrides):
        raise refuse("GPTQ with other bits for some modules (`dynamic`)", "the same for all")
    size = group_size(config)
    order = ", act-order" if config.get("desc_act") else ""
    return Gptq(
        description=f"GPTQ, {bits} bits{f' in groups of {size}' if size else ''}{order}",
        bits=bits,
        block=(1, size),
        skipped=names_of(config, "modules_to_not_convert"),
        zero_points=not config.get("sym", True),
        zero_offset=1 if version == "gptq" else 0,
    )
