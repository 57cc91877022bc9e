"""Prefill tiles: consecutive tokens of a row with all keys that they see, or a part of these.

A tile is one program per KV head. A row of a few hundred tokens has fewer tiles than the device can
run, and behind a long context each takes long. There the keys are cut into parts, each a program,
and the parts are merged like those of items. Each token and part costs a partial result, written
and read in float32, so tiles are cut only while programs are few.

The choice (`_cut`) works as follows. Programs start largest first. So after `k` full rounds the
next cannot end before `k + 1` programs of at least its length, and all of them cannot end before
their sum allows. The best cut minimises the larger of both bounds plus the cost of merging. Keys
take longer in programs that share a multiprocessor. The bounds cover the tiles of the whole step,
so a lone row is cut further than one among many.

Tiles that fill the device several times stay whole, except the last ones (`_cut_last`): half a
round of long tiles leaves half of the device idle for the time of one.

Plain numpy, no torch, no device.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from parrot_engine.attention.policy import MAX_MIXED_TOKENS, Policy
from parrot_engine.attention.tables import Ints, Tables, as_table, first_keys, largest_first, spans


class Tiles(NamedTuple):
    """Consecutive tokens of a row with the keys that they see; columns in the kernel's order."""

    #: Index in the flat list of block ids of the row's first block.
    first_block: Ints
    #: Keys `begin` … `end` - 1 are read; `begin` is aligned to the kernel's tile, and so is an
    #: `end` at which another part continues.
    begin: Ints
    end: Ints
    #: Index in the step.
    first_token: Ints
    num_tokens: Ints
    first_position: Ints
    #: Slot of the first token's result; those of the other tokens follow at this distance. -1: all
    #: keys are read, and results are written directly.
    first_slot: Ints
    slot_step: Ints


class TileWork(NamedTuple):
    """The tiles of a step, and the merges that follow them."""

    #: `[n, 8]`: `Tiles`, largest first.
    table: Ints
    #: `[n, 3]`: token, first slot, slots of each token whose keys were cut.
    merges: Ints
    num_slots: int


class _Cut(NamedTuple):
    """By tile: the number of its parts, and the keys of each except the last."""

    parts: Ints
    keys: Ints


def make_tiles(
    tables: Tables,
    tiled: npt.NDArray[np.bool_],
    policy: Policy,
    window: int | None,
    first_slot: int,
) -> TileWork:
    """Make tiles of the rows marked in `tiled`; their partial results start at `first_slot`."""
    rows = np.flatnonzero(tiled).astype(np.int32)
    if not len(rows):
        return TileWork(np.empty((0, 8), dtype=np.int32), np.empty((0, 3), dtype=np.int32), 0)
    size = np.int32(policy.tile_tokens)
    per_row = -(-tables.counts[rows] // size)
    row = np.repeat(rows, per_row)
    offset = spans(np.zeros_like(per_row), per_row) * size
    position = tables.first_positions[row] + offset
    tokens = np.minimum(size, tables.counts[row] - offset)
    token = tables.first_tokens[row] + offset
    begin = first_keys(position, window) // policy.align * policy.align
    end = position + tokens
    parts, keys = _cut(end - begin, tokens, policy, policy.max_slots - first_slot)

    slots = np.where(parts > 1, parts * tokens, np.int32(0))
    ends = np.cumsum(slots, dtype=np.int32)
    slot = np.where(parts > 1, first_slot + ends - slots, np.int32(-1))
    tile = np.repeat(np.arange(len(row), dtype=np.int32), parts)
    part = spans(np.zeros_like(parts), parts)
    part_begin = begin[tile] + part * keys[tile]
    table = as_table(
        Tiles(
            first_block=tables.starts[row[tile]],
            begin=part_begin,
            end=np.minimum(part_begin + keys[tile], end[tile]),
            first_token=token[tile],
            num_tokens=tokens[tile],
            first_position=position[tile],
            first_slot=np.where(slot[tile] < 0, slot[tile], slot[tile] + part),
            slot_step=parts[tile],
        )
    )
    cut = np.flatnonzero(parts > 1).astype(np.int32)
    of = np.repeat(cut, tokens[cut])
    member = spans(np.zeros_like(cut), tokens[cut])
    merges = np.stack([token[of] + member, slot[of] + member * parts[of], parts[of]], axis=1)
    return TileWork(largest_first(table, 1, 2), merges, int(ends[-1]))


def _cut(lengths: Ints, tokens: Ints, policy: Policy, free_slots: int) -> _Cut:
    """Choose the cuts of tiles with these keys and tokens; see the module's docstring."""
    cuts, room = policy.tile_cuts, policy.tile_round
    longest = int(lengths.max())
    if longest < 2 * cuts.least:
        return _Cut(np.ones_like(lengths), lengths)
    if int(lengths.sum()) >= longest * room:
        # The sum alone takes as long as the longest tile.
        return _cut_last(lengths, tokens, policy, free_slots)
    # One row per tile, one column per choice.
    target = np.maximum(-(-longest // np.array(cuts.parts, dtype=np.int32)), cuts.least)
    length = lengths[:, None]
    parts = np.clip(-(-length // target), 1, np.maximum(1, length // cuts.least))
    keys = -(-length // (parts * policy.align)) * policy.align
    parts = -(-length // keys)
    several = np.where(parts > 1, parts, 0)

    order = np.argsort(-keys, axis=0, kind="stable")
    started = np.cumsum(np.take_along_axis(parts, order, axis=0), axis=0)
    rounds = -(-started // room)
    by_rounds = (rounds * (np.take_along_axis(keys, order, axis=0) + cuts.start)).max(axis=0)
    by_sum = (length + parts * cuts.start).sum(axis=0) / room
    pace = np.where(parts.sum(axis=0) > policy.tiles_alone, cuts.crowded, 1.0)
    cost = pace * np.maximum(by_rounds, by_sum) + several.sum(axis=0) * (cuts.merge / room)
    fits = (parts - 1).sum(axis=0) <= room * cuts.rounds
    fits &= (several * tokens[:, None]).sum(axis=0) <= free_slots
    best = int(np.where(fits, cost, np.inf).argmin())
    if not fits[best]:
        return _Cut(np.ones_like(lengths), lengths)
    return _Cut(parts[:, best].astype(np.int32), keys[:, best].astype(np.int32))


def _cut_last(lengths: Ints, tokens: Ints, policy: Policy, free_slots: int) -> _Cut:
    """Cut the last ones of tiles that fill the device, if all programs then end sooner.

    The tiles left whole fill a number of rounds: up to the last whole round, or the one before.
    """
    cuts = policy.tile_cuts
    parts, keys = np.ones_like(lengths), lengths
    # Graphs have no room for it.
    if not cuts.last or int(tokens.sum()) <= MAX_MIXED_TOKENS:
        return _Cut(parts, keys)
    order = np.argsort(-lengths, kind="stable")
    rounds = len(lengths) * policy.num_kv_heads // policy.num_sms
    least = _busiest(lengths[order] + cuts.start, policy)
    for whole in (rounds, rounds - 1):
        last = order[max(0, whole) * policy.num_sms // policy.num_kv_heads :]
        for count in cuts.last:
            part = -(-lengths[last] // (count * policy.align)) * policy.align
            made = -(-lengths[last] // part)
            slots = int((made * tokens[last]).sum())
            if not len(last) or int(part.min()) < cuts.least or slots > free_slots:
                continue
            # The last part of a tile is the shortest, but counted like the others.
            work = np.concatenate([lengths[order[: -len(last)]], np.repeat(part, made)])
            end = _busiest(np.sort(work)[::-1] + cuts.start, policy)
            end += int(made.sum()) * cuts.merge // policy.tile_round
            if end < least:
                least = end
                parts, keys = np.ones_like(lengths), lengths.copy()
                parts[last], keys[last] = made, part
    return _Cut(parts, keys)


def _busiest(costs: Ints, policy: Policy) -> int:
    """Return the cost of the busiest program, from the tiles' costs per program, largest first.

    Tiles are distributed as in `kernels.attention.hopper_fetch.nth_work`.
    """
    work = np.repeat(costs, policy.num_kv_heads)
    rounds = np.pad(work, (0, -len(work) % policy.num_sms)).reshape(-1, policy.num_sms)
    return int((rounds[::2].sum(axis=0) + rounds[1::2, ::-1].sum(axis=0)).max())
