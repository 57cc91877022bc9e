"""The work list of one step: who reads which chunk of keys, and where the parts go.

Keys are cut at fixed absolute positions, every `chunk` tokens from position 0. Whether sequences
share blocks changes only how many queries stand in an item, never where a query's sum is cut:
its result does not depend on its neighbours. Sequences share a chunk when the physical ids of
its blocks are the same, compared as such; never by counting references.

Plain numpy, no torch, no device: tests check the list itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from parrot_engine.attention.interface import AttentionShape
from parrot_engine.builtin.batch import BatchRow

Ints = npt.NDArray[np.int32]


class Policy(NamedTuple):
    """What decides how work is cut and packed. Constant for a model, never per batch."""

    #: Keys of a chunk; a multiple of the block size.
    chunk: int
    #: Alignment of an item's first key within its chunk: keys of a tile.
    align: int
    #: Rows (queries x heads of a group) of the narrow and of the wide tile.
    narrow_rows: int
    wide_rows: int
    #: Query heads of a KV head.
    group: int
    #: Tokens of a prefill tile.
    tile_tokens: int
    #: Bytes of one key and its value, all KV heads of a layer.
    token_bytes: int
    #: Rows of up to this many tokens always have their keys split …
    split_tokens: int
    #: … and those of up to this many do when at least `long_context` keys were there before.
    long_split_tokens: int
    long_context: int
    #: An item goes wide with at least this many rows …
    wide_min_rows: int
    #: … when all such items of the step save at least this many bytes of reading in a layer.
    wide_min_bytes: int


class Item(NamedTuple):
    """A chunk of keys and the queries that read it; field by field what the kernel reads."""

    #: Index in the flat list of block ids of the block that holds key `base`.
    first_block: int
    #: The chunk's own first position.
    base: int
    #: Keys `begin` … `end` - 1 are read; `begin` is aligned to the kernel's tile.
    begin: int
    end: int
    #: The slice of the members' arrays.
    first_member: int
    num_members: int
    #: Whole tiles of keys before this one are seen by all members, and need no mask.
    masked_from: int


class Tile(NamedTuple):
    """Consecutive tokens of a row with the keys they see; what the prefill kernel reads."""

    #: Index in the flat list of block ids of the row's first block.
    first_block: int
    begin: int
    end: int
    #: In the step.
    first_token: int
    num_tokens: int
    first_position: int


class Tables(NamedTuple):
    """The block tables of a batch, one behind the other."""

    block_ids: Ints
    #: Where the table of each row begins.
    starts: Ints
    #: Slot of each token of the step: block x block_size + offset.
    slots: Ints


class WorkList(NamedTuple):
    """What one layer type does in a step."""

    #: `[n, 8]`: `Item`s, largest first, padded to 8 integers.
    narrow: Ints
    wide: Ints
    #: For each member: its token in the step, its position, its slot or -1 (writes directly).
    member_tokens: Ints
    member_positions: Ints
    member_slots: Ints
    #: `[n, 3]`: token, first slot, slots of each query whose keys were cut.
    merges: Ints
    num_slots: int
    #: `[n, 8]`: `Tile`s, largest first, padded.
    tiles: Ints


class _Query(NamedTuple):
    """One token of a split row."""

    token: int
    position: int
    first_chunk: int
    last_chunk: int
    first_slot: int


def flatten_tables(rows: Sequence[BatchRow], block_size: int) -> Tables:
    """Block ids and slots of a batch; rows as in `StepBatch`."""
    lengths = np.array([len(row.block_table) for row in rows], dtype=np.int32)
    starts = np.zeros(len(rows), dtype=np.int32)
    np.cumsum(lengths[:-1], out=starts[1:])
    block_ids = np.concatenate([np.asarray(row.block_table, dtype=np.int32) for row in rows])
    counts = np.array([len(row.token_ids) for row in rows])
    first = np.array([row.start for row in rows])
    positions = np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
    blocks = block_ids[np.repeat(starts, counts) + positions // block_size]
    slots = blocks * block_size + positions % block_size
    return Tables(block_ids, starts, slots.astype(np.int32))


def build(
    rows: Sequence[BatchRow],
    tables: Tables,
    shape: AttentionShape,
    policy: Policy,
    window: int | None,
    *,
    share: bool = True,
) -> WorkList:
    """The list for layers with this `window`; without `share` every row reads for itself."""
    return _Builder(rows, tables, shape, policy, window, share).build()


class _Builder:
    """One list in the making."""

    def __init__(
        self,
        rows: Sequence[BatchRow],
        tables: Tables,
        shape: AttentionShape,
        policy: Policy,
        window: int | None,
        share: bool,
    ) -> None:
        self._share = share
        self._rows = rows
        self._tables = tables
        self._block_size = shape.block_size
        self._policy = policy
        self._window = window
        self._chunk_blocks = policy.chunk // shape.block_size
        #: By row of the batch, its queries; rows of few tokens only.
        self._queries: dict[int, list[_Query]] = {}
        #: (chunk, rows that share it) of chunks that several queries read.
        self._shared: list[tuple[int, list[int]]] = []
        #: From which chunk on a row of one token reads alone.
        self._alone: dict[int, int] = {}
        self._narrow: list[Item] = []
        self._wide: list[Item] = []
        self._members: list[tuple[int, int, int]] = []
        self._num_slots = 0

    def build(self) -> WorkList:
        tiles = self._divide_rows()
        self._find_sharing()
        self._pack_shared()
        members = np.array(self._members, dtype=np.int32).reshape(-1, 3)
        items, alone_members = self._lay_out_alone(len(members))
        members = np.concatenate([members, alone_members])
        merges = [
            (query.token, query.first_slot, query.last_chunk - query.first_chunk + 1)
            for queries in self._queries.values()
            for query in queries
            if query.first_slot >= 0
        ]
        return WorkList(
            narrow=_largest_first(np.concatenate([_padded(self._narrow), items]), 2, 3),
            wide=_largest_first(_padded(self._wide), 2, 3),
            member_tokens=members[:, 0].copy(),
            member_positions=members[:, 1].copy(),
            member_slots=members[:, 2].copy(),
            merges=np.array(merges, dtype=np.int32).reshape(-1, 3),
            num_slots=self._num_slots,
            tiles=_largest_first(_padded(tiles), 1, 2),
        )

    def _first_key(self, position: int) -> int:
        return 0 if self._window is None else max(0, position - self._window + 1)

    def _divide_rows(self) -> list[Tile]:
        """Rows of few tokens become queries, the others tiles."""
        policy = self._policy
        tiles: list[Tile] = []
        token = 0
        for index, row in enumerate(self._rows):
            count = len(row.token_ids)
            few = count <= policy.split_tokens
            if few or (count <= policy.long_split_tokens and row.start >= policy.long_context):
                self._queries[index] = [
                    self._query(token + offset, row.start + offset) for offset in range(count)
                ]
            else:
                tiles += self._tiles(index, token)
            token += count
        return tiles

    def _query(self, token: int, position: int) -> _Query:
        first = self._first_key(position) // self._policy.chunk
        last = position // self._policy.chunk
        slot = -1
        if last > first:
            slot = self._num_slots
            self._num_slots += last - first + 1
        return _Query(token, position, first, last, slot)

    def _tiles(self, index: int, token: int) -> list[Tile]:
        row, policy = self._rows[index], self._policy
        first_block = int(self._tables.starts[index])
        tiles = []
        for offset in range(0, len(row.token_ids), policy.tile_tokens):
            count = min(policy.tile_tokens, len(row.token_ids) - offset)
            position = row.start + offset
            begin = self._first_key(position) // policy.align * policy.align
            tiles.append(
                Tile(first_block, begin, position + count, token + offset, count, position)
            )
        return tiles

    def _find_sharing(self) -> None:
        """Follow the groups of rows that still share, chunk by chunk.

        Contexts form a tree: without a window, a row that shares a chunk with nobody shares none
        after it, and is left to `_lay_out_alone`.
        """
        several = {index for index, queries in self._queries.items() if len(queries) > 1}
        together = set(self._queries)
        last_chunk = max((q[-1].last_chunk for q in self._queries.values()), default=-1)
        for chunk in range(last_chunk + 1):
            if not together and not several:
                return
            groups: dict[bytes, list[int]] = defaultdict(list)
            for index in sorted(together | several):
                queries = self._queries[index]
                if queries[0].first_chunk <= chunk <= queries[-1].last_chunk:
                    groups[self._ids_of(index, chunk)].append(index)
            for group in groups.values():
                if len(group) > 1 or group[0] in several or self._window is not None:
                    self._shared.append((chunk, group))
                else:
                    self._alone[group[0]] = chunk
                if len(group) == 1 and self._window is None:
                    together.discard(group[0])

    def _ids_of(self, index: int, chunk: int) -> bytes:
        if not self._share:
            return index.to_bytes(8, "little")
        first = int(self._tables.starts[index]) + chunk * self._chunk_blocks
        last = self._queries[index][-1].position // self._block_size + 1
        count = min(self._chunk_blocks, last - chunk * self._chunk_blocks)
        return self._tables.block_ids[first : first + count].tobytes()

    def _pack_shared(self) -> None:
        """Items for chunks with several readers, wide ones where that pays."""
        policy = self._policy
        gathered = [(chunk, group, self._readers(chunk, group)) for chunk, group in self._shared]
        narrow, wide = policy.narrow_rows // policy.group, policy.wide_rows // policy.group
        saved = sum(
            (-(-len(readers) // narrow) - -(-len(readers) // wide)) * policy.chunk
            for _, _, readers in gathered
            if len(readers) * policy.group >= policy.wide_min_rows
        )
        pays = saved * policy.token_bytes >= policy.wide_min_bytes
        for chunk, group, readers in gathered:
            is_wide = pays and len(readers) * policy.group >= policy.wide_min_rows
            room, target = (wide, self._wide) if is_wide else (narrow, self._narrow)
            first_block = int(self._tables.starts[group[0]]) + chunk * self._chunk_blocks
            for at in range(0, len(readers), room):
                target.append(self._item(chunk, first_block, readers[at : at + room]))

    def _readers(self, chunk: int, group: list[int]) -> list[_Query]:
        return [
            query
            for index in group
            for query in self._queries[index]
            if query.first_chunk <= chunk <= query.last_chunk
        ]

    def _item(self, chunk: int, first_block: int, readers: list[_Query]) -> Item:
        policy = self._policy
        base = chunk * policy.chunk
        first_key = min(self._first_key(query.position) for query in readers)
        first_member = len(self._members)
        for query in readers:
            slot = query.first_slot
            self._members.append(
                (
                    query.token,
                    query.position,
                    slot if slot < 0 else slot + chunk - query.first_chunk,
                )
            )
        return Item(
            first_block,
            base,
            max(base, first_key // policy.align * policy.align),
            min(base + policy.chunk, max(query.position for query in readers) + 1),
            first_member,
            len(readers),
            self._masked_from(base, min(query.position for query in readers)),
        )

    def _masked_from(self, base: int, position: int) -> int:
        """The first tile of a chunk that is not wholly seen from `position`."""
        seen = max(0, min(position + 1 - base, self._policy.chunk))
        return base + seen // self._policy.align * self._policy.align

    def _lay_out_alone(self, num_members: int) -> tuple[Ints, Ints]:
        """Items of one query each, all at once: no window, one token a row."""
        chunk_size = self._policy.chunk
        if not self._alone:
            return np.empty((0, 8), dtype=np.int32), np.empty((0, 3), dtype=np.int32)
        index = np.fromiter(self._alone, dtype=np.int64)
        from_chunk = np.fromiter(self._alone.values(), dtype=np.int64)
        queries = np.array([self._queries[i][0] for i in self._alone], dtype=np.int64)
        token, position, last_chunk, first_slot = queries[:, [0, 1, 3, 4]].T
        counts = last_chunk - from_chunk + 1
        which = np.repeat(np.arange(len(index)), counts)
        chunk = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        chunk += from_chunk[which]
        items = np.zeros((len(chunk), 8), dtype=np.int32)
        items[:, 0] = self._tables.starts[index][which] + chunk * self._chunk_blocks
        items[:, 1] = items[:, 2] = chunk * chunk_size
        items[:, 3] = np.minimum((chunk + 1) * chunk_size, position[which] + 1)
        items[:, 4] = num_members + np.arange(len(chunk))
        items[:, 5] = 1
        seen = items[:, 3] - items[:, 1]
        items[:, 6] = items[:, 1] + seen // self._policy.align * self._policy.align
        slots = np.where(first_slot[which] < 0, -1, first_slot[which] + chunk)
        members = np.stack([token[which], position[which], slots], axis=1)
        return items, members.astype(np.int32)


def _padded(entries: Sequence[Item] | Sequence[Tile]) -> Ints:
    table = np.zeros((len(entries), 8), dtype=np.int32)
    if entries:
        table[:, : len(entries[0])] = entries
    return table


def _largest_first(table: Ints, begin: int, end: int) -> Ints:
    """Costly work first, so that the last programs to finish are short; ties stay in order."""
    return table[np.argsort(table[:, begin] - table[:, end], kind="stable")]
