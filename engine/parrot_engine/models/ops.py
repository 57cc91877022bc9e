"""Operations of a decoder on rows of activations, in torch.

`models/triton_ops.py` does the same with Triton kernels. Attention is not here. The residual
stream is handed on as a sum whose last addition may still be open (`Residual`), so that an
implementation can do it where it costs least: with the norm that reads the sum, or with the
product that writes its second part.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from parrot_engine.kernels.selection import Kernels
from parrot_engine.models.sharding import Collective


class Norm(NamedTuple):
    """An RMSNorm: its weight, and what keeps the root from zero."""

    weight: Tensor
    eps: float


class Affine(NamedTuple):
    """x W^T + b, W being `[out, in]`."""

    weight: Tensor
    bias: Tensor | None = None


class Residual(NamedTuple):
    """`[num_tokens, hidden_size]` and what is still to be added to it."""

    hidden: Tensor
    delta: Tensor | None = None

    def total(self) -> Tensor:
        """The sum."""
        return self.hidden if self.delta is None else self.hidden + self.delta


class Normed(NamedTuple):
    """What was computed from the norm of a residual stream, and the stream with nothing open."""

    out: Tensor
    hidden: Tensor


class Ops:
    """Torch's implementation; rows are contiguous."""

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        """Over the last axis, accumulating in float32."""
        return F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)

    def add_rms_norm(self, residual: Residual, norm: Norm) -> Normed:
        """Norm of the stream."""
        summed = residual.total()
        return Normed(self.rms_norm(summed, norm), summed)

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        """act(gate) x up for gate and up side by side (arXiv 2002.05202)."""
        gate, up = gate_up.tensor_split(2, dim=-1)
        if activation == "silu":
            activated = F.silu(gate)
        else:
            activated = F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
        return activated.mul_(up)

    def norm_linear(self, residual: Residual, norm: Norm, linear: Affine) -> Normed:
        """Norm of the stream, then a product."""
        normed, hidden = self.add_rms_norm(residual, norm)
        return Normed(F.linear(normed, *linear), hidden)

    def norm_gated(self, residual: Residual, norm: Norm, linear: Affine, activation: str) -> Normed:
        """Norm of the stream, the product with gate and up, then `gated`."""
        gate_up, hidden = self.norm_linear(residual, norm, linear)
        return Normed(self.gated(gate_up, activation), hidden)

    def linear(self, x: Tensor, linear: Affine) -> Tensor:
        """The product alone."""
        return F.linear(x, *linear)

    def linear_onto(self, hidden: Tensor, x: Tensor, linear: Affine) -> Residual:
        """`hidden` and the product of x, added up or not."""
        return Residual(hidden, F.linear(x, *linear))

    def logits(self, hidden: Tensor, norm: Norm, head: Affine, out: Tensor | None = None) -> Tensor:
        """Norm, then the output head: float32, into `out` where one is given."""
        logits = F.linear(self.rms_norm(hidden, norm), *head)
        return logits.float() if out is None else out.copy_(logits)


def ops_of(kernels: Kernels, collective: Collective | None = None) -> Ops:
    """The operations of a kind, for a model that ranks hold together where `collective` is given.

    Triton is imported only when it is asked for.
    """
    ops = Ops()
    if kernels == "triton":
        from parrot_engine.models.triton_ops import TritonOps

        ops = TritonOps()
    if collective is None:
        return ops
    from parrot_engine.models.sharded_ops import ShardedOps

    return ShardedOps(ops, collective)
