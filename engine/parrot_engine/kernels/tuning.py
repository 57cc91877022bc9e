"""Options of a product's kernel, and tables of the best measured options.

A table is a CSV file in `tunings/`, written by the sweeps of `parrot_bench.engine.studies`. The
choice of a kernel depends on the model and on classes of batch sizes, never on timing at run time.
Does not import triton.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from functools import cache
from math import log2
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import torch


class Tuning(NamedTuple):
    """Options of a product's kernel; see `skinny_matmul`."""

    #: `split`: a tile with x as two 8-bit numbers, for FP8 weights only; `rounded`: as one 8-bit
    #: number; `specialized`: like `split`, with specialised warps (`hopper_product`).
    kind: Literal["vector", "tile", "split", "rounded", "specialized"]
    #: Most tokens, a power of two: 1 to 4 for vectors, 8 to 128 for tiles.
    tokens: int
    #: Outputs per program (of either half if gate and up are multiplied).
    block_out: int
    #: Columns per step.
    block_in: int
    num_warps: int
    num_stages: int
    #: Number of parts that the columns are split into.
    splits: int = 1
    #: True: the copy engine fetches operands if possible (compute capability 9.0 and later; tiles
    #: only).
    descriptors: bool = False


#: Outputs of each group of warps in a `specialized` kernel.
GROUP_ROWS = 64


def num_counters(tuning: Tuning, out_size: int) -> int:
    """Return the number of counters for a product with split columns: one per program or group of
    warps.
    """
    groups = tuning.block_out // GROUP_ROWS if tuning.kind == "specialized" else 1
    return -(-out_size // tuning.block_out) * groups


class Product(NamedTuple):
    """The properties of a product that determine the kernel."""

    num_tokens: int
    #: Width of the output.
    out_size: int
    in_size: int
    dtype: torch.dtype
    #: True: two weights of that width, gate and up, are read.
    gated: bool = False
    #: True: x is normalised while it is read.
    norm: bool = False


class Measured(NamedTuple):
    """Format and shape of a measured weight; experts have no sizes (0)."""

    #: Its format: `dense`, `fp8`, `fp8 in groups`, …
    weight: str
    gated: bool
    out_size: int
    in_size: int


#: Best tuning by the largest number of tokens of a class, in order; None: torch is faster.
Classes: TypeAlias = Mapping[int, Tuning | None]
Table: TypeAlias = Mapping[Measured, Classes]

TABLES = Path(__file__).parent / "tunings"
COLUMNS = (*Measured._fields, "tokens", "kind", *Tuning._fields[2:])


@cache
def read_table(path: Path) -> Table:
    """Read a table from a file; the order of rows decides between equally near sizes."""
    table: dict[Measured, dict[int, Tuning | None]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
        if tuple(header) != COLUMNS:
            raise ValueError(f"{path}: the columns are {header}, not {list(COLUMNS)}")
        for weight, gated, out_size, in_size, tokens, kind, *options in rows:
            measured = Measured(weight, bool(int(gated)), int(out_size), int(in_size))
            tuning = None
            if kind != "torch":
                *numbers, descriptors = map(int, options)
                tuning = Tuning._make((kind, int(tokens), *numbers, bool(descriptors)))
            table.setdefault(measured, {})[int(tokens)] = tuning
    return table


def nearest(table: Table, weight: str, case: Product) -> Classes:
    """Return the classes of the measured size of `weight` nearest to `case`.

    Distances are factors of two; a different gate counts as one.
    """
    return table[
        min(
            (measured for measured in table if measured.weight == weight),
            key=lambda measured: (
                abs(log2(case.out_size / measured.out_size))
                + abs(log2(case.in_size / measured.in_size))
                + (case.gated != measured.gated)
            ),
        )
    ]


def for_tokens(classes: Classes, num_tokens: int) -> Tuning | None:
    """Return the tuning of the first class that holds `num_tokens`, or of the last class beyond
    all.
    """
    return classes[next((most for most in classes if num_tokens <= most), max(classes))]
