"""Operations over rows of activations: torch's, or the Triton kernels for the same.

Attention and matrix products are not here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from parrot_engine.kernels.selection import Kernels


class Ops(NamedTuple):
    """One implementation of each operation; rows are contiguous."""

    #: (x, weight, eps): over the last axis, accumulating in float32.
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    #: (x, delta, weight, eps): norm of x + delta, and x + delta.
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    #: (gate and up side by side, activation): act(gate) x up.
    gated: Callable[[Tensor, str], Tensor]


def ops_of(kernels: Kernels) -> Ops:
    """The operations of a kind; triton is imported only when it is asked for."""
    if kernels == "torch":
        return Ops(_rms_norm, _add_rms_norm, _gated)
    from parrot_engine.kernels import rowwise

    def gated(gate_up: Tensor, activation: str) -> Tensor:
        return rowwise.swiglu(gate_up) if activation == "silu" else _gated(gate_up, activation)

    return Ops(rowwise.rms_norm, rowwise.add_rms_norm, gated)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def _add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    summed = x + delta
    return _rms_norm(summed, weight, eps), summed


def _gated(gate_up: Tensor, activation: str) -> Tensor:
    gate, up = gate_up.tensor_split(2, dim=-1)
    if activation == "silu":
        activated = F.silu(gate)
    else:
        activated = F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
    return activated.mul_(up)
