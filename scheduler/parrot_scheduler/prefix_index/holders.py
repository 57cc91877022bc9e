"""Who holds how much of a prompt: nested sets of rows with the depth that each set reaches.

A row is an engine's place in an `EngineTable`; a set of rows is one Python int, bit r for row r.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, groupby, repeat
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

#: Pairs of (set of rows, number of leading blocks that every row of the set holds). Depths grow,
#: and each set is part of the one before.
PrefixHolders: TypeAlias = list[tuple[int, int]]

Depths = npt.NDArray[np.float64]

#: Sets of up to so many rows are taken apart bit by bit, larger ones by numpy.
_FEW_ROWS = 8


def depth_of(holders: PrefixHolders, row: int) -> int:
    """Leading blocks that one row holds."""
    bit, low, high = 1 << row, 0, len(holders)
    while low < high:
        middle = (low + high) // 2
        if holders[middle][0] & bit:
            low = middle + 1
        else:
            high = middle
    return holders[low - 1][1] if low else 0


def holders_of(rows: Iterable[int]) -> PrefixHolders:
    """Holders of a chain of blocks, from the set of rows that hold each block."""
    holders: PrefixHolders = []
    there, depth = -1, 0
    # Runs of equal sets come and go without a step of Python for each key.
    for here, run in groupby(rows):
        still = there & here
        if depth and still != there:
            holders.append((there, depth))
        there = still
        if not there:
            return holders
        depth += len(list(run))
    holders.append((there, depth))
    return holders


def rows_by_block(holders: PrefixHolders) -> Iterable[int]:
    """The set of rows that hold a prompt up to each block, without end."""
    starts = [0, *(depth for _, depth in holders)]
    runs = [repeat(rows, end - start) for start, (rows, end) in zip(starts, holders, strict=False)]
    return chain(chain.from_iterable(runs), repeat(0))


def levels_of(holders: PrefixHolders) -> PrefixHolders:
    """Rows that hold a prompt up to one depth and no further, the deepest first."""
    levels: PrefixHolders = []
    deeper = 0
    for rows, depth in reversed(holders):
        if rows != deeper:
            levels.append((rows ^ deeper, depth))
            deeper = rows
    return levels


def as_column(holders: PrefixHolders, num_rows: int) -> Depths | None:
    """Depths as one value for each of the first `num_rows` rows; None: no row holds any."""
    if not holders:
        return None
    column: Depths | None = None
    few: list[tuple[int, int]] = []
    for bits, depth in levels_of(holders):
        if bits.bit_count() <= _FEW_ROWS:
            few += [(row, depth) for row in rows_of(bits)]
        elif column is None:
            column = np.multiply(unpack(bits, num_rows), depth, dtype=np.float64)
        else:
            column += np.multiply(unpack(bits, num_rows), depth, dtype=np.float64)
    if column is None:
        column = np.zeros(num_rows)
    for row, depth in few:
        column[row] = depth
    return column


def rows_of(bits: int) -> list[int]:
    """A small set of rows as a list, the first row first."""
    rows: list[int] = []
    while bits:
        lowest = bits & -bits
        rows.append(lowest.bit_length() - 1)
        bits ^= lowest
    return rows


def pack(rows: npt.NDArray[np.bool_]) -> int:
    """A set of rows from one truth value for each row."""
    return int.from_bytes(np.packbits(rows, bitorder="little").tobytes(), "little")


def unpack(bits: int, num_rows: int) -> npt.NDArray[np.uint8]:
    """A set of rows as one 0 or 1 for each row."""
    raw = np.frombuffer(bits.to_bytes((num_rows + 7) // 8, "little"), dtype=np.uint8)
    return np.unpackbits(raw, count=num_rows, bitorder="little")
