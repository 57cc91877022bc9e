"""Products of few tokens on a GPU: `python -m parrot_engine.bench.matmul [--sweep]`.

For each weight of two models and 1 to 16 tokens: torch's product alone; the same with the norm,
activation and residual around it as kernels of their own; and what the table in
`kernels/skinny_tuning.py` chooses. Weights are random, in bf16, and used in turn so that none is
found in the L2 cache. Then all products of a decode step, every layer with weights of its own.
`--sweep` times other kernels and tiles instead; besides a line of JSON for each product it prints
the rows of that table.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from parrot_engine.bench.device import Limits, measure_limits, time_s
from parrot_engine.kernels.largest import find_largest
from parrot_engine.kernels.launch import device_limits
from parrot_engine.kernels.skinny_tuning import Product, Tuning
from parrot_engine.models.ops import Affine, Norm, Ops, Residual
from parrot_engine.models.triton_ops import TritonOps

_DTYPE = torch.bfloat16
_TOKENS = (1, 2, 4, 8, 16)
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
        return self.rows * self.in_size * int(_DTYPE.itemsize)


class Shape(NamedTuple):
    """A model, as far as its products go."""

    name: str
    num_layers: int
    cases: tuple[Case, ...]


def _shape(
    name: str, layers: int, hidden: int, inner: int, qkv: int, vocab: int, *, bias: bool
) -> Shape:
    cases = (
        Case(name, "qkv", "norm", qkv, hidden, bias),
        Case(name, "o", "onto", hidden, hidden),
        Case(name, "gate_up", "gated", inner, hidden),
        Case(name, "down", "onto", hidden, inner),
        Case(name, "head", "head", vocab, hidden),
    )
    return Shape(name, layers, cases)


SHAPES = {
    "8b": _shape("8b", 32, 4096, 14_336, 6144, 128_256, bias=False),
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
    return torch.empty(shape, device="cuda", dtype=_DTYPE).normal_()


def _affine(case: Case) -> Affine:
    weight = _normal(case.rows, case.in_size).mul_(case.in_size**-0.5)
    return Affine(weight, _normal(case.rows) if case.bias else None)


def _operands(case: Case, tokens: int, weights: list[Affine]) -> Operands:
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


def _turns(case: Case) -> int:
    return max(1, min(96, -(-_ROTATED_BYTES // case.weight_bytes)))


def _time(work: Callable[[Affine], Any], operands: Operands, repeats: int = 9) -> float:
    """Seconds of one call, each with the next weight."""

    def turns() -> None:
        for linear in operands.weights:
            work(linear)

    return time_s(turns, repeats=repeats) / len(operands.weights)


def _time_case(ops: Ops, case: Case, operands: Operands, repeats: int = 9) -> float:
    return _time(partial(apply, ops, case, operands), operands, repeats)


def _time_alone(operands: Operands) -> float:
    def work(linear: Affine) -> None:
        F.linear(operands.x, *linear)

    return _time(work, operands)


def _print(entry: dict[str, Any]) -> None:
    print(json.dumps(entry), flush=True)


def products(shape: Shape, token_counts: Sequence[int], limits: Limits) -> None:
    """Each weight alone: torch's product, the unfused operations, and the table's choice."""
    ours = TritonOps()
    for case in shape.cases:
        weights = [_affine(case) for _ in range(_turns(case))]
        for tokens in token_counts:
            operands = _operands(case, tokens, weights)
            alone = _time_alone(operands)
            unfused = _time_case(UNFUSED, case, operands)
            fused = _time_case(ours, case, operands)
            _print(
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
    layers = [[_affine(case) for case in parts] for _ in range(shape.num_layers)]
    head = _affine(head_case)
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
            ops.logits(stream.total(), norm, head)

        unfused, fused = (time_s(partial(work, ops), repeats=9) for ops in (UNFUSED, TritonOps()))
        _print(
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
    weight = _affine(case).weight
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
        _print(
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


def candidates(case: Case, tokens: int, shared_memory: int) -> Iterator[Tuning]:
    """Kernels and tiles worth trying for `tokens` tokens, a power of two."""
    halves = 2 if case.kind == "gated" else 1
    if tokens <= 4:
        warps = (2, 4, 8) if case.in_size > 1024 else (1, 2, 4)
        for block_out, num_warps, stages in itertools.product((1, 2, 4, 8), warps, (1, 3)):
            if block_out * tokens * halves <= 8:
                yield Tuning("vector", tokens, block_out, 256 * num_warps, num_warps, stages)
    if tokens == 1:
        return
    width = max(tokens, 8)
    columns = ((128, 2), (128, 4), (256, 2), (256, 4), (512, 4))
    for block_out, (block_in, num_warps), stages in itertools.product(
        (16, 32, 64), columns, (3, 5)
    ):
        # Below 8 tokens the tile only has to show which kernel wins.
        if tokens < 8 and stages == 3:
            continue
        stage = (block_out * halves + width) * block_in * _DTYPE.itemsize
        if (stages - 1) * stage > shared_memory - 4096:
            continue
        yield Tuning("tile", width, block_out, block_in, num_warps, stages)
        if case.kind == "onto" and block_in == 256 and num_warps == 4 and tokens >= 8:
            for splits in (2, 4):
                yield Tuning("tile", width, block_out, block_in, num_warps, stages, splits)


def _fixed(tuning: Tuning) -> TritonOps:
    def tune(case: Product, device: torch.device) -> Tuning:
        return tuning

    return TritonOps(tune)


def _compile(case: Case, tokens: int, tuning: Tuning) -> None:
    """Run one candidate once, which leaves it in Triton's cache on disk; failures show later."""
    weight = torch.empty(case.rows, case.in_size, device="cuda", dtype=_DTYPE)
    linear = Affine(weight, weight.new_empty(case.rows) if case.bias else None)
    try:
        apply(_fixed(tuning), case, _operands(case, tokens, [linear]), linear)
        torch.cuda.synchronize()
    except Exception as error:
        print(case.name, tokens, tuple(tuning), type(error).__name__, flush=True)


def sweep(shapes: Sequence[Shape], token_counts: Sequence[int], limits: Limits) -> None:
    """Time all candidates: a line for each product, and a row of the table for each weight."""
    memory = device_limits(torch.device("cuda")).shared_memory
    jobs = [
        (case, tokens, tuning)
        for shape in shapes
        for case in shape.cases
        for tokens in token_counts
        for tuning in candidates(case, tokens, memory)
    ]
    workers = max(1, min(14, (os.cpu_count() or 2) - 2))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        list(pool.map(_compile, *zip(*jobs, strict=True), chunksize=4))
    _print({"candidates": len(jobs)})
    for case, of_case in itertools.groupby(jobs, key=lambda job: job[0]):
        weights = [_affine(case) for _ in range(_turns(case))]
        chosen = []
        for tokens, of_tokens in itertools.groupby(of_case, key=lambda job: job[1]):
            tunings = [tuning for _, _, tuning in of_tokens]
            entry = _best(case, _operands(case, tokens, weights), tunings)
            seconds = entry["us"] / 1e6
            of_copy = round(case.weight_bytes / seconds / limits.bytes_per_s, 3)
            _print(
                {"case": f"{case.model} {case.name}", "tokens": tokens, "of_copy": of_copy, **entry}
            )
            won = entry["us"] < entry["unfused_us"]
            chosen.append(_as_row(Tuning(*entry["best"][0][1:])) if won else "None")
        key = (case.kind == "gated", case.out_size, case.in_size)
        print(f"    {key}: ({', '.join(chosen)}),", flush=True)


def _best(case: Case, operands: Operands, tunings: Sequence[Tuning]) -> dict[str, Any]:
    """The fastest of `tunings`, the first few timed again, beside torch."""

    def ranked(tunings: Sequence[Tuning], repeats: int) -> list[tuple[float, Tuning]]:
        timed = [(_try(case, operands, tuning, repeats), tuning) for tuning in tunings]
        return sorted(timed, key=lambda entry: entry[0])

    first = ranked(tunings, 5)
    again = ranked([tuning for _, tuning in first[:4]], 25)
    kinds = {}
    for seconds, tuning in reversed(first):
        kinds[tuning.kind + (" cut" if tuning.splits > 1 else "")] = (seconds, tuning)
    return {
        "torch_us": round(1e6 * _time_alone(operands), 2),
        "unfused_us": round(1e6 * _time_case(UNFUSED, case, operands), 2),
        "us": round(1e6 * again[0][0], 2),
        "best": [[round(seconds * 1e6, 2), *tuning] for seconds, tuning in again],
        "by_kind": {kind: [round(s * 1e6, 2), *tuning] for kind, (s, tuning) in kinds.items()},
    }


def _as_row(tuning: Tuning) -> str:
    """As it stands in `skinny_tuning.MEASURED`."""
    if tuning.kind == "vector":
        return f"Vector({tuning.block_out}, {tuning.num_warps}, {tuning.num_stages})"
    splits = f", {tuning.splits}" if tuning.splits > 1 else ""
    return (
        f"Tile({tuning.block_out}, {tuning.block_in}, {tuning.num_warps}, "
        f"{tuning.num_stages}{splits})"
    )


def _try(case: Case, operands: Operands, tuning: Tuning, repeats: int) -> float:
    """Seconds of a candidate; infinite when it does not run, or is wrong."""
    ops, linear = _fixed(tuning), operands.weights[0]
    try:
        out = apply(ops, case, operands, linear).float()
        expected = apply(Ops(), case, operands, linear).float()
        if case.kind == "onto":
            expected += operands.residual
        error = float((out - expected).norm() / expected.norm())
        if not error < 0.01:
            print(case.name, tuple(tuning), "wrong by", error, flush=True)
            return float("inf")
        return _time_case(ops, case, operands, repeats=repeats)
    except Exception as error:
        print(case.name, tuple(tuning), type(error).__name__, flush=True)
        return float("inf")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="other kernels and tiles")
    parser.add_argument("--models", nargs="*", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--tokens", type=int, nargs="*", choices=_TOKENS, default=list(_TOKENS))
    parser.add_argument("--cases", nargs="*", help="of a sweep: qkv, o, gate_up, down, head")
    options = parser.parse_args(arguments)
    with torch.inference_mode():
        limits = measure_limits()
        torch.cuda.empty_cache()
        _print(limits._asdict())
        shapes = [SHAPES[name] for name in options.models]
        if options.sweep:
            shapes = [
                shape._replace(
                    cases=tuple(
                        case
                        for case in shape.cases
                        if options.cases is None or case.name in options.cases
                    )
                )
                for shape in shapes
            ]
            sweep(shapes, options.tokens, limits)
            return
        for shape in shapes:
            products(shape, options.tokens, limits)
            steps(shape, options.tokens, limits)
            heads(shape, limits)


if __name__ == "__main__":
    main()
