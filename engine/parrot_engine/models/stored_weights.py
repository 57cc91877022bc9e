"""The weights of a checkpoint under the names of a plain one, quantised or not."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from parrot_engine.exceptions import UnsupportedModelError
from parrot_engine.models.checkpoint import TensorFiles
from parrot_engine.quantization.interface import Quantization
from parrot_engine.quantization.packed import PackedWeight, pack
from parrot_engine.quantization.weights import QuantizedWeight, stack


class StoredWeights:
    """Tensors by name; several that stand for one quantised weight are one, named `P.weight`."""

    def __init__(
        self, files: TensorFiles, quantization: Quantization | None, device: torch.device
    ) -> None:
        """Quantised weights are unpacked on `device`; everything else is as the files have it."""
        self._files = files
        self._quantization = quantization
        self.device = device
        #: By prefix, the endings of the tensors that stand for its weight.
        self._stored: dict[str, list[str]] = {}
        names: dict[str, None] = {}
        endings = () if quantization is None else quantization.suffixes
        present = set(files.names)
        for name in files.names:
            prefix, _, ending = name.rpartition(".")
            # What stands beside the codes is nothing without them.
            if ending in endings and f"{prefix}.{endings[0]}" in present:
                self._stored.setdefault(prefix, []).append(ending)
                name = f"{prefix}.weight"
            names[name] = None
        self._names = names

    @property
    def names(self) -> Collection[str]:
        return self._names.keys()

    def read(self, name: str) -> Tensor | QuantizedWeight:
        """The weight, quantised if it is stored that way, or any other tensor.

        Raises:
            CheckpointError: the tensors that stand for it do not fit each other.
            UnsupportedModelError: it is stored as numbers that are not understood.
        """
        prefix, _, ending = name.rpartition(".")
        tensor: Tensor | QuantizedWeight
        if ending == "weight" and prefix in self._stored and self._quantization is not None:
            stored = {
                found: self._files.tensor(f"{prefix}.{found}").to(self.device)
                for found in self._stored[prefix]
            }
            tensor = self._quantization.read(prefix, stored)
        else:
            tensor = self._files.tensor(name)
        if isinstance(tensor, QuantizedWeight):
            return tensor
        if not tensor.is_floating_point() or tensor.itemsize < 2:
            raise UnsupportedModelError(f"weights stored as {tensor.dtype} ({name})")
        return tensor

    def packed(self, weights: Sequence[Tensor | QuantizedWeight]) -> PackedWeight | None:
        """Weights above each other for the kernels; None where they cannot take them."""
        if self._quantization is None:
            return None
        quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
        if len(quantized) != len(weights):
            return None
        stacked = stack(quantized)
        if stacked is None:
            return None
        return pack(stacked, self.device, self._quantization.activations)
