"""Reads low-rank weights from a PEFT folder, and checks them against the model.

It reads only `adapter_model.safetensors`, because other formats can execute code when read. It does
not touch the model, so it may run beside the model's steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from parrot_engine.adapters.peft_config import PeftConfig, read_peft_config
from parrot_engine.exceptions import AdapterError
from parrot_engine.models.config import ModelConfig
from parrot_engine.models.loader import name_in_text_model
from parrot_engine.models.sharding import Shard, part_of

WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_MAX_LISTED = 4

#: A and B of one projection; B includes the adapter's scale.
LowRank: TypeAlias = tuple[Tensor, Tensor]


class Projection(NamedTuple):
    """One projection of a model: its place and its shape."""

    #: Path of the product in the model, and index of the projection in the product.
    path: str
    place: int
    in_size: int
    out_size: int
    #: The inputs and outputs that this rank computes.
    columns: slice
    rows: slice


class Product(NamedTuple):
    """Shape of a product of a model, and of its projections, which adapters can change."""

    #: Rows of each projection, by its name in checkpoints.
    parts: Mapping[str, int]
    in_size: int


class Adapter(NamedTuple):
    """An adapter in host memory, in the model's dtype; for one rank's model only that rank's
    part.
    """

    #: Hash of everything that is computed with; equal for equal adapters.
    id: str
    rank: int
    #: A and B of each projection, by path of the product; None adds nothing.
    weights: dict[str, list[LowRank | None]]


class AdapterReader:
    """Reads adapters for one model.

    Args:
        products: the model's, by path.
        config: the model's.
        dtype: the weights'.
        max_rank: adapters with a larger rank are refused.
        own: this rank's products, and its shard; None for a whole model.
    """

    def __init__(
        self,
        products: Mapping[str, Product],
        config: ModelConfig,
        dtype: torch.dtype,
        max_rank: int,
        own: tuple[Mapping[str, Product], Shard] | None = None,
    ) -> None:
        self._dtype = dtype
        self._max_rank = max_rank
        self._num_projections = {path: len(parts) for path, (parts, _) in products.items()}
        held, shard = own or (products, Shard())
        #: By module name in checkpoints; a fused module has several projections.
        self._modules: dict[str, list[Projection]] = {}
        for path, (parts, in_size) in products.items():
            parent = path.rpartition(".")[0]
            for index, (name, size) in enumerate(parts.items()):
                rows, columns = part_of(
                    (size, in_size), (held[path].parts[name], held[path].in_size), shard
                )
                projection = Projection(path, index, in_size, size, columns, rows)
                module = f"{parent}.{name}"
                for fused in config.fused:
                    if name in dict(fused.parts):
                        module = f"{parent}.{fused.name}"
                self._modules.setdefault(module, []).append(projection)

    def read(self, folder: Path) -> Adapter:
        """Read the adapter in `folder`.

        Raises:
            AdapterError: it cannot be read, is not supported, or belongs to another model.
        """
        config = read_peft_config(folder)
        if config.max_rank > self._max_rank:
            raise AdapterError(
                f"rank {config.max_rank} is more than the {self._max_rank} that this engine has "
                "room for (max_lora_rank)"
            )
        path = folder / WEIGHTS_FILE
        if not path.exists():
            raise AdapterError(_no_weights(folder))
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                return self._read(file, config)
        except (OSError, SafetensorError) as error:
            raise AdapterError(f"{WEIGHTS_FILE} cannot be read: {error}") from error

    def _read(self, file: Any, config: PeftConfig) -> Adapter:
        names = self._names_by_module(list(file.keys()))
        missing = [name for name in self._modules if config.targets(name) and name not in names]
        if missing:
            raise AdapterError(f"{WEIGHTS_FILE} lacks weights for {_listing(missing)}")
        digest = hashlib.blake2b(digest_size=16, person=b"lora adapter")
        weights: dict[str, list[LowRank | None]] = {}
        rank = 0
        # Check all shapes before reading anything large, in case the adapter belongs to another
        # base.
        shapes = {module: self._check_shapes(file, module, pair, config)
                  for module, pair in names.items()}  # fmt: skip
        for module in sorted(names):
            a, b = (self._tensor(file, name) for name in names[module])
            scale = config.scale_of(module)
            for part in (f"{module} {scale!r} {a.dtype} {list(a.shape)} {list(b.shape)}".encode(),
                         _bytes_of(a), _bytes_of(b)):  # fmt: skip
                digest.update(part)
            rank = max(rank, shapes[module])
            # NOTE: copies, because the file is memory-mapped and may be changed later.
            factors = a.to(self._dtype, copy=True), (b.float() * scale).to(self._dtype)
            for name, factor in zip(names[module], factors, strict=True):
                if not bool(torch.isfinite(factor).all()):
                    raise AdapterError(f"tensor {name} holds values that are no finite numbers")
            begin = 0
            for projection in self._modules[module]:
                end = begin + projection.out_size
                places = weights.setdefault(
                    projection.path, [None] * self._num_projections[projection.path]
                )
                places[projection.place] = (
                    factors[0][:, projection.columns].contiguous(),
                    factors[1][begin:end][projection.rows].contiguous(),
                )
                begin = end
        return Adapter(digest.hexdigest(), rank, weights)

    def _names_by_module(self, names: Sequence[str]) -> dict[str, tuple[str, str]]:
        """Return the names of the tensors A and B by module of the model."""
        found: dict[str, dict[str, str]] = {}
        for name in names:
            path = name.removeprefix(_PREFIX)
            for which in ("lora_A", "lora_B"):
                module, middle, ending = path.partition(f".{which}.")
                # In an unsaved adapter the name also contains the adapter's.
                if middle and ending in ("weight", "default.weight"):
                    known = self._module(module)
                    found.setdefault(known, {})[which] = name
                    break
            else:
                raise AdapterError(f"tensor {name} is none of a LoRA adapter's (lora_A, lora_B)")
        if not found:
            raise AdapterError(f"{WEIGHTS_FILE} holds no tensors")
        for module, pair in found.items():
            if len(pair) < 2:
                other = next(iter({"lora_A", "lora_B"} - pair.keys()))
                raise AdapterError(f"{WEIGHTS_FILE} lacks {other} of {module}")
        return {module: (pair["lora_A"], pair["lora_B"]) for module, pair in found.items()}

    def _module(self, name: str) -> str:
        if name in self._modules:
            return name
        in_text = name_in_text_model(f"{name}.")
        if in_text is not None and in_text.removesuffix(".") in self._modules:
            return in_text.removesuffix(".")
        if ".experts" in name:
            raise AdapterError(f"{name}: adapters of experts are not supported; of attention are")
        ends = sorted({module.rpartition(".")[2] for module in self._modules})
        raise AdapterError(
            f"{name} is no module that adapters can change here; these can: {', '.join(ends)}"
        )

    def _check_shapes(
        self, file: Any, module: str, names: tuple[str, str], config: PeftConfig
    ) -> int:
        """Return the rank of a module's tensors after checking them against model and
        configuration.
        """
        (name_a, a), (name_b, b) = ((name, file.get_slice(name).get_shape()) for name in names)
        projections = self._modules[module]
        in_size, out_size = projections[0].in_size, sum(each.out_size for each in projections)
        rank = config.rank_of(module)
        for name, shape, wanted in ((name_a, a, [rank, in_size]), (name_b, b, [out_size, rank])):
            if list(shape) != wanted:
                raise AdapterError(
                    f"tensor {name} has shape {list(shape)}, this model and a rank of {rank} ask "
                    f"for {wanted}; the adapter is for {config.base}"
                )
        return rank

    def _tensor(self, file: Any, name: str) -> Tensor:
        tensor: Tensor = file.get_tensor(name)
        if not tensor.is_floating_point() or tensor.itemsize < 2:
            raise AdapterError(f"tensor {name} is stored as {tensor.dtype}")
        return tensor


def _bytes_of(tensor: Tensor) -> memoryview:
    data: memoryview = tensor.contiguous().view(torch.uint8).numpy().data
    return data


def _no_weights(folder: Path) -> str:
    pickles = [name for name in ("adapter_model.bin", "adapter_model.pt")
               if (folder / name).exists()]  # fmt: skip
    if pickles:
        return (
            f"{pickles[0]} is a pickle, which can execute code when it is read; save the adapter "
            f"as safetensors: `save_file(torch.load('{pickles[0]}', weights_only=True), "
            f"'{WEIGHTS_FILE}')` of safetensors.torch"
        )
    return f"there is no {WEIGHTS_FILE} in {folder}"


def _listing(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MAX_LISTED])
    more = len(names) - _MAX_LISTED
    return f"{shown} and {more} more" if more > 0 else shown
