"""A checkpoint's weights under the names of a plain one: quantised or not, fused or not."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from parrot_engine.exceptions import CheckpointError, UnsupportedModelError
from parrot_engine.models.checkpoint import TensorFiles
from parrot_engine.models.config import Fused
from parrot_engine.models.stacked_experts import StackedExperts
from parrot_engine.models.upload import Upload
from parrot_engine.quantization.interface import Quantization
from parrot_engine.quantization.packed import PackedWeight, pack_stacked
from parrot_engine.quantization.weights import QuantizedWeight


class StoredWeights:
    """Tensors by name; the tensors of one quantised weight appear as one, named `P.weight`."""

    def __init__(
        self,
        files: TensorFiles,
        quantization: Quantization | None,
        device: torch.device,
        fused: Sequence[Fused] = (),
        *,
        stacked_experts: bool = False,
    ) -> None:
        """Quantised weights are unpacked on `device`; everything else is as in the files.

        Products that are `fused` in the checkpoint get the names of their parts, and
        `stacked_experts` those of single ones.
        """
        self._files = files
        self._quantization = quantization
        self.device = device
        self.upload = Upload(device)
        #: Rows of fused products.
        self._sizes: dict[str, int] = {}
        #: By prefix: the endings of the tensors that make up its weight.
        self._stored: dict[str, list[str]] = {}
        names: dict[str, None] = {}
        endings = () if quantization is None else quantization.suffixes
        present = set(files.names)
        for name in files.names:
            prefix, _, ending = name.rpartition(".")
            # Companion tensors are useless without the codes.
            if ending in endings and f"{prefix}.{endings[0]}" in present:
                self._stored.setdefault(prefix, []).append(ending)
                name = f"{prefix}.weight"
            names[name] = None
        #: By the name of a part: its product, and its rows.
        self._parts: dict[str, tuple[str, slice]] = {}
        for whole in [name for name in names if fused]:
            path, _, ending = whole.rpartition(".")
            for product in fused:
                if path.rpartition(".")[2] == product.name:
                    del names[whole]
                    parent, begin = path.removesuffix(product.name), 0
                    for part, size in product.parts:
                        name = f"{parent}{part}.{ending}"
                        self._parts[name] = whole, slice(begin, begin + size)
                        names[name] = None
                        begin += size
                    self._sizes[whole] = begin
        self._experts = StackedExperts(files) if stacked_experts else None
        if self._experts is not None:
            names = {name: None for name in names if name not in self._experts.taken}
            names |= dict.fromkeys(self._experts.names)
        self._names = names

    @property
    def names(self) -> Collection[str]:
        return self._names.keys()

    def read(self, name: str) -> Tensor | QuantizedWeight:
        """Return a weight, quantised if it is stored that way, or any other tensor.

        Raises:
            CheckpointError: the tensors of the weight do not match.
            UnsupportedModelError: the weight has an unknown format.
        """
        if self._experts is not None and name in self._experts:
            return self._experts.read(name)
        if name not in self._parts:
            return self._read(name)
        whole, rows = self._parts[name]
        tensor = self._read(whole)
        if tensor.shape[0] != self._sizes[whole]:
            raise CheckpointError(
                f"tensor {whole} has {tensor.shape[0]} rows, "
                f"the configuration asks for {self._sizes[whole]}"
            )
        if isinstance(tensor, QuantizedWeight):
            return tensor.part(rows, slice(0, tensor.shape[1]))
        return tensor[rows]

    def _read(self, name: str) -> Tensor | QuantizedWeight:
        prefix, _, ending = name.rpartition(".")
        tensor: Tensor | QuantizedWeight
        if ending == "weight" and prefix in self._stored and self._quantization is not None:
            stored = {
                found: self.upload.to_device(self._files.tensor(f"{prefix}.{found}"))
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
        """Pack stacked weights for the kernels; None if the kernels do not support them."""
        if self._quantization is None:
            return None
        return pack_stacked(weights, self.device, self._quantization.activations)
