"""Which rows of a step begin with the same blocks.

Rows share as long as the physical ids of their blocks are the same, compared as such; never by
counting references. They are brought into an order in which rows that begin alike are neighbours
(that of their ids as bytes); what two rows share is then what all rows between them share.

Plain numpy, no torch, no device.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from parrot_engine.attention.tables import Ints, Tables


class Sharing(NamedTuple):
    """An order of the rows and what neighbours in it have in common."""

    #: Place of each row in the order.
    place: Ints
    #: By place: whole chunks shared with the row before; 0 at the first place.
    common: Ints

    def reach(self) -> Ints:
        """By row: how many chunks, from the first, it shares with some other row."""
        following = np.append(self.common[1:], np.int32(0))
        reach: Ints = np.maximum(self.common, following)[self.place]
        return reach

    def leaders(self) -> Ints:
        """`[chunks, places]`: the first of the places that share the chunk with each place.

        Chunks from its length on are shared by nobody.
        """
        deepest = int(self.common.max(initial=0))
        chunks = np.arange(deepest, dtype=np.int32)[:, None]
        places = np.arange(len(self.common), dtype=np.int32)
        leaders: Ints = np.maximum.accumulate(
            np.where(self.common <= chunks, places, np.int32(0)), axis=1
        )
        return leaders


def nothing_shared(num_rows: int) -> Sharing:
    """Every row for itself."""
    return Sharing(np.arange(num_rows, dtype=np.int32), np.zeros(num_rows, dtype=np.int32))


def find_sharing(tables: Tables, candidates: Ints, block_size: int, chunk_blocks: int) -> Sharing:
    """What the rows with indices `candidates` share, in chunks of `chunk_blocks` blocks.

    Only chunks whose keys are all there before the step count: blocks that a row writes are its
    own.
    """
    num_rows = len(tables.counts)
    whole = tables.first_positions[candidates] // (block_size * chunk_blocks)
    candidates, whole = candidates[whole > 0], whole[whole > 0]
    if len(candidates) < 2:
        return nothing_shared(num_rows)
    # Most rows that share nothing are told by a single block.
    last_of_first = tables.block_ids[tables.starts[candidates] + (chunk_blocks - 1)]
    _, group, sizes = np.unique(last_of_first, return_inverse=True, return_counts=True)
    alike = sizes[group] > 1
    candidates, whole = candidates[alike], whole[alike]
    if len(candidates) < 2:
        return nothing_shared(num_rows)

    # Nobody shares more than the second longest holds.
    chunks = np.minimum(whole, np.partition(whole, -2)[-2])
    ids = np.empty((len(candidates), int(chunks.max()) * chunk_blocks), dtype=np.int32)
    places = zip(tables.starts[candidates].tolist(), (chunks * chunk_blocks).tolist(), strict=True)
    # NOTE: row by row. Indexing them all at once takes several arrays of this size, and longer.
    for row, (start, length) in enumerate(places):
        ids[row, :length] = tables.block_ids[start : start + length]
        # Behind its end a row is like no other.
        ids[row, length:] = -1 - row
    keys = [row.tobytes() for row in ids]
    order = np.array(sorted(range(len(keys)), key=keys.__getitem__))
    ids = ids[order]
    differs = (ids[1:] != ids[:-1]).reshape(len(ids) - 1, -1, chunk_blocks).any(axis=2)

    common = np.zeros(num_rows, dtype=np.int32)
    common[1 : len(candidates)] = np.where(
        differs.any(axis=1), differs.argmax(axis=1), differs.shape[1]
    )
    others = np.ones(num_rows, dtype=bool)
    others[candidates] = False
    place = np.empty(num_rows, dtype=np.int32)
    place[candidates[order]] = np.arange(len(candidates), dtype=np.int32)
    place[others] = np.arange(len(candidates), num_rows, dtype=np.int32)
    return Sharing(place, common)
