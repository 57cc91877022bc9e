"""A step as bytes: what the leader of a tensor-parallel engine sends its workers.

A header of fixed size and 32-bit integers, in the machine's byte order: the ranks are processes
of one host. What concerns tokens once they are sampled is not in it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import chain
from typing import Final, NamedTuple

import numpy as np

from parrot_engine.batch import BatchRow, BatchRows, BlockCopy, LogitsNeed, StepBatch
from parrot_engine.exceptions import ShardError

_MAGIC: Final = b"PGS1"
#: Magic, then the numbers of copies, rows, tokens and block ids, and of rows of the step before.
_HEADER: Final = struct.Struct("=4s5I")
#: By row: tokens, first position, length of the block table, pending row or -1, logits.
_ROW_INTS: Final = 5
_NEEDS: Final[tuple[LogitsNeed, ...]] = ("none", "last", "all")
#: No step comes near this; a larger header is not ours.
_MAX_INTS: Final = 1 << 28


class StepMessage(NamedTuple):
    """A step, as far as its forward pass goes."""

    batch: StepBatch
    #: Rows of the step launched before, whose sampled tokens may be referenced.
    num_sampled: int


def encode(message: StepMessage) -> bytes:
    batch = message.batch
    rows = BatchRows.of(batch.rows)
    columns = (
        map(len, rows.token_ids),
        rows.starts,
        map(len, rows.block_tables),
        (-1 if pending is None else pending for pending in rows.pending),
        map(_NEEDS.index, rows.logits),
    )
    table = np.array(list(zip(*columns, strict=True)), dtype=np.int32)
    tokens = np.array(list(chain.from_iterable(rows.token_ids)), dtype=np.int32)
    block_ids = np.zeros(0, dtype=np.int32)
    if rows:
        block_ids = np.concatenate(rows.block_tables, dtype=np.int32, casting="unsafe")
    copies = np.array(batch.copies, dtype=np.int32).reshape(-1, 2)
    header = _HEADER.pack(
        _MAGIC, len(copies), len(rows), len(tokens), len(block_ids), message.num_sampled
    )
    parts = (copies, table, tokens, block_ids)
    return b"".join([header, *(part.tobytes() for part in parts)])


def decode(read: Callable[[int], bytes]) -> StepMessage:
    """The next message; `read` gives exactly so many bytes.

    Raises:
        ShardError: what is read is no message.
    """
    magic, num_copies, num_rows, num_tokens, num_blocks, num_sampled = _HEADER.unpack(
        read(_HEADER.size)
    )
    sizes = (2 * num_copies, _ROW_INTS * num_rows, num_tokens, num_blocks)
    if magic != _MAGIC or sum(sizes) > _MAX_INTS:
        raise ShardError("what came from rank 0 is no step")
    ints = np.frombuffer(read(4 * sum(sizes)), dtype=np.int32)
    copies, table, tokens, block_ids = np.split(ints, np.cumsum(sizes)[:-1])
    table = table.reshape(-1, _ROW_INTS)
    if table[:, 0].sum() != num_tokens or table[:, 2].sum() != num_blocks:
        raise ShardError("a step's counts do not add up")
    token_list = tokens.tolist()
    rows = []
    token = block = 0
    for count, start, length, pending, need in table.tolist():
        rows.append(
            BatchRow(
                token_list[token : token + count],
                start,
                block_ids[block : block + length],
                _NEEDS[need],
                None if pending < 0 else pending,
            )
        )
        token, block = token + count, block + length
    pairs = copies.reshape(-1, 2).tolist()
    return StepMessage(StepBatch(rows, [BlockCopy(*pair) for pair in pairs]), num_sampled)
