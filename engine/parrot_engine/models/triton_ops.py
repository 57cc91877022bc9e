"""Operations of a decoder on rows of activations, with Triton kernels.

With few tokens, a product's kernel includes the norm before it and the activation or residual after
it; otherwise torch computes products. Importing this imports triton.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from parrot_engine.attention.launch import DeviceLimits, device_limits
from parrot_engine.kernels import rowwise
from parrot_engine.kernels.experts.expert_routing import choose
from parrot_engine.kernels.experts.grouped_tuning import (
    Mixture,
    mixture_tuning,
    packed_mixture_tuning,
)
from parrot_engine.kernels.experts.mixture import mixture
from parrot_engine.kernels.matmul.dequantize import dequantize
from parrot_engine.kernels.matmul.lora_product import StackedWeights, add_lora
from parrot_engine.kernels.matmul.quantized_matmul import quantized_product
from parrot_engine.kernels.matmul.quantized_tuning import is_grouped, quantized_tuning
from parrot_engine.kernels.matmul.skinny_matmul import product
from parrot_engine.kernels.matmul.skinny_tuning import MAX_TOKENS, tuning_for
from parrot_engine.kernels.matmul.split_rows import split_groups, split_rows
from parrot_engine.kernels.tuning import Product, Tuning, num_counters
from parrot_engine.models.lora import LoraProduct
from parrot_engine.models.ops import PLAIN, Affine, Branch, Experts, Norm, Normed, Ops, Residual
from parrot_engine.models.sharding import Collective
from parrot_engine.quantization.packed import PackedWeight

#: Returns the kernel for a product on a device, or None for torch's own.
Tune: TypeAlias = Callable[[Product, torch.device], Tuning | None]
#: Does the same for a product with a packed weight.
TunePacked: TypeAlias = Callable[[Product, PackedWeight, torch.device], Tuning | None]


@cache
def _limits(device: torch.device) -> DeviceLimits:
    return device_limits(device)


def tune(case: Product, device: torch.device) -> Tuning | None:
    """Return the measured choice on a GPU, and torch's product in the interpreter."""
    if device.type != "cuda":
        return None
    limits = _limits(device)
    return tuning_for(case, limits.shared_memory, copy_engine=limits.copy_engine)


def tune_packed(case: Product, weight: PackedWeight, device: torch.device) -> Tuning | None:
    """Do the same for a packed weight; None: the weight is dequantised for torch's product."""
    if device.type != "cuda":
        return None
    limits = _limits(device)
    return quantized_tuning(
        case, weight, limits.shared_memory, copy_engine=limits.copy_engine, hopper=limits.hopper
    )


def _packed_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """Multiply many tokens: in 8 bits if torch can, otherwise with a dequantised weight.

    In 8 bits x is rounded if the checkpoint says so, with a scale per token.
    """
    out_size, in_size = weight.codes.shape
    if (
        weight.kind != "fp8"
        or (is_grouped(weight) and weight.block_scales is None)
        or not (x.is_cuda and x.dtype is torch.bfloat16 and len(x))
        or (out_size % 16 or in_size % 16)
        or not _limits(x.device).hopper
    ):
        return F.linear(x, dequantize(weight, x.dtype), bias)
    if weight.block_scales is not None:
        return _blocked_linear(x, weight, weight.block_scales, bias)
    parts, scales = split_rows(x)
    total: Tensor | None = None
    for part in parts if weight.activations == "none" else parts[:1]:
        product = torch._scaled_mm(
            part,
            weight.codes.t(),
            scales[:, None],
            weight.scales,
            bias=bias if total is None else None,
            out_dtype=x.dtype,
        )
        total = product if total is None else total.add_(product)
    assert total is not None
    return total


def _blocked_linear(
    x: Tensor, weight: PackedWeight, block_scales: Tensor, bias: Tensor | None
) -> Tensor:
    """Multiply in 8 bits with a scale per block of 128 by 128 of W and 1 by 128 of x."""
    parts, scales = split_groups(x, has_left=weight.activations == "none")
    total: Tensor | None = None
    for part in parts:
        product = F.scaled_mm(
            part,
            weight.codes.t(),
            scales.t(),
            F.ScalingType.BlockWise1x128,
            block_scales.t(),
            F.ScalingType.BlockWise128x128,
            output_dtype=x.dtype,
        )
        total = product if total is None else total.add_(product)
    assert total is not None
    total = total[: len(x)]
    return total if bias is None else total.add_(bias)


class TritonOps(Ops):
    """Operations with Triton kernels, on a GPU or in Triton's interpreter."""

    def __init__(
        self,
        tune: Tune = tune,
        *,
        collective: Collective | None = None,
        tune_packed: TunePacked = tune_packed,
    ) -> None:
        super().__init__(collective)
        self._tune = tune
        self._tune_packed = tune_packed
        #: Counters by device and blocks of outputs, for products with split columns; see `product`.
        self._arrivals: dict[tuple[torch.device, int], Tensor] = {}

    def _tuning(
        self, x: Tensor, linear: Affine, *, gated: bool = False, norm: bool = False
    ) -> Tuning | None:
        out_size, in_size = linear.weight.shape
        out_size //= 2 if gated else 1
        case = Product(len(x), out_size, in_size, x.dtype, gated, norm)
        if linear.packed is not None:
            return self._tune_packed(case, linear.packed, x.device) if len(x) else None
        return self._tune(case, x.device) if 1 <= len(x) <= MAX_TOKENS else None

    def _product(self, x: Tensor, linear: Affine, tuning: Tuning, **options: Any) -> Tensor:
        """Compute a product; see `product` and `quantized_product`."""
        options |= {"bias": linear.bias, "arrivals": self._counts(x, linear, tuning)}
        if linear.packed is not None:
            return quantized_product(x, linear.packed, tuning, **options)
        return product(x, linear.weight, tuning, **options)

    def _counts(self, x: Tensor, linear: Affine, tuning: Tuning) -> Tensor | None:
        """Return zeros that only these operations use; a model's layers follow each other."""
        if tuning.splits == 1:
            return None
        key = x.device, num_counters(tuning, len(linear.weight))
        # NOTE: graphs keep reading these tensors.
        if key not in self._arrivals:
            self._arrivals[key] = torch.zeros(key[1], dtype=torch.int32, device=x.device)
        return self._arrivals[key]

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        return rowwise.rms_norm(x, *norm)

    def total(self, residual: Residual) -> Tensor:
        return self._sum(residual, None).hidden if residual.is_share else super().total(residual)

    def _sum(self, residual: Residual, norm: Norm | None) -> Normed:
        assert self._collective is not None
        assert residual.delta is not None
        return Normed(*self._collective.sum_onto(residual.delta, residual.hidden, norm))

    def add_rms_norm(self, residual: Residual, norm: Norm | None) -> Normed:
        hidden, delta, is_share = residual
        if is_share:
            return self._sum(residual, norm)
        if norm is None:
            return super().add_rms_norm(residual, norm)
        if delta is None:
            return Normed(rowwise.rms_norm(hidden, *norm), hidden)
        return Normed(*rowwise.add_rms_norm(hidden, delta, *norm))

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        if activation == "silu":
            return rowwise.swiglu(gate_up)
        return super().gated(gate_up, activation)

    def norm_linear(self, residual: Residual, norm: Norm | None, linear: Affine) -> Normed:
        tuning = self._tuning(residual.hidden, linear, norm=norm is not None)
        if tuning is None or residual.is_share or linear.lora is not None:
            normed, hidden = self.add_rms_norm(residual, norm)
            return Normed(self.linear(normed, linear), hidden)
        hidden = self.total(residual)
        out = self._product(hidden, linear, tuning, norm=norm)
        return Normed(out, hidden)

    def norm_gated(
        self, residual: Residual, norm: Norm | None, linear: Affine, activation: str
    ) -> Normed:
        if activation != "silu" or linear.lora is not None:
            out, hidden = self.norm_linear(residual, norm, linear)
            return Normed(self.gated(out, activation), hidden)
        tuning = self._tuning(residual.hidden, linear, gated=True, norm=norm is not None)
        if tuning is not None and not residual.is_share:
            hidden = self.total(residual)
            out = self._product(hidden, linear, tuning, norm=norm, gated=True)
            return Normed(out, hidden)
        normed, hidden = self.add_rms_norm(residual, norm)
        tuning = self._tuning(normed, linear, gated=True)
        if tuning is None:
            return Normed(self.gated(self.linear(normed, linear), activation), hidden)
        out = self._product(normed, linear, tuning, gated=True)
        return Normed(out, hidden)

    def add_lora(self, out: Tensor, x: Tensor, lora: LoraProduct) -> None:
        slots, rows = lora
        weights = StackedWeights(slots.a, slots.b, slots.used, slots.sizes)
        num_cores = _limits(x.device).num_sms if x.is_cuda else 1
        add_lora(out, x, weights, rows.order, rows.tiles, rows.tile_size, num_cores=num_cores)

    def linear(self, x: Tensor, linear: Affine) -> Tensor:
        if linear.lora is not None:
            out = self.linear(x, linear._replace(lora=None))
            self.add_lora(out, x, linear.lora)
            return out
        tuning = self._tuning(x, linear)
        if tuning is not None:
            return self._product(x, linear, tuning)
        if linear.packed is not None:
            return _packed_linear(x, linear.packed, linear.bias)
        return super().linear(x, linear)

    def linear_onto(
        self, hidden: Tensor, x: Tensor, linear: Affine, branch: Branch = PLAIN
    ) -> Residual:
        if branch is PLAIN and self._collective is not None and self._collective.sums_onto(hidden):
            return Residual(hidden, self.share(x, linear, self._collective), is_share=True)
        if branch is not PLAIN or linear.lora is not None or self._collective is not None:
            return super().linear_onto(hidden, x, linear, branch)
        tuning = self._tuning(x, linear)
        if tuning is None:
            return super().linear_onto(hidden, x, linear)
        return Residual(self._product(x, linear, tuning, residual=hidden))

    def experts_onto(self, hidden: Tensor, x: Tensor, router: Affine, experts: Experts) -> Residual:
        logits = self._wide(x, router)
        chosen = choose(logits, experts.top_k, normalize=experts.normalize, local=experts.local)
        weights = self._share_of(experts).weights
        _, hidden_size, size = weights.down.shape
        limits = _limits(x.device)
        case = Mixture(len(x), experts.top_k, logits.shape[1], hidden_size, size, x.dtype)
        residual = hidden if self._collective is None else None
        shared_memory, copy_engine = limits.shared_memory, limits.copy_engine
        if weights.packed is None:
            tuning = mixture_tuning(case, shared_memory, copy_engine=copy_engine)
        else:
            tuning = packed_mixture_tuning(
                case, weights.packed, shared_memory, copy_engine=copy_engine
            )
        mixed = mixture(x, weights, chosen, tuning, residual)
        if self._collective is None:
            return Residual(mixed)
        if self._collective.sums_onto(hidden):
            return Residual(hidden, mixed, is_share=True)
        return Residual(hidden, self._collective.all_reduce(mixed))

    def logits(self, hidden: Tensor, norm: Norm, head: Affine, out: Tensor | None = None) -> Tensor:
        if self._tuning(hidden, head, norm=True) is None:
            return self._wide(self.rms_norm(hidden, norm), head, out=out)
        return self._wide(hidden, head, norm, out)

    def _wide(
        self, x: Tensor, linear: Affine, norm: Norm | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Compute a product in float32, including the `norm` of x only if there is a kernel for
        it.
        """
        tuning = self._tuning(x, linear, norm=norm is not None)
        if tuning is not None:
            if out is None:
                shape = (len(x), len(linear.weight))
                out = torch.empty(shape, dtype=torch.float32, device=x.device)
            return self._product(x, linear, tuning, norm=norm, out=out)
        assert norm is None
        if linear.bias is None and x.is_cuda and x.dtype is not torch.float32:
            # In one pass, without rounding to two bytes in between.
            weight = linear.weight.t()
            if out is None:
                return torch.mm(x, weight, out_dtype=torch.float32)
            return torch.mm(x, weight, out_dtype=torch.float32, out=out)
        wide = F.linear(x, linear.weight, linear.bias)
        return wide.float() if out is None else out.copy_(wide)
