"""The plan of a step of decodes from that of the step before, when each row went on by one token.

Where keys are cut, who shares them and in how many parts they are read depends on which multiples
of some unit a row has passed: blocks, chunks, tails and tiles of keys are all multiples of it.
While no row passes one, nor the end of its window does, only the last item of each row grows, by a
key. With blocks of 64, that is so in 63 of 64 steps of one row, and in a third of those of 64.

Plain numpy, no torch, no device.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd

import numpy as np

from parrot_engine.attention.policy import Policy
from parrot_engine.attention.tables import Ints, Tables
from parrot_engine.attention.work_list import WorkList


def unit_of(policy: Policy, block_size: int) -> int:
    """What everything that shapes a plan is a multiple of; 1 if nothing is."""
    cuts = policy.cuts
    if cuts.tail >= cuts.chunk:
        # Whether a row has a tail would then depend on its last key before a multiple as well.
        return 1
    # Chunks are multiples of blocks.
    return gcd(block_size, policy.align, cuts.tail)


def follows(before: Tables, tables: Tables, windows: Iterable[int | None], unit: int) -> bool:
    """Whether a step is that of `before`, each row of one token, at the next positions.

    And whether its lists are those of `before` but for what `advance` changes.
    """
    positions = tables.positions
    return (
        len(positions) == len(tables.counts)
        and bool((positions % unit).all())
        and all(
            window is None or bool(((positions + (1 - window)) % unit).all()) for window in windows
        )
        and (before.positions + 1).tobytes() == positions.tobytes()
        and before.starts.tobytes() == tables.starts.tobytes()
        and before.block_ids.tobytes() == tables.block_ids.tobytes()
    )


def advance(work: WorkList, policy: Policy) -> WorkList:
    """The list for the next positions of one whose step is followed."""
    return work._replace(
        narrow=_advance_items(work.narrow, work.member_positions, policy.align),
        member_positions=work.member_positions + 1,
    )


def _advance_items(items: Ints, member_positions: Ints, align: int) -> Ints:
    """Narrow items by one key where they end with the token that reads them.

    What several rows read ends before any of them: wide items stay as they are.
    """
    first_member = items[:, 4]
    grows = items[:, 3] == member_positions[first_member] + 1
    end = items[:, 3] + grows
    moved = items.copy()
    moved[:, 3] = end
    base = items[:, 1]
    moved[:, 6] = np.where(grows, base + (end - base) // align * align, items[:, 6])
    if len(items) < 2:
        return moved
    # The largest first; among equals in the order of members, as they were made.
    return moved[np.lexsort((first_member, items[:, 2] - end))]
