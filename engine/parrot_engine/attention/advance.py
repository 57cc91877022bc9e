"""The work list of a step of decodes from that of the step before, when each row went on by one
token.

Where keys are cut, who shares them and in how many parts they are read depends on which multiples
of a chunk, of a tail and, with a window, of a tile a row has passed. While no row passes one, nor
the end of its window does, only the last item of each row grows, by a key, and what a row's table
got at its end moves those behind it. With chunks of 512 and tails of 256 that is so in three of
four steps of 64 rows; in all but one of 64 of a single row, whose chunks are as small as 64.

Plain numpy, no torch, no device.
"""

from __future__ import annotations

from math import gcd

import numpy as np

from parrot_engine.attention.policy import Policy
from parrot_engine.attention.tables import Ints, Tables, spans
from parrot_engine.attention.work_list import WorkList


def goes_on(before: Tables, tables: Tables) -> bool:
    """Whether a step is of the same rows as `before`, each of one token, at the next positions.

    Their tables have the same blocks, and maybe more behind these.
    """
    if (
        len(tables.positions) != len(tables.counts)
        or (before.positions + 1).tobytes() != tables.positions.tobytes()
    ):
        return False
    ids, known = tables.block_ids, before.block_ids
    if before.starts.tobytes() != tables.starts.tobytes() or len(ids) != len(known):
        lengths = _lengths(before)
        if (lengths > _lengths(tables)).any():
            return False
        ids = ids[spans(tables.starts, lengths)]
    return ids.tobytes() == known.tobytes()


def advance(
    work: WorkList, before: Tables, tables: Tables, policy: Policy, window: int | None
) -> WorkList | None:
    """The list of a step that goes on from `before`, whose list is `work`; None if it is another.

    It is what `work_list.build` makes of it, array by array.
    """
    chunk, positions = work.chunk, tables.positions
    # Where a tail is as long as a chunk, it ends with the last key before a multiple.
    if work.tail >= chunk or not (positions % gcd(chunk, work.tail)).all():
        return None
    if window is not None:
        first_keys = positions + (1 - window)
        if not (first_keys % gcd(chunk, policy.align, *policy.cuts.fine)).all():
            return None
    # NOTE: so the step is cut where the one before was. Readings in smaller chunks, too many
    # before, are not fewer now, and those in chunks of this size or larger are as many.
    shifts = tables.starts - before.starts
    return work._replace(
        narrow=_largest_first(_advance_items(work.narrow, work, shifts, policy.align)),
        wide=_advance_items(work.wide, work, shifts, policy.align),
        member_positions=work.member_positions + 1,
    )


def _advance_items(items: Ints, work: WorkList, shifts: Ints, align: int) -> Ints:
    """Items by one key where they end with the token that reads them.

    What several rows read ends before any of them.
    """
    first_member = items[:, 4]
    moved = items.copy()
    # A row is its one token.
    moved[:, 0] += shifts[work.member_tokens[first_member]]
    grows = items[:, 3] == work.member_positions[first_member] + 1
    moved[:, 3] += grows
    base = items[:, 1]
    masked_from = base + (moved[:, 3] - base) // align * align
    moved[:, 6] = np.where(grows, masked_from, items[:, 6])
    return moved


def _largest_first(items: Ints) -> Ints:
    """As they are made: equals in the order of their members."""
    if len(items) < 2:
        return items
    return items[np.lexsort((items[:, 4], items[:, 2] - items[:, 3]))]


def _lengths(tables: Tables) -> Ints:
    """Blocks of each row's table."""
    return np.diff(tables.starts, append=np.int32(len(tables.block_ids)))
