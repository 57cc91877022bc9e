"""Products with packed weights on a GPU: `parrot-gateway bench studies quantized_matmul`.

Times every candidate for the products of `matmul`'s models in several formats, weights used in turn
so that none is found in the L2 cache, and prints a line of JSON for each. With
`--tables FOLDER` the best go into tables there: the engine's are in `kernels/tunings`.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from parrot_engine.attention.launch import device_limits
from parrot_engine.kernels.matmul.quantized_matmul import quantized_product
from parrot_engine.kernels.matmul.quantized_tuning import (
    HOPPER_TABLE,
    STEP_COLUMNS,
    TABLE,
    fit,
    takes_ring,
    takes_vector,
    vector_columns,
)
from parrot_engine.kernels.matmul.skinny_tuning import MAX_NORM_TOKENS
from parrot_engine.kernels.tuning import Measured, Product, Tuning, num_counters
from parrot_engine.quantization.packed import PackedWeight, pack
from parrot_engine.quantization.weights import QuantizedWeight
from torch import Tensor

from parrot_bench.engine.device import time_s
from parrot_bench.engine.studies.harness import emit
from parrot_bench.engine.studies.matmul import DTYPE, SHAPES, Case
from parrot_bench.engine.studies.tuning_tables import Best, compile_all, fastest, update_table

#: Bits, and rows and columns of a block of codes with one scale; 0: all columns.
FORMS = {"fp8": (8, 1, 0), "fp8 in groups": (8, 128, 128), "int4 in groups": (4, 1, 128)}
_ROTATED_BYTES = 200 * 2**20
_EPS = 1e-5


class Job(NamedTuple):
    """One product in one format, of some tokens."""

    form: str
    case: Case
    tokens: int

    @property
    def product(self) -> Product:
        case = self.case
        norm = case.kind in ("norm", "gated")
        norm = norm and (self.tokens <= MAX_NORM_TOKENS or FORMS[self.form][0] == 8)
        return Product(self.tokens, case.out_size, case.in_size, DTYPE, case.kind == "gated", norm)


def draw_weight(job: Job) -> PackedWeight:
    bits, height, width = FORMS[job.form]
    rows, columns = job.case.rows, job.case.in_size
    count = (-(-rows // height), -(-columns // (width or columns)))
    scales = (
        torch.rand(count, device="cuda").add_(0.5).mul_(columns**-0.5 / (32 if bits == 8 else 4.6))
    )
    if bits == 8:
        codes = torch.randn(rows, columns, device="cuda").mul_(32).to(torch.float8_e4m3fn)
    else:
        codes = torch.randint(-8, 8, (rows, columns), device="cuda", dtype=torch.int8)
        scales = scales.to(DTYPE)
    block = (height, width or columns)
    packed = pack(QuantizedWeight(codes, scales, block, bits=bits), torch.device("cuda"))
    assert packed is not None
    return packed


class Operands(NamedTuple):
    x: Tensor
    residual: Tensor
    norm: Tensor


def draw_operands(job: Job) -> Operands:
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").to(DTYPE)

    case = job.case
    return Operands(
        normal(job.tokens, case.in_size), normal(job.tokens, case.out_size), normal(case.in_size)
    )


def apply(job: Job, operands: Operands, weight: PackedWeight, tuning: Tuning) -> Tensor:
    x, residual, norm = operands
    product = job.product
    return quantized_product(
        x,
        weight,
        tuning,
        norm=(norm, _EPS) if product.norm else None,
        gated=product.gated,
        residual=residual if job.case.kind == "onto" else None,
        arrivals=_arrivals(num_counters(tuning, product.out_size)) if tuning.splits > 1 else None,
    )


_COUNTS: dict[int, Tensor] = {}


def _arrivals(count: int) -> Tensor:
    if count not in _COUNTS:
        _COUNTS[count] = torch.zeros(count, dtype=torch.int32, device="cuda")
    return _COUNTS[count]


def expected(job: Job, operands: Operands, weight: PackedWeight) -> Tensor:
    x = operands.x.float()
    if job.product.norm:
        x = F.rms_norm(x, operands.norm.shape, operands.norm.float(), _EPS)
    out = F.linear(x, weight.dense(torch.float32))
    if job.product.gated:
        gate, up = out.chunk(2, dim=1)
        out = F.silu(gate) * up
    return out + operands.residual if job.case.kind == "onto" else out


def candidates(job: Job, weight: PackedWeight, shared_memory: int) -> Iterator[Tuning]:
    """Kernels and tiles worth trying."""
    product = job.product
    if job.tokens == 1:
        for block_out, warps, stages in itertools.product((2, 4, 8, 16), (2, 4, 8), (1, 3)):
            columns = vector_columns(weight) * warps
            tuning = Tuning("vector", 1, block_out, columns, warps, stages)
            rows = block_out * (2 if product.gated else 1)
            if rows <= 16 and takes_vector(tuning, product, weight):
                yield tuning
        return
    width = max(16, 1 << (job.tokens - 1).bit_length())
    kind: Literal["split", "tile"] = "split" if weight.kind == "fp8" else "tile"
    cut = job.case.kind == "onto" or (job.case.kind == "norm" and kind == "split")
    seen = set()
    for (block_out, warps), columns, stages, splits in itertools.product(
        [(64, 4), (128, 8), (128, 4)], (128, 256), (3, 5, 8), (1, 2, 4) if cut else (1,)
    ):
        tuning = Tuning(
            kind, min(width, 128), block_out, columns, warps, stages, splits, descriptors=True
        )
        tuning = fit(tuning, product, weight, shared_memory, copy_engine=True)
        if tuning not in seen:
            seen.add(tuning)
            yield tuning
    if not takes_ring(weight):
        return
    for block_out, splits, stages in itertools.product((64, 128), (1, 2, 3, 4), (2, 3, 4, 6, 12)):
        programs = -(-product.out_size // block_out) * splits
        if not 80 <= programs <= 264 or (product.gated and splits > 1):
            continue
        tuning = Tuning(
            "specialized",
            min(width, 128),
            block_out,
            STEP_COLUMNS,
            block_out // 16,
            stages,
            splits,
            descriptors=True,
        )
        tuning = fit(tuning, product, weight, shared_memory, copy_engine=True)
        if tuning not in seen:
            seen.add(tuning)
            yield tuning


def _compile(job: Job, tuning: Tuning) -> None:
    """Run one candidate once, which leaves it in Triton's cache on disk; failures show later."""
    try:
        apply(job, draw_operands(job), draw_weight(job), tuning)
        torch.cuda.synchronize()
    except Exception as error:
        print(job.form, job.case.name, job.tokens, tuple(tuning), repr(error)[:200], flush=True)


def _try(
    job: Job,
    operands: Operands,
    weights: Sequence[PackedWeight],
    exact: Tensor,
    tuning: Tuning,
    repeats: int,
) -> float:
    try:
        out = apply(job, operands, weights[0], tuning).float()
        error = float((out - exact).norm() / exact.norm())
        if not error < 0.01:
            print(job.form, job.case.name, tuple(tuning), "wrong by", error, flush=True)
            return float("inf")

        def turns() -> None:
            for weight in weights:
                apply(job, operands, weight, tuning)

        return time_s(turns, repeats=repeats) / len(weights)
    except Exception as error:
        print(job.form, job.case.name, tuple(tuning), repr(error)[:200], flush=True)
        return float("inf")


def sweep(jobs: Sequence[Job]) -> dict[str, Best]:
    """Time all candidates, print a line for each product, and return the rows by table."""
    memory = device_limits(torch.device("cuda")).shared_memory
    tried = [(job, tuning) for job in jobs for tuning in candidates(job, draw_weight(job), memory)]
    compile_all(_compile, tried)
    emit({"candidates": len(tried)})
    best: dict[str, Best] = {}
    for (form, case), of_weight in itertools.groupby(tried, key=lambda t: (t[0].form, t[0].case)):
        first = draw_weight(Job(form, case, 1))
        size = first.codes.nbytes + first.scales.nbytes
        weights = [first]
        while len(weights) * size < _ROTATED_BYTES:
            weights.append(draw_weight(Job(form, case, 1)))
        for job, of_job in itertools.groupby(of_weight, key=lambda t: t[0]):
            entry = _best(job, weights, [tuning for _, tuning in of_job], size)
            emit(entry)
            product = job.product
            measured = Measured(form, product.gated, product.out_size, product.in_size)
            for table, tuning in _rows(entry).items():
                best.setdefault(table, {}).setdefault(measured, {})[job.tokens] = tuning
    return best


def _rows(entry: dict[str, Any]) -> dict[str, Tuning]:
    """The fastest for each table: of rings, and of other kernels."""
    rows: dict[str, Tuning] = {}
    for us, *options in sorted(entry["by_kind"].values()):
        if us == float("inf"):
            continue
        tuning = Tuning(*options)
        table = HOPPER_TABLE if tuning.kind == "specialized" else TABLE
        # The device decides which kernel splits x; the table does not.
        kind = "tile" if tuning.kind == "split" else tuning.kind
        rows.setdefault(table.name, tuning._replace(kind=kind))
    return rows


def _best(
    job: Job, weights: Sequence[PackedWeight], tunings: Sequence[Tuning], size: int
) -> dict[str, Any]:
    operands = draw_operands(job)
    exact = expected(job, operands, weights[0])
    found = fastest(tunings, partial(_try, job, operands, weights, exact), (5, 20))
    return {
        "form": job.form,
        "case": job.case.name,
        "tokens": job.tokens,
        "tb_per_s": round(size / found["us"] / 1e6, 2),
        **found,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `harness.Study`."""
    parser.add_argument("--models", nargs="*", choices=list(SHAPES), default=["8b"])
    parser.add_argument("--forms", nargs="*", choices=list(FORMS), default=list(FORMS))
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 16, 64, 128])
    parser.add_argument("--cases", nargs="*", default=["qkv", "o", "gate_up", "down"])
    parser.add_argument("--tables", type=Path, metavar="FOLDER", help="the tables to update")


def run(options: argparse.Namespace) -> None:
    """See `harness.Study`."""
    with torch.inference_mode():
        best = sweep(
            [
                Job(form, case, tokens)
                for form in options.forms
                for name in options.models
                for case in SHAPES[name].cases
                if case.name in options.cases
                for tokens in options.tokens
            ]
        )
        if options.tables is not None:
            for name, rows in best.items():
                update_table(options.tables / name, rows)
