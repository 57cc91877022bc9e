"""Fast paths for the work lists of decode steps, with the results of `work_list.build`.

`build_decodes` handles steps in which each row has one token and no two rows share a chunk of keys.
Most steps are of this kind, and small: `build` would spend its time on many small arrays, whatever
the number of rows. Here every query stands alone, so items, members and readings coincide, in the
order of rows and chunks.

`advance` derives the list from the previous step's, if each row has advanced by one token. The cuts
of keys, their sharing and the number of parts depend on which multiples of a chunk, a tail and,
with a window, a tile each row has passed. While no row, and no end of a window, passes one, only
the last item of each row grows by a key, and blocks appended to a row's table shift the following
ones. With chunks of 512 and tails of 256 this holds in three of four steps of 64 rows. A single
row's chunks are as small as 64, so it holds in all steps but one in 64.

Plain numpy, no torch, no device.
"""

from __future__ import annotations

from math import gcd

import numpy as np

from parrot_engine.attention.interface import AttentionShape
from parrot_engine.attention.policy import Cuts, Policy
from parrot_engine.attention.tables import Ints, Tables, spans
from parrot_engine.attention.work_list import WorkList

_NO_ITEMS: Ints = np.empty((0, 8), dtype=np.int32)
_NO_ITEMS.flags.writeable = False
_NO_MERGES: Ints = np.empty((0, 3), dtype=np.int32)
_NO_MERGES.flags.writeable = False


def build_decodes(
    tables: Tables, shape: AttentionShape, policy: Policy, window: int | None, *, share: bool = True
) -> WorkList | None:
    """Return the list that `build` would make; None for a step of another kind."""
    position = tables.positions
    # NOTE: a single query is wide only if its heads alone fill a wide item.
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

    def count_readings(chunk: int) -> int:
        readings = position // chunk + 1
        if window is not None:
            readings -= np.maximum(0, position - (window - 1)) // chunk
        return int(readings.sum())

    return policy.cuts_of(len(position), count_readings)


def _may_share(tables: Tables, block_size: int, chunk_blocks: int) -> bool:
    """Return true if two rows may share a first chunk that existed before the step."""
    if len(tables.counts) < 2:
        return False
    whole = tables.first_positions >= block_size * chunk_blocks
    last_of_first = tables.block_ids[tables.starts[whole] + (chunk_blocks - 1)].tolist()
    return len(set(last_of_first)) < len(last_of_first)


def goes_on(before: Tables, tables: Tables) -> bool:
    """Return true if a step has the rows of `before`, each with one token at the next position.

    Their tables have the same blocks, possibly with more behind them.
    """
    if (
        len(tables.positions) != len(tables.counts)
        or (before.positions + 1).tobytes() != tables.positions.tobytes()
    ):
        return False
    ids, known = tables.block_ids, before.block_ids
    if before.starts.tobytes() != tables.starts.tobytes() or len(ids) != len(known):
        lengths = _table_lengths(before)
        if (lengths > _table_lengths(tables)).any():
            return False
        ids = ids[spans(tables.starts, lengths)]
    return ids.tobytes() == known.tobytes()


def advance(
    work: WorkList, before: Tables, tables: Tables, policy: Policy, window: int | None
) -> WorkList | None:
    """Return the list of a step that continues `before`, whose list is `work`; None if it cannot.

    It equals the result of `work_list.build`, array by array.
    """
    chunk, positions = work.chunk, tables.positions
    # If a tail is as long as a chunk, it ends with the last key before a multiple.
    if work.tail >= chunk or not (positions % gcd(chunk, work.tail)).all():
        return None
    if window is not None:
        first_keys = positions + (1 - window)
        if not (first_keys % gcd(chunk, policy.align, *policy.cuts.fine)).all():
            return None
    # NOTE: the cuts are therefore unchanged. Smaller chunks, which gave too many readings before,
    # do not give fewer now; chunks of this size or larger give equally many.
    shifts = tables.starts - before.starts
    return work._replace(
        narrow=_sorted_items(_advance_items(work.narrow, work, shifts, policy.align)),
        wide=_advance_items(work.wide, work, shifts, policy.align),
        member_positions=work.member_positions + 1,
    )


def _advance_items(items: Ints, work: WorkList, shifts: Ints, align: int) -> Ints:
    """Extend by one key the items that end with the token that reads them.

    A part that several rows read ends before all of them.
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


def _sorted_items(items: Ints) -> Ints:
    """Sort items in order of creation, equal ones in the order of their members."""
    if len(items) < 2:
        return items
    return items[np.lexsort((items[:, 4], items[:, 2] - items[:, 3]))]


def _table_lengths(tables: Tables) -> Ints:
    return np.diff(tables.starts, append=np.int32(len(tables.block_ids)))
