"""The rows of a step as flat arrays, from which every plan is made.

Plain numpy, no torch, no device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from parrot_engine.batch import BatchRow, BatchRows

Ints = npt.NDArray[np.int32]


class Tables(NamedTuple):
    """A batch by row and by token; int32 arrays."""

    #: `[num_block_ids]`: the block tables of all rows, concatenated.
    block_ids: Ints
    #: `[num_rows]`: index in `block_ids` of the row's first block.
    starts: Ints
    #: `[num_rows]`: tokens of the row in this step.
    counts: Ints
    #: `[num_rows]`: position in its context of the row's first token.
    first_positions: Ints
    #: `[num_rows]`: index in the step of the row's first token.
    first_tokens: Ints
    #: `[num_tokens]`: the token's position in its context.
    positions: Ints
    #: `[num_tokens]`: target of the token's KV, block id x block_size + offset.
    slots: Ints

    @property
    def num_tokens(self) -> int:
        return len(self.positions)


def flatten_tables(rows: Sequence[BatchRow], block_size: int) -> Tables:
    """Flatten a batch of at least one row; rows as in `StepBatch`."""
    columns = BatchRows.of(rows)
    tables = columns.block_tables
    block_ids: Ints = np.concatenate(tables, dtype=np.int32, casting="unsafe")
    starts = _begins(np.array(list(map(len, tables)), dtype=np.int32))
    first_positions = np.array(columns.starts, dtype=np.int32)
    lengths = list(map(len, columns.token_ids))
    if len(rows) == sum(lengths):
        counts = np.ones(len(rows), dtype=np.int32)
        first_tokens = np.arange(len(rows), dtype=np.int32)
        positions, token_starts = first_positions, starts
    else:
        counts = np.array(lengths, dtype=np.int32)
        first_tokens = _begins(counts)
        positions = spans(first_positions, counts)
        token_starts = np.repeat(starts, counts)
    size = np.int32(block_size)
    blocks, offsets = np.divmod(positions, size)
    slots = block_ids[token_starts + blocks] * size + offsets
    return Tables(block_ids, starts, counts, first_positions, first_tokens, positions, slots)


def spans(begins: Ints, counts: Ints) -> Ints:
    """Return, for each i in turn, the integers `begins[i]` … `begins[i] + counts[i] - 1`."""
    shifts = begins - _begins(counts)
    out: Ints = np.repeat(shifts, counts)
    out += np.arange(len(out), dtype=np.int32)
    return out


def first_keys(positions: Ints, window: int | None) -> Ints:
    """Return the first key that tokens at these positions see."""
    return np.zeros_like(positions) if window is None else np.maximum(0, positions - (window - 1))


def as_table(columns: Sequence[Ints]) -> Ints:
    """Return `[n, 8]`: up to eight columns, padded, in the kernels' form."""
    table = np.zeros((len(columns[0]), 8), dtype=np.int32)
    for index, column in enumerate(columns):
        table[:, index] = column
    return table


def largest_first(table: Ints, begin: int, end: int) -> Ints:
    """Sort costly work first, so that the last programs to finish are short; ties keep their
    order.
    """
    if len(table) < 2:
        return table
    return table[np.argsort(table[:, begin] - table[:, end], kind="stable")]


def _begins(counts: Ints) -> Ints:
    """Return the start of each of consecutive ranges of these lengths."""
    begins = np.zeros(len(counts), dtype=np.int32)
    counts[:-1].cumsum(out=begins[1:])
    return begins
