"""Presents experts that a checkpoint stores stacked, as gpt-oss does, under single experts' names.

Plain: `gate_up_proj` `[experts, hidden_size, 2 x size]` with alternating columns of gate and up,
and `down_proj` `[experts, size, hidden_size]`. MXFP4 (OCP Microscaling Formats 1.0): `_blocks`
`[experts, out, in / 32, 16]` with two 4-bit numbers per byte, the low one first, and `_scales`
`[experts, out, in / 32]`, exponents of two plus 127. Biases are `[experts, out]` in both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parrot_engine.exceptions import CheckpointError
from parrot_engine.models.checkpoint import TensorFiles

#: The 4-bit numbers: sign, two bits of exponent, one of fraction.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4_VALUES = torch.tensor([*_FP4, *(-value for value in _FP4)])
_EXPONENT_BIAS = 127
_NAN_SCALE = 255
#: By the name of a part: its product, and its rows.
_PARTS = {
    "gate_proj": ("gate_up_proj", slice(0, None, 2)),
    "up_proj": ("gate_up_proj", slice(1, None, 2)),
    "down_proj": ("down_proj", slice(None)),
}


def dequantize_mxfp4(blocks: Tensor, scales: Tensor, name: str) -> Tensor:
    """Convert blocks `[out, in / 32, 16]` and scales `[out, in / 32]` to `[out, in]` in float32.

    Raises:
        CheckpointError: blocks and scales do not match, or a scale is not a number.
    """
    if scales.shape != blocks.shape[:-1] or blocks.dtype is not torch.uint8:
        raise CheckpointError(
            f"scales of {name} have shape {list(scales.shape)}, its blocks {list(blocks.shape)}"
        )
    if bool((scales == _NAN_SCALE).any()):
        raise CheckpointError(f"scales of {name} are not numbers")
    low, high = _FP4_VALUES[(blocks & 15).long()], _FP4_VALUES[(blocks >> 4).long()]
    values = torch.stack((low, high), dim=-1).flatten(-2)
    exponents = scales.int() - _EXPONENT_BIAS
    return torch.ldexp(values, exponents[..., None]).flatten(1)


class StackedExperts:
    """The tensors of all experts of a checkpoint under the names of single ones."""

    def __init__(self, files: TensorFiles) -> None:
        self._files = files
        self._present = set(files.names)
        #: Tensors of the checkpoint that are read under other names.
        self.taken: set[str] = set()
        #: By name: path of the experts, part, `weight` or `bias`, and index.
        self._places: dict[str, tuple[str, str, str, int]] = {}
        for name in self._present:
            path, _, stored = name.rpartition(".")
            if path.rpartition(".")[2] != "experts":
                continue
            product = stored.removesuffix("_bias").removesuffix("_blocks").removesuffix("_scales")
            parts = [part for part, (whole, _) in _PARTS.items() if whole == product]
            if not parts:
                continue
            self.taken.add(name)
            if stored.endswith("_scales"):
                continue
            ending = "bias" if stored.endswith("_bias") else "weight"
            for index in range(len(files.tensor(name))):
                for part in parts:
                    place = (path, part, ending, index)
                    self._places[f"{path}.{index}.{part}.{ending}"] = place

    @property
    def names(self) -> list[str]:
        return list(self._places)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def read(self, name: str) -> Tensor:
        """Return the tensor of one expert, dequantised.

        Raises:
            CheckpointError: blocks and scales do not match, or are missing.
        """
        path, part, ending, index = self._places[name]
        product, rows = _PARTS[part]
        whole = f"{path}.{product}"
        if ending == "bias":
            return self._tensor(f"{whole}_bias")[index][rows]
        if f"{whole}_blocks" not in self._present:
            return self._tensor(whole)[index].t()[rows]
        blocks, scales = self._tensor(f"{whole}_blocks"), self._tensor(f"{whole}_scales")
        return dequantize_mxfp4(blocks[index][rows], scales[index][rows], whole)

    def _tensor(self, name: str) -> Tensor:
        if name not in self._present:
            raise CheckpointError(f"the checkpoint lacks {name}")
        return self._files.tensor(name)
