"""The interface of a format: how a checkpoint stores quantised weights, and how to read them."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from parrot_engine.exceptions import CheckpointError, UnsupportedModelError
from parrot_engine.quantization.weights import QuantizedWeight

#: Standard deviation of random weights, equal to that of dense ones.
_STD = 0.02

#: Quantisation of activations before a product: none, by scales in the checkpoint, or by scales
#: computed from them.
Activations: TypeAlias = Literal["none", "static", "dynamic"]


@dataclass(frozen=True)
class Quantization(ABC):
    """The format of a checkpoint's weights, read from `quantization_config`.

    A projection P is stored as several tensors P.suffix; the tensors present determine which
    projections are quantised.
    """

    #: Suffixes of the tensors that make up `weight`; the first one has the codes.
    suffixes: ClassVar[tuple[str, ...]]

    #: Name for users, e.g. `AWQ, 4 bits in groups of 128`.
    description: str
    bits: int
    #: Rows and columns that share a scale; 0: all.
    block: tuple[int, int]
    activations: Activations = "none"
    #: Names, prefixes or suffixes of names, or `re:` patterns, of unquantised modules.
    skipped: tuple[str, ...] = ()
    #: True if zero points are stored.
    zero_points: bool = False

    @abstractmethod
    def read(self, prefix: str, stored: Mapping[str, Tensor]) -> Tensor | QuantizedWeight:
        """Return the weight of projection `prefix` from its tensors by suffix; a dense one as a
        tensor.

        Raises:
            CheckpointError: tensors are missing, do not match, or have impossible values.
        """

    @property
    def bytes_per_weight(self) -> float:
        """Return the bytes per weight, including its share of scales and zero points."""
        rows, columns = self.block
        share = 0.0 if not columns else 1 / columns / max(1, rows)
        return self.bits / 8 + share * (2 if self.bits == 4 else 4) + share * self.zero_points

    def skips(self, name: str) -> bool:
        """Return true if module `name` stays dense when weights are random."""
        for pattern in self.skipped:
            if pattern.startswith("re:"):
                if re.match(pattern[3:], name):
                    return True
            elif name == pattern or name.startswith(f"{pattern}.") or name.endswith(f".{pattern}"):
                return True
        return False

    def draw(self, rows: int, columns: int, generator: torch.Generator) -> QuantizedWeight:
        """Return a random weight of this format, on the generator's device."""
        device = generator.device
        height, width = self.block[0] or rows, self.block[1] or columns
        count = (-(-rows // height), -(-columns // width))
        if self.bits == 8:
            noise = torch.randn(rows, columns, device=device, generator=generator)
            codes = (noise * 32).clamp_(-127, 127).to(self.codes_dtype)
            scales = torch.full(count, _STD / 32, device=device)
        else:
            codes = torch.randint(
                -8, 8, (rows, columns), device=device, generator=generator, dtype=torch.int8
            )
            scales = torch.full(count, _STD / 4.6, device=device, dtype=torch.bfloat16)
        zeros = None
        if self.zero_points:
            zeros = torch.randint(
                -1, 2, count, device=device, generator=generator, dtype=torch.int16
            )
        return QuantizedWeight(codes, scales, (height, width), zeros, bits=self.bits)

    @property
    def codes_dtype(self) -> torch.dtype:
        return torch.int8


def checked_scales(name: str, scales: Tensor, shape: Sequence[int]) -> Tensor:
    """Return stored scales of `shape`, all finite and nonzero; float32 if stored in 8 bits.

    Raises:
        CheckpointError: the scales violate this.
    """
    if scales.shape != torch.Size(shape):
        raise CheckpointError(
            f"tensor {name} has shape {list(scales.shape)}, its weight asks for {list(shape)}"
        )
    if not scales.is_floating_point():
        raise CheckpointError(f"tensor {name} holds {scales.dtype}, not scales")
    if scales.itemsize == 1:
        scales = scales.float()
    if not bool(torch.isfinite(scales).all()):
        raise CheckpointError(f"tensor {name} holds scales that are no finite numbers")
    if not bool(scales.all()):
        raise CheckpointError(f"tensor {name} holds scales of 0")
    return scales


def required(prefix: str, suffix: str, stored: Mapping[str, Tensor]) -> Tensor:
    """Return one of a projection's tensors.

    Raises:
        CheckpointError: the tensor is missing.
    """
    if suffix not in stored:
        raise CheckpointError(f"the checkpoint lacks {prefix}.{suffix}")
    return stored[suffix]


def unpack(name: str, packed: Tensor, bits: int) -> Tensor:
    """Unpack codes of 4 or 8 bits, lowest bits first, from int32 words along the last axis: uint8.

    Raises:
        CheckpointError: the tensor does not have this form.
    """
    if packed.dtype != torch.int32 or packed.ndim != 2:
        raise CheckpointError(
            f"tensor {name} must be a matrix of int32 words, found {packed.dtype} of shape "
            f"{list(packed.shape)}"
        )
    codes = packed.contiguous().view(torch.uint8)
    if bits == 8:
        return codes
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)


def centred(codes: Tensor, bits: int) -> Tensor:
    """Return unsigned codes (uint8) minus half their range: int8."""
    return (codes.to(torch.int16) - (1 << (bits - 1))).to(torch.int8)


def integer(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return an integer of `quantization_config`.

    Raises:
        CheckpointError: there is no integer.
    """
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise CheckpointError(f"quantization_config: `{key}` must be an integer, found {value!r}")
    return value


def group_size(config: Mapping[str, Any]) -> int:
    """Return the columns that share a scale; 0 if a whole row does.

    Raises:
        CheckpointError: the value is impossible.
    """
    size = integer(config, "group_size", -1)
    if size < -1 or size == 0:
        raise CheckpointError(f"quantization_config: `group_size` cannot be {size}")
    return max(size, 0)


def names_of(config: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    """Return the module names under the first nonempty key.

    Raises:
        CheckpointError: the value is not a list of names.
    """
    for key in keys:
        names = config.get(key)
        if names:
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise CheckpointError(f"quantization_config: `{key}` must list names")
            return tuple(names)
    return ()


def refuse(what: str, instead: str) -> UnsupportedModelError:
    """Return the error for a known but unsupported format, naming the supported ones."""
    return UnsupportedModelError(f"{what} (supported: {instead})")
