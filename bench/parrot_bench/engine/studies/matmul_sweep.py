"""Sweep of kernels and tiles: `parrot-gateway bench studies matmul_sweep`.

Times every candidate for the products of `matmul`, and prints a line of JSON for each product.
With `--table FILE` the best go into that table: the engine's is `kernels/tunings/dense.csv`.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from parrot_engine.attention.launch import device_limits
from parrot_engine.kernels.matmul.skinny_tuning import MAX_NORM_TOKENS
from parrot_engine.kernels.tuning import Measured, Product, Tuning
from parrot_engine.models.ops import Affine, Ops
from parrot_engine.models.triton_ops import TritonOps

from parrot_bench.engine.device import Limits, measure_limits
from parrot_bench.engine.studies.harness import emit
from parrot_bench.engine.studies.matmul import (
    DTYPE,
    SHAPES,
    TOKENS,
    UNFUSED,
    Case,
    Operands,
    Shape,
    apply,
    draw_operands,
    time_alone,
    time_case,
    weights_in_turn,
)
from parrot_bench.engine.studies.tuning_tables import Best, compile_all, fastest, update_table


def candidates(case: Case, tokens: int, shared_memory: int) -> Iterator[Tuning]:
    """Kernels and tiles worth trying for `tokens` tokens, a power of two."""
    halves = 2 if case.kind == "gated" else 1
    if tokens <= 4:
        warps = (2, 4, 8) if case.in_size > 1024 else (1, 2, 4)
        for block_out, num_warps, stages in itertools.product((1, 2, 4, 8), warps, (1, 3)):
            if block_out * tokens * halves <= 8:
                yield Tuning("vector", tokens, block_out, 256 * num_warps, num_warps, stages)
    if 1 < tokens <= 16:
        yield from _by_pointer(case, tokens, shared_memory)
    if tokens > 1:
        yield from _by_descriptor(case, tokens, shared_memory)


def _by_pointer(case: Case, tokens: int, shared_memory: int) -> Iterator[Tuning]:
    halves, width = 2 if case.kind == "gated" else 1, max(tokens, 8)
    columns = ((128, 2), (128, 4), (256, 2), (256, 4), (512, 4))
    for block_out, (block_in, num_warps), stages in itertools.product(
        (16, 32, 64), columns, (3, 5)
    ):
        # Below 8 tokens the tile only has to show which kernel wins.
        if tokens < 8 and stages == 3:
            continue
        stage = (block_out * halves + width) * block_in * DTYPE.itemsize
        if (stages - 1) * stage > shared_memory - 4096:
            continue
        yield Tuning("tile", width, block_out, block_in, num_warps, stages)
        if case.kind == "onto" and block_in == 256 and num_warps == 4 and tokens >= 8:
            for splits in (2, 4):
                yield Tuning("tile", width, block_out, block_in, num_warps, stages, splits)


def _by_descriptor(case: Case, tokens: int, shared_memory: int) -> Iterator[Tuning]:
    halves, width = 2 if case.kind == "gated" else 1, max(tokens, 16)
    columns = ((64, 4), (64, 8), (128, 4), (128, 8), (256, 4))
    cut = case.kind == "onto" or (case.kind == "norm" and tokens > MAX_NORM_TOKENS)
    for block_out, (block_in, num_warps), stages in itertools.product(
        (64, 128), columns, (2, 3, 4, 5, 6, 8)
    ):
        size = stages * (block_out * halves + width) * block_in * DTYPE.itemsize
        # With few bytes in flight none is fast.
        if not 60_000 <= size <= shared_memory - 4096:
            continue
        for splits in (1, 2, 4) if cut and block_in > 64 else (1,):
            yield Tuning(
                "tile", width, block_out, block_in, num_warps, stages, splits, descriptors=True
            )


def _fixed(tuning: Tuning) -> TritonOps:
    def tune(case: Product, device: torch.device) -> Tuning | None:
        return None if case.norm and case.num_tokens > MAX_NORM_TOKENS else tuning

    return TritonOps(tune)


def _compile(case: Case, tokens: int, tuning: Tuning) -> None:
    """Run one candidate once, which leaves it in Triton's cache on disk; failures show later."""
    weight = torch.empty(case.rows, case.in_size, device="cuda", dtype=DTYPE)
    linear = Affine(weight, weight.new_empty(case.rows) if case.bias else None)
    try:
        apply(_fixed(tuning), case, draw_operands(case, tokens, [linear]), linear)
        torch.cuda.synchronize()
    except Exception as error:
        print(case.name, tokens, tuple(tuning), type(error).__name__, flush=True)


def sweep(shapes: Sequence[Shape], token_counts: Sequence[int], limits: Limits) -> Best:
    """Time all candidates, print a line for each product, and return the rows of the table."""
    memory = device_limits(torch.device("cuda")).shared_memory
    jobs = [
        (case, tokens, tuning)
        for shape in shapes
        for case in shape.cases
        for tokens in token_counts
        for tuning in candidates(case, tokens, memory)
    ]
    compile_all(_compile, jobs)
    emit({"candidates": len(jobs)})
    best: Best = {}
    for case, of_case in itertools.groupby(jobs, key=lambda job: job[0]):
        weights = weights_in_turn(case)
        measured = Measured("dense", case.kind == "gated", case.out_size, case.in_size)
        for tokens, of_tokens in itertools.groupby(of_case, key=lambda job: job[1]):
            tunings = [tuning for _, _, tuning in of_tokens]
            operands = draw_operands(case, tokens, weights)
            entry = {
                "torch_us": round(1e6 * time_alone(operands), 2),
                "unfused_us": round(1e6 * time_case(UNFUSED, case, operands), 2),
                **fastest(tunings, partial(_try, case, operands), (6, 25)),
            }
            seconds = entry["us"] / 1e6
            of_copy = round(case.weight_bytes / seconds / limits.bytes_per_s, 3)
            emit(
                {"case": f"{case.model} {case.name}", "tokens": tokens, "of_copy": of_copy, **entry}
            )
            won = entry["us"] < entry["unfused_us"]
            best.setdefault(measured, {})[tokens] = Tuning(*entry["best"][0][1:]) if won else None
    return best


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
        return time_case(ops, case, operands, repeats=repeats)
    except Exception as error:
        print(case.name, tuple(tuning), type(error).__name__, flush=True)
        return float("inf")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `harness.Study`."""
    parser.add_argument("--models", nargs="*", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--tokens", type=int, nargs="*", choices=TOKENS, default=list(TOKENS))
    parser.add_argument("--cases", nargs="*", help="qkv, o, gate_up, down, head; default: all")
    parser.add_argument("--table", type=Path, metavar="FILE", help="the table to update")


def run(options: argparse.Namespace) -> None:
    """See `harness.Study`."""
    with torch.inference_mode():
        limits = measure_limits()
        torch.cuda.empty_cache()
        emit(limits._asdict())
        shapes = [SHAPES[name] for name in options.models]
        if options.cases is not None:
            shapes = [
                shape._replace(cases=tuple(c for c in shape.cases if c.name in options.cases))
                for shape in shapes
            ]
        best = sweep(shapes, options.tokens, limits)
        if options.table is not None:
            update_table(options.table, best)
