"""Products of few tokens on a GPU: `parrot-gateway bench studies matmul`.

For each weight of two models and 1 to 128 tokens: torch's product alone; the same with the norm,
activation and residual around it as kernels of their own; and what the table in
`kernels/matmul/skinny_tuning.py` chooses. Weights are random, in bf16, and used in turn so that
none is found in the L2 cache. Then all products of a decode step, every layer with weights of its
own. Where that table comes from: `matmul_sweep`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from parrot_engine.kernels.sampling.logits import find_largest
from parrot_engine.models.ops import Affine, Norm, Ops, Residual
from parrot_engine.models.triton_ops import TritonOps
from torch import Tensor

from parrot_bench.engine.device import Limits, measure_limits, time_s
from parrot_bench.engine.studies.harness import emit

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
    """What a product of a case needs, with a weight for each turn."""

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
    """As many weights as it takes that none is found in the L2 cache."""
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


def products(shape: Shape, token_counts: Sequence[int], limits: Limits) -> None:
    """Each weight alone: torch's product, the unfused operations, and the table's choice."""
    ours = TritonOps()
    for case in shape.cases:
        weights = weights_in_turn(case)
        for tokens in token_counts:
            operands = draw_operands(case, tokens, weights)
            alone = time_alone(operands)
            unfused = time_case(UNFUSED, case, operands)
            fused = time_case(ours, case, operands)
            emit(
                {
                    "case": f"{case.model} {case.name}",
                    "tokens": tokens,
                    "torch_us": round(alone * 1e6, 2),
                    "unfused_us": round(unfused * 1e6, 2),
                    "us": round(fused * 1e6, 2),
                    "of_copy": round(case.weight_bytes / fused / limits.bytes_per_s, 3),
                }
            )


def steps(shape: Shape, token_counts: Sequence[int], limits: Limits) -> None:
    """All products of a decode step, with what is fused into them, and the head."""
    *parts, head_case = shape.cases
    layers = [[affine(case) for case in parts] for _ in range(shape.num_layers)]
    head = affine(head_case)
    moved = sum(case.weight_bytes for case in parts) * shape.num_layers + head_case.weight_bytes
    norm = Norm(_normal(parts[0].in_size), _EPS)
    for tokens in token_counts:
        hidden = _normal(tokens, parts[0].in_size)
        attended = _normal(tokens, parts[1].in_size)

        def work(ops: Ops, hidden: Tensor = hidden, attended: Tensor = attended) -> None:
            stream = Residual(hidden)
            for qkv, out, gate_up, down in layers:
                _, summed = ops.norm_linear(stream, norm, qkv)
                stream = ops.linear_onto(summed, attended, out)
                inner, summed = ops.norm_gated(stream, norm, gate_up, "silu")
                stream = ops.linear_onto(summed, inner, down)
            ops.logits(ops.total(stream), norm, head)

        unfused, fused = (time_s(partial(work, ops), repeats=9) for ops in (UNFUSED, TritonOps()))
        emit(
            {
                "case": f"{shape.name} all products of a step",
                "tokens": tokens,
                "bound_ms": round(1000 * moved / limits.bytes_per_s, 3),
                "unfused_ms": round(1000 * unfused, 3),
                "ms": round(1000 * fused, 3),
                "of_copy": round(moved / fused / limits.bytes_per_s, 3),
            }
        )


def heads(shape: Shape, limits: Limits) -> None:
    """Behind the last layer: greedy choice, and float32 logits of batches that torch multiplies."""
    case = shape.cases[-1]
    weight = affine(case).weight
    for tokens in (1, 8, 64, 256):
        x = _normal(tokens, case.in_size)
        logits = torch.randn(tokens, case.out_size, device="cuda")

        def widen(x: Tensor = x) -> Tensor:
            return F.linear(x, weight).float()

        def wide(x: Tensor = x) -> Tensor:
            return torch.mm(x, weight.t(), out_dtype=torch.float32)

        found = (logits[:, 0].contiguous(), *torch.empty((2, tokens), dtype=torch.int64).cuda())
        argmax = time_s(partial(torch.argmax, logits, dim=-1), calls=4)
        largest = time_s(partial(find_largest, logits, *found), calls=4)
        emit(
            {
                "case": f"{case.model} behind the layers",
                "tokens": tokens,
                "argmax_us": round(argmax * 1e6, 1),
                "largest_us": round(largest * 1e6, 1),
                "argmax_floor_us": round(logits.nbytes / limits.bytes_per_s * 1e6, 1),
                "product_then_float_us": round(time_s(widen) * 1e6, 1),
                "product_to_float32_us": round(time_s(wide) * 1e6, 1),
            }
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `harness.Study`."""
    parser.add_argument("--models", nargs="*", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--tokens", type=int, nargs="*", choices=TOKENS, default=list(TOKENS))


def run(options: argparse.Namespace) -> None:
    """See `harness.Study`."""
    with torch.inference_mode():
        limits = measure_limits()
        torch.cuda.empty_cache()
        emit(limits._asdict())
        for shape in (SHAPES[name] for name in options.models):
            products(shape, options.tokens, limits)
            steps(shape, options.tokens, limits)
            heads(shape, limits)
