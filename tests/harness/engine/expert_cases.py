"""Mixtures of experts with random weights, and their float64 reference."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from parrot_engine.kernels.experts.expert_routing import choose
from parrot_engine.kernels.experts.grouped_tuning import (
    ExpertWeights,
    Mixture,
    MixtureTuning,
    PackedExperts,
)
from parrot_engine.kernels.experts.mixture import mixture
from parrot_engine.quantization.packed import PackedWeight, above_each_other, pack
from torch import Tensor

from harness.engine.quantized_cases import QuantizedCase, draw_weight


class Operands(NamedTuple):
    """A mixture's input, weights and the logits of its router."""

    x: Tensor
    experts: ExpertWeights
    logits: Tensor
    residual: Tensor | None


def draw(
    case: Mixture,
    device: str = "cpu",
    seed: int = 0,
    *,
    residual: bool = True,
    bounded: bool = False,
) -> Operands:
    """Operands whose mixture is of the order of 1; logits are exact in bfloat16.

    Experts that are `bounded`, most of whose inner elements are at a bound, have biases as well.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(case.dtype)

    experts, hidden, size = case.num_experts, case.hidden_size, case.size
    # No two of a token are equal, so that its experts are the same in any precision.
    order = torch.rand(case.num_tokens, experts, generator=generator, device=device).argsort()
    weights = ExpertWeights(
        normal(experts, 2 * size, hidden) / hidden**0.5, normal(experts, hidden, size) / size**0.5
    )
    if bounded:
        biases = {"gate_up_bias": normal(experts, 2 * size), "down_bias": normal(experts, hidden)}
        weights = weights._replace(**biases, alpha=1.7, limit=0.7)
    return Operands(
        normal(case.num_tokens, hidden),
        weights,
        order.float() / 16,
        normal(case.num_tokens, hidden) if residual else None,
    )


def draw_packed(
    case: Mixture, kind: str, device: str = "cpu", *, group: int = 0, **options: bool
) -> Operands:
    """The same with experts of one of `KINDS`, and the dense ones that they stand for."""
    operands = draw(case, device, **options)
    generator = torch.Generator(device).manual_seed(1)
    dense, packed = [], []
    sizes = ((2 * case.size, case.hidden_size), (case.hidden_size, case.size))
    for rows, columns in sizes:
        of_expert = QuantizedCase(kind, 0, rows, columns, group=group)
        drawn = [draw_weight(of_expert, generator) for _ in range(case.num_experts)]
        dense.append(torch.stack([weight.dense() for weight in drawn]))
        parts = (pack(weight, torch.device(device)) for weight in drawn)
        weight = above_each_other(parts, case.num_experts)
        assert weight is not None
        packed.append(weight)
    experts = operands.experts._replace(
        gate_up=dense[0], down=dense[1], packed=PackedExperts(*packed)
    )
    return operands._replace(experts=experts)


def held(experts: ExpertWeights, local: range) -> ExpertWeights:
    """Return the weights that a rank with some of the experts holds."""
    part = slice(local.start, local.stop)
    biases = [
        None if bias is None else bias[part] for bias in (experts.gate_up_bias, experts.down_bias)
    ]
    packed = None
    if experts.packed is not None:
        packed = PackedExperts(
            *(
                _rows(weight, len(weight.codes) // len(experts.down), local)
                for weight in experts.packed
            )
        )
    return experts._replace(
        gate_up=experts.gate_up[part],
        down=experts.down[part],
        gate_up_bias=biases[0],
        down_bias=biases[1],
        packed=packed,
    )


def _rows(weight: PackedWeight, each: int, local: range) -> PackedWeight:
    blocks = slice(local.start * each // weight.rows, local.stop * each // weight.rows)
    return weight._replace(
        codes=weight.codes[local.start * each : local.stop * each],
        scales=weight.scales[:, blocks].contiguous(),
        zeros=None if weight.zeros is None else weight.zeros[:, blocks].contiguous(),
    )


def compute(
    case: Mixture,
    operands: Operands,
    tuning: MixtureTuning,
    *,
    normalize: bool = True,
    local: range | None = None,
) -> Tensor:
    """Run the kernels; `operands` hold no experts but `local` ones."""
    x, experts, logits, residual = operands
    chosen = choose(logits, case.top_k, normalize=normalize, local=local)
    return mixture(x, experts, chosen, tuning, residual)


def sum_of_ranks(case: Mixture, operands: Operands, tuning: MixtureTuning) -> Tensor:
    """Add up ranks with a few experts each; the residual is that of the first."""
    total: Tensor | None = None
    for local in (range(1), range(1, case.num_experts)):
        own = operands._replace(experts=held(operands.experts, local))
        part = compute(
            case, own if total is None else own._replace(residual=None), tuning, local=local
        )
        total = part.float() if total is None else total + part.float()
    assert total is not None
    return total


def reference(case: Mixture, operands: Operands, *, normalize: bool = True) -> Tensor:
    """The same in float64."""
    x, logits = operands.x.double(), operands.logits.double()
    gate_up, down, gate_up_bias, down_bias = (
        None if part is None else part.double() for part in operands.experts[:4]
    )
    alpha, limit = operands.experts.alpha, operands.experts.limit
    assert gate_up is not None
    assert down is not None
    factors, chosen = logits.softmax(dim=-1).topk(case.top_k)
    if normalize:
        factors /= factors.sum(dim=-1, keepdim=True)
    out = torch.zeros_like(x)
    for expert in chosen.unique().tolist():
        token, place = torch.where(chosen == expert)
        inner = F.linear(x[token], gate_up[expert])
        if gate_up_bias is not None:
            inner += gate_up_bias[expert]
        gate, up = inner.chunk(2, dim=1)
        if limit is None:
            inner = F.silu(gate) * up
        else:
            gate = gate.clamp(max=limit)
            inner = gate * torch.sigmoid(alpha * gate) * (up.clamp(-limit, limit) + 1)
        part = F.linear(inner, down[expert])
        if down_bias is not None:
            part += down_bias[expert]
        out.index_add_(0, token, part * factors[token, place, None])
    return out if operands.residual is None else out + operands.residual.double()
