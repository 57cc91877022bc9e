"""Parts of all decoders: products, embedding and norms, and their storage in checkpoints.

Modules hold weights and list the checkpoint's tensors that make up each weight (`WeightPart`). They
are created empty, on the device and in the dtype of a `TensorSpec`, and the loader fills them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parrot_engine.kernels.selection import Kernels
from parrot_engine.models.config import ModelConfig
from parrot_engine.models.lora import AdapterRows, LoraProduct, LoraSlots
from parrot_engine.models.ops import Affine, Norm, Ops, rms_norm
from parrot_engine.models.sharding import Collective
from parrot_engine.quantization.packed import PackedWeight
from parrot_engine.quantization.weights import QuantizedWeight

#: Makes one packed weight of stacked weights; None if the kernels do not support it.
Pack: TypeAlias = Callable[[Sequence[Tensor | QuantizedWeight]], PackedWeight | None]


class TensorSpec(NamedTuple):
    """Device and dtype of weights, and the kernels and ranks that compute with them."""

    device: torch.device
    dtype: torch.dtype
    kernels: Kernels = "torch"
    #: The ranks that hold a model together; None if one holds it all.
    collective: Collective | None = None
    #: True: weights of products stay codes and scales if the checkpoint has them so.
    packed: bool = False
    #: True: a token's result must not depend on the other tokens of a step.
    deterministic: bool = False

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        data = torch.empty(*shape, device=self.device, dtype=dtype or self.dtype)
        return nn.Parameter(data, requires_grad=False)

    def of_products(self) -> TensorSpec:
        """Return the spec of weights that may be packed, which is known only when they are read: no
        memory.
        """
        return self._replace(device=torch.device("meta")) if self.packed else self

    def ops(self) -> Ops:
        """Return the operations of these kernels; imports triton only if needed."""
        if self.deterministic:
            from parrot_engine.models.invariant_ops import InvariantOps

            return InvariantOps(collective=self.collective)
        if self.kernels == "triton":
            from parrot_engine.models.triton_ops import TritonOps

            return TritonOps(collective=self.collective)
        return Ops(self.collective)


class WeightPart(NamedTuple):
    """A tensor of the checkpoint and the part of a weight (along its first axis) that it fills."""

    name: str
    target: Tensor
    #: Added to the checkpoint's values.
    offset: float = 0.0


class Stacked(nn.Module):
    """A module whose weights each consist of several tensors of a checkpoint."""

    def weight_parts(self, prefix: str) -> Iterator[WeightPart]:
        """Yield the module's own parts; `prefix` is its path. See the function `weight_parts`."""
        raise NotImplementedError


class Packable(Stacked):
    """A module whose products' weights may be codes and scales; they have no memory before loading.

    The loader calls either `pack` or `give_memory`, once.
    """

    @property
    def is_meta(self) -> bool:
        """Return true if its weights have no memory of their own."""
        raise NotImplementedError

    def pack(self, weights: Sequence[Tensor | QuantizedWeight], pack: Pack) -> bool:
        """Pack `weights`, those of its parts without memory; return false if that is impossible."""
        raise NotImplementedError

    def give_memory(self, device: torch.device) -> None:
        """Allocate its weights on `device`, because they are dense after all."""
        raise NotImplementedError


class Linear(Packable):
    """x W^T + b over one or several projections of the checkpoint, stacked by output.

    `parts` maps each projection's name to its output size; stacking turns q, k and v, and gate and
    up, into one product each.
    """

    #: The weight as codes and scales, set by the loader; `weight` then has no memory.
    packed: PackedWeight | None = None
    #: Weights of adapters, once space is reserved.
    lora: LoraSlots | None = None

    def __init__(
        self, in_size: int, parts: dict[str, int], *, bias: bool, spec: TensorSpec
    ) -> None:
        super().__init__()
        self.parts = parts
        out_size = sum(parts.values())
        self.weight = spec.of_products().empty(out_size, in_size)
        self.bias = spec.empty(out_size) if bias else None

    @property
    def affine(self) -> Affine:
        return Affine(self.weight, self.bias, self.packed)

    def adapted(self, rows: AdapterRows | None) -> Affine:
        """Return the product with the adapters' additions in a step."""
        if rows is None or self.lora is None:
            return self.affine
        return Affine(self.weight, self.bias, self.packed, LoraProduct(self.lora, rows))

    def make_lora_slots(
        self, count: int, max_rank: int, device: torch.device, dtype: torch.dtype
    ) -> LoraSlots:
        """Reserve space for `count` adapters of up to `max_rank`."""
        self.lora = LoraSlots(
            self.weight.shape[1],
            list(self.parts.values()),
            count=count,
            max_rank=max_rank,
            device=device,
            dtype=dtype,
        )
        return self.lora

    @property
    def is_meta(self) -> bool:
        return bool(self.weight.is_meta)

    def pack(self, weights: Sequence[Tensor | QuantizedWeight], pack: Pack) -> bool:
        self.packed = pack(weights)
        return self.packed is not None

    def give_memory(self, device: torch.device) -> None:
        self.weight = nn.Parameter(torch.empty_like(self.weight, device=device), False)

    def weight_parts(self, prefix: str) -> Iterator[WeightPart]:
        """Yield the parts; names of `parts` replace the last component of `prefix`."""
        parent = prefix.rpartition(".")[0]
        start = 0
        for name, size in self.parts.items():
            path = f"{parent}.{name}" if parent else name
            yield WeightPart(f"{path}.weight", self.weight[start : start + size])
            if self.bias is not None:
                yield WeightPart(f"{path}.bias", self.bias[start : start + size])
            start += size


class Embedding(nn.Module):
    """Token embedding, one row per token id."""

    def __init__(self, config: ModelConfig, spec: TensorSpec) -> None:
        super().__init__()
        self.weight = spec.empty(config.vocab_size, config.hidden_size)
        # A factor in the dtype of activations, as in transformers.
        self._scale = float(torch.tensor(config.embedding_scale, dtype=spec.dtype))

    def forward(self, token_ids: Tensor) -> Tensor:
        """Map `[num_tokens]` to `[num_tokens, hidden_size]`."""
        rows = F.embedding(token_ids, self.weight)
        return rows if self._scale == 1.0 else rows * self._scale


class RMSNorm(Stacked):
    """Root mean square norm with a learned scale (arXiv 1910.07467), over the last axis.

    The scale is the checkpoint's weight plus `offset`. With an offset it is float32, which avoids
    another rounding of the weight.
    """

    def __init__(self, size: int, eps: float, spec: TensorSpec, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = spec.empty(size, dtype=torch.float32 if offset else None)
        self.eps = eps
        self._offset = offset

    @property
    def norm(self) -> Norm:
        return Norm(self.weight, self.eps)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of `x`'s shape; rows of `x` may be apart; accumulates in float32."""
        return rms_norm(x, self.norm)

    def weight_parts(self, prefix: str) -> Iterator[WeightPart]:
        yield WeightPart(f"{prefix}.weight", self.weight, self._offset)


def weight_parts(module: nn.Module) -> Iterator[WeightPart]:
    """Yield every weight of a module tree with the checkpoint's name for it, tied ones once."""
    for path, child in module.named_modules():
        if isinstance(child, Stacked):
            yield from child.weight_parts(path)
        else:
            for name, parameter in child.named_parameters(prefix=path, recurse=False):
                yield WeightPart(name, parameter)


def weight_bytes(model: nn.Module) -> int:
    """Return the memory of a model's weights; for packed ones that of their codes and scales."""
    tensors = [each for each in (*model.parameters(), *model.buffers()) if not each.is_meta]
    for module in model.modules():
        if isinstance(module, Packable):
            tensors += _tensors_in(getattr(module, "packed", None))
    return sum(each.nbytes for each in tensors)


def _tensors_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _tensors_in(item)
