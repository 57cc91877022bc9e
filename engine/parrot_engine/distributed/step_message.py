"""Steps as bytes, and changes of adapters between them: the messages of rank 0 to workers.

A message is a header of fixed size, 32-bit integers and names of adapters, in the machine's byte
order, because the ranks are processes of one host. It has nothing about tokens after sampling.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import chain
from typing import Final, NamedTuple

import numpy as np

from parrot_engine.batch import BatchRow, BatchRows, BlockCopy, LogitsNeed, StepBatch
from parrot_engine.exceptions import ShardError

_STEP: Final = b"PGS2"
_CHANGE: Final = b"PGA1"
#: Magic, then the numbers of copies, rows, tokens, block ids, rows of the previous step, and bytes
#: of adapters' ids. For a change: the number to add, and the bytes of the id to remove.
_HEADER: Final = struct.Struct("=4s6I")
#: By row: tokens, first position, length of the block table, pending row or -1, logits, and the
#: index of its adapter's id or -1.
_ROW_INTS: Final = 6
_NEEDS: Final[tuple[LogitsNeed, ...]] = ("none", "last", "all")
#: No step comes near this; a larger header is invalid.
_MAX_INTS: Final = 1 << 28
_MAX_ID_BYTES: Final = 1 << 20


class StepMessage(NamedTuple):
    """The inputs of a step's forward pass."""

    batch: StepBatch
    #: Rows of the previously launched step, whose sampled tokens may be referenced.
    num_sampled: int


class AdapterChange(NamedTuple):
    """A change of the ranks' adapters between two steps."""

    #: Number of an adapter that steps may name from now on; 0: none.
    add: int = 0
    #: Id of an adapter that steps no longer name.
    remove: str = ""


def encode(message: StepMessage | AdapterChange) -> bytes:
    if isinstance(message, AdapterChange):
        removed = message.remove.encode()
        return _HEADER.pack(_CHANGE, message.add, 0, 0, 0, 0, len(removed)) + removed
    batch = message.batch
    rows = BatchRows.of(batch.rows)
    places = {adapter: place for place, adapter in enumerate(sorted({*batch.adapters} - {""}))}
    columns = (
        map(len, rows.token_ids),
        rows.starts,
        map(len, rows.block_tables),
        (-1 if pending is None else pending for pending in rows.pending),
        map(_NEEDS.index, rows.logits),
        (places.get(adapter, -1) for adapter in batch.adapters or [""] * len(rows)),
    )
    ids = "\n".join(places).encode()
    table = np.array(list(zip(*columns, strict=True)), dtype=np.int32)
    tokens = np.array(list(chain.from_iterable(rows.token_ids)), dtype=np.int32)
    block_ids = np.zeros(0, dtype=np.int32)
    if rows:
        block_ids = np.concatenate(rows.block_tables, dtype=np.int32, casting="unsafe")
    copies = np.array(batch.copies, dtype=np.int32).reshape(-1, 2)
    counts = len(copies), len(rows), len(tokens), len(block_ids), message.num_sampled, len(ids)
    parts = (copies, table, tokens, block_ids)
    return b"".join([_HEADER.pack(_STEP, *counts), *(part.tobytes() for part in parts), ids])


def decode(read: Callable[[int], bytes]) -> StepMessage | AdapterChange:
    """Return the next message; `read` returns exactly the requested number of bytes.

    Raises:
        ShardError: the bytes are no message.
    """
    magic, *counts, num_bytes = _HEADER.unpack(read(_HEADER.size))
    num_copies, num_rows, num_tokens, num_blocks, num_sampled = counts
    sizes = (2 * num_copies, _ROW_INTS * num_rows, num_tokens, num_blocks)
    if magic not in (_STEP, _CHANGE) or sum(sizes) > _MAX_INTS or num_bytes > _MAX_ID_BYTES:
        raise ShardError("what came from rank 0 is no step")
    if magic == _CHANGE:
        return AdapterChange(num_copies, read(num_bytes).decode())
    ints = np.frombuffer(read(4 * sum(sizes)), dtype=np.int32)
    ids = [*read(num_bytes).decode().split("\n"), ""] if num_bytes else []
    copies, table, tokens, block_ids = np.split(ints, np.cumsum(sizes)[:-1])
    table = table.reshape(-1, _ROW_INTS)
    if table[:, 0].sum() != num_tokens or table[:, 2].sum() != num_blocks:
        raise ShardError("a step's counts do not add up")
    token_list = tokens.tolist()
    rows = []
    token = block = 0
    for count, start, length, pending, need, _ in table.tolist():
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
    batch = StepBatch(
        rows,
        [BlockCopy(*pair) for pair in pairs],
        adapters=[ids[place] for place in table[:, 5].tolist()] if ids else (),
    )
    return StepMessage(batch, num_sampled)
