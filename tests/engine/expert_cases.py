"""Mixtures of experts with random weights, and their float64 reference."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from parrot_engine.kernels.expert_routing import choose
from parrot_engine.kernels.grouped_product import mixture
from parrot_engine.kernels.grouped_tuning import Mixture, MixtureTuning
from torch import Tensor


class Operands(NamedTuple):
    """A mixture's input, weights and the logits of its router."""

    x: Tensor
    gate_up: Tensor
    down: Tensor
    logits: Tensor
    residual: Tensor | None


def draw(case: Mixture, device: str = "cpu", seed: int = 0, *, residual: bool = True) -> Operands:
    """Operands whose mixture is of the order of 1; logits are exact in bfloat16."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(case.dtype)

    experts, hidden, size = case.num_experts, case.hidden_size, case.size
    # No two of a token are equal, so that its experts are the same in any precision.
    order = torch.rand(case.num_tokens, experts, generator=generator, device=device).argsort()
    return Operands(
        normal(case.num_tokens, hidden),
        normal(experts, 2 * size, hidden) / hidden**0.5,
        normal(experts, hidden, size) / size**0.5,
        order.float() / 16,
        normal(case.num_tokens, hidden) if residual else None,
    )


def compute(
    case: Mixture, operands: Operands, tuning: MixtureTuning, *, normalize: bool = True
) -> Tensor:
    """What the kernels make of it."""
    x, gate_up, down, logits, residual = operands
    chosen = choose(logits, case.top_k, normalize=normalize)
    return mixture(x, gate_up, down, chosen, tuning, residual)


def reference(case: Mixture, operands: Operands, *, normalize: bool = True) -> Tensor:
    """The same in float64."""
    x, gate_up, down, logits = (operand.double() for operand in operands[:4])
    factors, chosen = logits.softmax(dim=-1).topk(case.top_k)
    if normalize:
        factors /= factors.sum(dim=-1, keepdim=True)
    out = torch.zeros_like(x)
    for expert in chosen.unique().tolist():
        token, place = torch.where(chosen == expert)
        gate, up = F.linear(x[token], gate_up[expert]).chunk(2, dim=1)
        part = F.linear(F.silu(gate) * up, down[expert]) * factors[token, place, None]
        out.index_add_(0, token, part)
    return out if operands.residual is None else out + operands.residual.double()
