"""Products of few tokens with everything that can be fused, and their float64 reference."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from parrot_engine.kernels.matmul import skinny_matmul
from parrot_engine.kernels.tuning import Tuning
from torch import Tensor

EPS = 1e-5


class Case(NamedTuple):
    """One product; what is fused is named by letters: n(orm), g(ated), b(ias), r(esidual)."""

    num_tokens: int
    out_size: int
    in_size: int
    fused: str = ""
    dtype: torch.dtype = torch.float32
    out_dtype: torch.dtype | None = None


class Operands(NamedTuple):
    """Random operands of a case; those that it does not use are None."""

    x: Tensor
    weight: Tensor
    norm: Tensor | None
    bias: Tensor | None
    residual: Tensor | None


def draw(case: Case, device: str = "cpu", seed: int = 0) -> Operands:
    """Operands whose product is of the order of 1."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(case.dtype)

    halves = 2 if "g" in case.fused else 1
    weight = normal(case.out_size * halves, case.in_size) / case.in_size**0.5
    return Operands(
        3 * normal(case.num_tokens, case.in_size),
        weight,
        normal(case.in_size) if "n" in case.fused else None,
        normal(case.out_size * halves) if "b" in case.fused else None,
        normal(case.num_tokens, case.out_size) if "r" in case.fused else None,
    )


def compute(case: Case, operands: Operands, tuning: Tuning) -> Tensor:
    """Run the kernels; counts of parts are zeros again behind it."""
    arrivals = torch.zeros(case.out_size, dtype=torch.int32, device=operands.x.device)
    out = skinny_matmul.product(
        operands.x,
        operands.weight,
        tuning,
        norm=None if operands.norm is None else (operands.norm, EPS),
        gated="g" in case.fused,
        bias=operands.bias,
        residual=operands.residual,
        out=None
        if case.out_dtype is None
        else torch.full(
            (case.num_tokens, case.out_size),
            float("nan"),
            dtype=case.out_dtype,
            device=operands.x.device,
        ),
        arrivals=arrivals,
    )
    assert not arrivals.any()
    return out


def reference(case: Case, operands: Operands) -> Tensor:
    """The same in float64."""
    x, weight, norm, bias, residual = (
        None if operand is None else operand.double() for operand in operands
    )
    assert x is not None
    assert weight is not None
    if norm is not None:
        x = F.rms_norm(x, norm.shape, norm, EPS)
    out = F.linear(x, weight, bias)
    if "g" in case.fused:
        gate, up = out.chunk(2, dim=1)
        out = F.silu(gate) * up
    return out if residual is None else out + residual
