"""Products of a decode step on a GPU, as the sweeps of kernels and tiles time them.

Weights are random, in bf16, and used in turn so that none is found in the L2 cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from parrot_engine.models.ops import Affine, Norm, Ops, Residual
from parrot_engine.models.triton_ops import TritonOps
from torch import Tensor

from parrot_bench.engine.device import time_s

DTYPE = torch.bfloat16
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)
#: Bytes of weights used in turn: several times an L2 cache.
_ROTATED_BYTES = 256 * 2**20
_EPS = 1e-5


class Case(NamedTuple):
    """One weight of a model, and what surrounds its product."""

    model: str
    name: str
    kind: Literal["norm", "gated", "onto", "head"]
    #: Width of the output; gate and up are twice as many rows.
    out_size: int
    in_size: int
    bias: bool = False

    @property
    def rows(self) -> int:
        """Rows of the weight."""
        return self.out_size * (2 if self.kind == "gated" else 1)

    @property
    def weight_bytes(self) -> int:
        """Bytes that a product must read at least."""
        return self.rows * self.in_size * int(DTYPE.itemsize)


class Shape(NamedTuple):
    """A model, as far as its products go."""

    name: str
    num_layers: int
    cases: tuple[Case, ...]


def _shape(
    name: str,
    layers: int,
    hidden: int,
    inner: int,
    qkv: int,
    vocab: int,
    *,
    bias: bool,
    ranks: int = 1,
) -> Shape:
    cases = (
        Case(name, "qkv", "norm", qkv // ranks, hidden, bias),
        Case(name, "o", "onto", hidden, hidden // ranks),
        Case(name, "gate_up", "gated", inner // ranks, hidden),
        Case(name, "down", "onto", hidden, inner // ranks),
        Case(name, "head", "head", vocab // ranks, hidden),
    )
    return Shape(name, layers, cases)


SHAPES = {
    "8b": _shape("8b", 32, 4096, 14_336, 6144, 128_256, bias=False),
    # One of two ranks.
    "8b/2": _shape("8b/2", 32, 4096, 14_336, 6144, 128_256, bias=False, ranks=2),
    "0.5b": _shape("0.5b", 24, 896, 4864, 1152, 151_936, bias=True),
}
#: Kernels of their own around torch's product, which is what more tokens get.
UNFUSED = TritonOps(lambda case, device: None)


class Operands(NamedTuple):
    """The operands of a product of a case, with a weight for each turn."""

    x: Tensor
    delta: Tensor
    residual: Tensor
    norm: Norm
    weights: list[Affine]


def _normal(*shape: int) -> Tensor:
    return torch.empty(shape, device="cuda", dtype=DTYPE).normal_()


def affine(case: Case) -> Affine:
    """A weight of this case."""
    weight = _normal(case.rows, case.in_size).mul_(case.in_size**-0.5)
    return Affine(weight, _normal(case.rows) if case.bias else None)


def draw_operands(case: Case, tokens: int, weights: list[Affine]) -> Operands:
    """Rows for a product with these weights."""
    x, delta = _normal(tokens, case.in_size), _normal(tokens, case.in_size)
    norm = Norm(_normal(case.in_size), _EPS)
    return Operands(x, delta, _normal(tokens, case.out_size), norm, weights)


def apply(ops: Ops, case: Case, operands: Operands, linear: Affine) -> Tensor:
    """The product of a case with what surrounds it; the sum it leaves open is made by the next."""
    x, delta, residual, norm, _ = operands
    # What is not fused leaves a sum to the norm that follows.
    stream = Residual(x, delta) if ops is UNFUSED else Residual(x)
    if case.kind == "norm":
        return ops.norm_linear(stream, norm, linear).out
    if case.kind == "gated":
        return ops.norm_gated(stream, norm, linear, "silu").out
    if case.kind == "onto":
        onto = ops.linear_onto(residual, x, linear)
        return onto.hidden if onto.delta is None else onto.delta
    return ops.logits(x, norm, linear)


def weights_in_turn(case: Case) -> list[Affine]:
    """Make enough weights that none is found in the L2 cache."""
    count = max(1, min(96, -(-_ROTATED_BYTES // case.weight_bytes)))
    return [affine(case) for _ in range(count)]


def _time(work: Callable[[Affine], Any], operands: Operands, repeats: int = 9) -> float:
    """Seconds of one call, each with the next weight."""

    def turns() -> None:
        for linear in operands.weights:
            work(linear)

    return time_s(turns, repeats=repeats) / len(operands.weights)


def time_case(ops: Ops, case: Case, operands: Operands, repeats: int = 9) -> float:
    """Seconds of a product with what surrounds it."""
    return _time(partial(apply, ops, case, operands), operands, repeats)


def time_alone(operands: Operands) -> float:
    """Seconds of torch's product."""

    def work(linear: Affine) -> None:
        F.linear(operands.x, linear.weight, linear.bias)

    return _time(work, operands)
