"""Operations of a decoder on rows of activations, in torch.

`models/triton_ops.py` does the same with Triton kernels; attention is elsewhere. The residual
stream is passed on as a sum whose last addition may be pending (`Residual`). An implementation can
do it where it is cheapest: with the norm that reads the sum, or with the product that writes its
second part.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from parrot_engine.attention.interface import Rotation
from parrot_engine.kernels.experts.grouped_tuning import ExpertWeights
from parrot_engine.models.config import RopeConfig
from parrot_engine.models.lora import LoraProduct
from parrot_engine.models.rope import frequencies
from parrot_engine.models.sharding import Collective
from parrot_engine.quantization.packed import PackedWeight


class Norm(NamedTuple):
    """An RMSNorm: its weight, and the epsilon under the root."""

    weight: Tensor
    eps: float


class Affine(NamedTuple):
    """x W^T + b, where W is `[out, in]`."""

    weight: Tensor
    bias: Tensor | None = None
    #: W as codes and scales; `weight` then has only its shape.
    packed: PackedWeight | None = None
    #: Adapters' addition to the product of some tokens.
    lora: LoraProduct | None = None


class Experts(NamedTuple):
    """The experts of a mixture, and the rule that chooses those of a token."""

    weights: ExpertWeights
    #: Experts per token, the most probable ones.
    top_k: int
    #: True: the factors of a token's experts add up to 1; False: they are the probabilities.
    normalize: bool
    #: The experts with weights here, if ranks hold whole ones; None: all.
    local: range | None = None


class Residual(NamedTuple):
    """`[num_tokens, hidden_size]` and a pending addition to it."""

    hidden: Tensor
    delta: Tensor | None = None
    #: True: `delta` is this rank's share of a sum, without the others' shares.
    is_share: bool = False


class Normed(NamedTuple):
    """The result computed from the norm of a residual stream, and the completed stream."""

    out: Tensor
    hidden: Tensor


class Branch(NamedTuple):
    """The operations on the output of attention or MLP before its addition to the stream."""

    norm: Norm | None = None
    scale: float = 1.0


PLAIN = Branch()


class Angles(NamedTuple):
    """cos and sin for one step's positions, `[num_tokens, 1, head_dim / 2]`, in the model dtype.

    Unrotated pairs of a head come last, with cos 1 and sin 0.
    """

    cos: Tensor
    sin: Tensor


class Rotary:
    """Converts positions to angles.

    They are computed rather than looked up, so there is no table to size and no limit on the
    position.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device) -> None:
        inverse, self._attention_factor = frequencies(rope, head_dim)
        self._inverse = inverse.to(device)
        self._num_still = head_dim // 2 - len(inverse)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> Angles:
        """Return angles for `positions` `[num_tokens]`; computed in float32, returned in
        `dtype`.
        """
        angle = positions[:, None].float() * self._inverse
        cos, sin = angle.cos(), angle.sin()
        if self._attention_factor != 1.0:
            cos, sin = cos * self._attention_factor, sin * self._attention_factor
        if self._num_still:
            cos = F.pad(cos, (0, self._num_still), value=1.0)
            sin = F.pad(sin, (0, self._num_still))
        return Angles(cos.to(dtype)[:, None], sin.to(dtype)[:, None])


def rotate(heads: Tensor, angles: Angles, rotation: Rotation | None = None) -> Tensor:
    """Rotate `heads` `[num_tokens, heads, head_dim]`; None: element i with i + head_dim / 2."""
    dim = heads.shape[-1]
    size, interleaved = rotation or Rotation(dim)
    half = size // 2
    places = (
        (slice(0, size, 2), slice(1, size, 2)) if interleaved else (slice(half), slice(half, size))
    )
    cos, sin = (part[..., :half] for part in angles)
    first, second = (heads[..., place] for place in places)
    rotated = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    torch.mul(first, cos, out=rotated[..., places[0]]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=rotated[..., places[1]]).addcmul_(first, sin)
    if size < dim:
        rotated[..., size:] = heads[..., size:]
    return rotated


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """Normalise the last axis of `x`, whose rows may be apart; accumulates in float32."""
    weight, eps = norm
    if weight.dtype is x.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


class Ops:
    """Torch's implementation; rows are contiguous.

    With a `collective` each rank holds a part of the model: its layers are those of a smaller one,
    except that the outputs of o and down (`linear_onto`) are a rank's share of a sum.
    """

    def __init__(self, collective: Collective | None = None) -> None:
        self._collective = collective

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        """Normalise the last axis, accumulating in float32."""
        return rms_norm(x, norm)

    def total(self, residual: Residual) -> Tensor:
        """Return the completed stream."""
        return residual.hidden if residual.delta is None else residual.hidden + residual.delta

    def add_rms_norm(self, residual: Residual, norm: Norm | None) -> Normed:
        """Return the norm of the stream, or the stream itself."""
        summed = self.total(residual)
        return Normed(summed if norm is None else self.rms_norm(summed, norm), summed)

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        """Return act(gate) x up for gate and up side by side (arXiv 2002.05202)."""
        gate, up = gate_up.tensor_split(2, dim=-1)
        if activation == "silu":
            activated = F.silu(gate)
        else:
            activated = F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
        return activated.mul_(up)

    def norm_linear(self, residual: Residual, norm: Norm | None, linear: Affine) -> Normed:
        """Normalise the stream, then multiply."""
        normed, hidden = self.add_rms_norm(residual, norm)
        return Normed(self.linear(normed, linear), hidden)

    def norm_gated(
        self, residual: Residual, norm: Norm | None, linear: Affine, activation: str
    ) -> Normed:
        """Normalise the stream, multiply with gate and up, then apply `gated`."""
        gate_up, hidden = self.norm_linear(residual, norm, linear)
        return Normed(self.gated(gate_up, activation), hidden)

    def linear(self, x: Tensor, linear: Affine) -> Tensor:
        out = F.linear(x, linear.weight, linear.bias)
        if linear.lora is not None:
            self.add_lora(out, x, linear.lora)
        return out

    def add_lora(self, out: Tensor, x: Tensor, lora: LoraProduct) -> None:
        """Add the adapters' part of the product of `x` to `out`."""
        lora.slots.add(out, x, lora.rows)

    def linear_onto(
        self, hidden: Tensor, x: Tensor, linear: Affine, branch: Branch = PLAIN
    ) -> Residual:
        """Return `hidden` plus the product of x, possibly with the addition pending.

        With ranks, columns of `x` and the weight are divided among them, and the product is summed.
        """
        if self._collective is None:
            product = self.linear(x, linear)
        else:
            product = self._collective.all_reduce(self.share(x, linear, self._collective))
        return Residual(hidden, self._finish(product, branch))

    def _finish(self, x: Tensor, branch: Branch) -> Tensor:
        if branch.norm is not None:
            x = self.rms_norm(x, branch.norm)
        return x if branch.scale == 1.0 else x * branch.scale

    def share(self, x: Tensor, linear: Affine, collective: Collective) -> Tensor:
        """Return a rank's share of a product with divided columns."""
        # Every rank holds the bias, which must be added once.
        bias = linear.bias if collective.shard.rank == 0 else None
        return self.linear(x, linear._replace(bias=bias))

    def experts_onto(self, hidden: Tensor, x: Tensor, router: Affine, experts: Experts) -> Residual:
        """Return `hidden` plus the mixture of experts of x, possibly with the addition pending.

        With ranks, the inner rows of all experts or the experts themselves are divided, and the
        mixture is summed.
        """
        mixed = self._mix(x, router, self._share_of(experts))
        if self._collective is not None:
            mixed = self._collective.all_reduce(mixed)
        return Residual(hidden, mixed)

    def _share_of(self, experts: Experts) -> Experts:
        """Drop the bias of down on all ranks except the first, because it must be added once."""
        if self._collective is None or self._collective.shard.rank == 0:
            return experts
        if experts.local is not None:
            return experts
        return experts._replace(weights=experts.weights._replace(down_bias=None))

    def _mix(self, x: Tensor, router: Affine, experts: Experts) -> Tensor:
        probabilities = F.linear(x, router.weight, router.bias).softmax(dim=-1, dtype=torch.float32)
        factors, chosen = probabilities.topk(experts.top_k)
        if experts.normalize:
            factors /= factors.sum(dim=-1, keepdim=True)
        mixed = torch.zeros_like(x)
        held = experts.local or range(len(router.weight))
        for expert in chosen.unique().tolist():
            if expert not in held:
                continue
            token, place = torch.where(chosen == expert)
            out = self._expert(x[token], experts.weights, expert - held.start)
            out = out * factors[token, place, None]
            mixed.index_add_(0, token, out.to(mixed.dtype))
        return mixed

    def _expert(self, x: Tensor, weights: ExpertWeights, index: int) -> Tensor:
        gate_up, down, gate_up_bias, down_bias, alpha, limit, _ = weights
        inner = F.linear(x, gate_up[index], None if gate_up_bias is None else gate_up_bias[index])
        if limit is None:
            inner = self.gated(inner, "silu")
        else:
            gate, up = inner.tensor_split(2, dim=-1)
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            inner = gate * torch.sigmoid(alpha * gate) * (up + 1)
        return F.linear(inner, down[index], None if down_bias is None else down_bias[index])

    def logits(self, hidden: Tensor, norm: Norm, head: Affine, out: Tensor | None = None) -> Tensor:
        """Apply the norm and the output head: float32, into `out` if given.

        With ranks, returns the logits of the rank's own rows of the head.
        """
        logits = F.linear(self.rms_norm(hidden, norm), head.weight, head.bias)
        return logits.float() if out is None else out.copy_(logits)
