"""Operations of a decoder of which each rank holds a part.

The layers are those of a smaller model, save for one thing: what o and down yield is a rank's
share of a sum.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from parrot_engine.models.ops import Affine, Norm, Normed, Ops, Residual
from parrot_engine.models.sharding import Collective


class ShardedOps(Ops):
    """The operations of another kind, with the sum over ranks in `linear_onto`."""

    def __init__(self, ops: Ops, collective: Collective) -> None:
        self._ops = ops
        self._collective = collective

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        """See `Ops`."""
        return self._ops.rms_norm(x, norm)

    def add_rms_norm(self, residual: Residual, norm: Norm) -> Normed:
        """See `Ops`."""
        return self._ops.add_rms_norm(residual, norm)

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        """See `Ops`."""
        return self._ops.gated(gate_up, activation)

    def norm_linear(self, residual: Residual, norm: Norm, linear: Affine) -> Normed:
        """See `Ops`."""
        return self._ops.norm_linear(residual, norm, linear)

    def norm_gated(self, residual: Residual, norm: Norm, linear: Affine, activation: str) -> Normed:
        """See `Ops`."""
        return self._ops.norm_gated(residual, norm, linear, activation)

    def linear(self, x: Tensor, linear: Affine) -> Tensor:
        """See `Ops`."""
        return self._ops.linear(x, linear)

    def linear_onto(self, hidden: Tensor, x: Tensor, linear: Affine) -> Residual:
        """As `Ops`, for columns of `x` and of the weight that are divided among the ranks."""
        total = self._collective.all_reduce(self._ops.linear(x, Affine(linear.weight)))
        # Every rank holds the bias, and it is to be added once.
        return Residual(hidden, total if linear.bias is None else total + linear.bias)

    def logits(self, hidden: Tensor, norm: Norm, head: Affine, out: Tensor | None = None) -> Tensor:
        """See `Ops`; those of the rank's own rows of the head."""
        return self._ops.logits(hidden, norm, head, out)


def gather_logits(
    collective: Collective, part: Tensor, vocab_size: int, out: Tensor | None = None
) -> Tensor:
    """`[rows, vocab_size]` from the parts that the ranks computed, `[rows, share of it]`."""
    share = collective.shard.share(vocab_size)
    if part.shape[1] < share:
        part = F.pad(part, (0, share - part.shape[1]))
    parts = collective.all_gather(part).transpose(0, 1)
    if out is None or share * len(parts[0]) != vocab_size:
        whole = parts.reshape(len(parts), -1)[:, :vocab_size]
        return whole if out is None else out.copy_(whole)
    out.view(parts.shape).copy_(parts)
    return out
