"""The work list of a step in which each row has one token and no two rows share a chunk of keys.

Most steps are of this kind, and small: what `work_list.build` takes for them is the price of its
many small arrays, whatever the number of rows. Here every query stands alone, so that items,
members and readings are one and the same, in the order of rows and chunks. The outcome is that of
`build`, array by array.

Plain numpy, no torch, no device.
"""

from __future__ import annotations

import numpy as np

from parrot_engine.attention.interface import AttentionShape
from parrot_engine.attention.policy import Cuts, Policy
from parrot_engine.attention.tables import Ints, Tables
from parrot_engine.attention.work_list import WorkList

_NO_ITEMS: Ints = np.empty((0, 8), dtype=np.int32)
_NO_ITEMS.flags.writeable = False
_NO_MERGES: Ints = np.empty((0, 3), dtype=np.int32)
_NO_MERGES.flags.writeable = False


def build_decodes(
    tables: Tables,
    shape: AttentionShape,
    policy: Policy,
    window: int | None,
    *,
    share: bool = True,
) -> WorkList | None:
    """What `build` makes of the same; None for a step that is not of this kind."""
    position = tables.positions
    # NOTE: a query by itself could only be wide where its heads alone fill a wide item.
    if len(position) > len(tables.counts) or policy.group >= policy.wide_min_rows:
        return None
    cuts = _cuts_of(position, policy, window)
    if share and _may_share(tables, shape.block_size, cuts.chunk // shape.block_size):
        return None

    keys, chunk_keys = position + 1, cuts.chunk
    end_chunk = position // chunk_keys + 1
    is_stretched = None
    if cuts.tail:
        rest = keys % chunk_keys
        is_stretched = (rest > 0) & (rest <= cuts.tail) & (end_chunk > 1)
        end_chunk -= is_stretched
    if window is None:
        parts, num_items = end_chunk, int(end_chunk.sum())
    else:
        first_key = np.maximum(0, keys - window)
        first_chunk = np.minimum(first_key // chunk_keys, end_chunk - 1)
        parts = end_chunk - first_chunk
        num_items = int(parts.sum())
    row = np.arange(len(parts), dtype=np.int32)
    if num_items == len(parts):
        # No row's keys are cut.
        query, place, num_slots = row, np.zeros_like(row), 0
        slots, merges = np.full(num_items, -1, dtype=np.int32), _NO_MERGES
    else:
        query = np.repeat(row, parts)
        ends = np.cumsum(parts, dtype=np.int32)
        place = np.arange(num_items, dtype=np.int32) - (ends - parts)[query]
        several = parts > 1
        of_cut = np.where(several, parts, np.int32(0))
        cut_ends = np.cumsum(of_cut, dtype=np.int32)
        first_slot = np.where(several, cut_ends - of_cut, np.int32(-1))
        num_slots = int(cut_ends[-1])
        slots = first_slot[query] + place
        merges = np.stack([row, first_slot, parts], axis=1)[several]
    seen_by = position[query]
    chunk = place if window is None else place + first_chunk[query]
    base = chunk * np.int32(chunk_keys)
    end = base + np.int32(chunk_keys)
    if is_stretched is not None:
        stretches = is_stretched[query] & (chunk + 1 == end_chunk[query])
        end += stretches * np.int32(cuts.tail)
    np.minimum(end, seen_by + 1, out=end)
    items = np.zeros((num_items, 8), dtype=np.int32)
    items[:, 0] = tables.starts[query] + base // np.int32(shape.block_size)
    items[:, 1] = base
    if window is None:
        items[:, 2] = base
    else:
        items[:, 2] = np.maximum(base, first_key[query] // policy.align * policy.align)
    items[:, 3] = end
    items[:, 4] = np.arange(num_items, dtype=np.int32)
    items[:, 5] = 1
    items[:, 6] = base + (end - base) // policy.align * policy.align
    if num_items > 1:
        items = items[np.argsort(items[:, 2] - end, kind="stable")]
    return WorkList(
        narrow=items,
        wide=_NO_ITEMS,
        member_tokens=query,
        member_positions=seen_by,
        member_slots=slots,
        merges=merges,
        num_slots=num_slots,
        tiles=_NO_ITEMS,
        chunk=cuts.chunk,
        tail=cuts.tail,
    )


def _cuts_of(position: Ints, policy: Policy, window: int | None) -> Cuts:
    """Where the keys of rows of one token, at these positions, are cut."""

    def count_readings(chunk: int) -> int:
        readings = position // chunk + 1
        if window is not None:
            readings -= np.maximum(0, position - (window - 1)) // chunk
        return int(readings.sum())

    return policy.cuts_of(len(position), count_readings)


def _may_share(tables: Tables, block_size: int, chunk_blocks: int) -> bool:
    """Whether two rows may have a first chunk in common, all there before the step."""
    if len(tables.counts) < 2:
        return False
    whole = tables.first_positions >= block_size * chunk_blocks
    last_of_first = tables.block_ids[tables.starts[whole] + (chunk_blocks - 1)].tolist()
    return len(set(last_of_first)) < len(last_of_first)
