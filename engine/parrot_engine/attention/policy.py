"""Measured parameters for splitting and packing attention work."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Cuts(NamedTuple):
    """Cut positions of keys in tokens; chunks are multiples of blocks and of a kernel's tile.

    A cut lets several programs read a row's keys, and costs a merge of their results.
    """

    #: Keys per chunk.
    chunk: int
    #: A row's keys behind its last whole chunk are read with that chunk if they are at most this
    #: many and the chunk is not shared.
    tail: int = 0
    #: Smaller chunks in ascending order, for steps whose readings would leave the device idle.
    fine: tuple[int, ...] = ()
    #: A larger chunk for steps with few queries and many keys; 0: none.
    coarse: int = 0


#: Maximum partial results of a step that graphs should hold: 135 MB with 32 heads of 128.
MAX_SLOTS = 8192
#: Most tokens of a graph with prefill. Larger steps keep the device busy for longer than launching
#: their kernels takes (13 to 24 ms for 32 layers, depending on the host's CPU).
MAX_MIXED_TOKENS = 1024


class TileCuts(NamedTuple):
    """Parameters for cutting the keys of prefill tiles; `tiles` describes the trade-off.

    Costs are in keys: the time that a program takes for one of them.
    """

    #: Possible numbers of parts for the tile with most keys; (1,) cuts nothing.
    parts: tuple[int, ...]
    #: Minimum keys per part.
    least: int
    #: Fixed cost of a program.
    start: int
    #: Cost of writing and merging the results of one round of concurrent programs.
    merge: int
    #: Cuts may increase the programs to this many rounds, because graphs reserve room for them and
    #: launch them even if unused.
    rounds: int = 1
    #: Slowdown per key of a program that shares its multiprocessor with others.
    crowded: float = 1.0
    #: Possible numbers of parts for the last tiles of a step too large for a graph, with a kernel
    #: of one program per multiprocessor; empty: they are not cut.
    last: tuple[int, ...] = ()


class Policy(NamedTuple):
    """Constants for a model on a device."""

    cuts: Cuts
    #: Chunk choice by readings (a query and a chunk that it reads): the smallest chunk with at most
    #: this many readings in the step; otherwise the coarse one if it gives twice as many and the
    #: step has at most this many queries; otherwise the usual one.
    fine_readings: int
    #: Alignment of an item's first key within its chunk: the keys of a tile.
    align: int
    #: Rows (queries x heads of a group) of the narrow and the wide tile.
    narrow_rows: int
    wide_rows: int
    #: Query heads per KV head.
    group: int
    #: Tokens per prefill tile.
    tile_tokens: int
    tile_cuts: TileCuts
    #: Prefill tiles that the device runs concurrently, with one program per KV head.
    tile_round: int
    #: Number of these that have multiprocessors to themselves.
    tiles_alone: int
    #: Multiprocessors, and programs per tile.
    num_sms: int
    num_kv_heads: int
    #: Prefill tiles are cut only while the step has at most this many partial results.
    max_slots: int
    #: Bytes of one key and its value, over all KV heads of a layer.
    token_bytes: int
    #: Rows of up to this many tokens always have their keys split …
    split_tokens: int
    #: … and rows of up to this many do if they had at least `long_context` keys before.
    long_split_tokens: int
    long_context: int
    #: An item becomes wide with at least this many rows …
    wide_min_rows: int
    #: … if all such items of the step save at least this many bytes of reading per layer.
    wide_min_bytes: int
    #: Wide items that the device runs concurrently, with one program per KV head.
    wide_round: int

    def cuts_of(self, num_queries: int, count_readings: Callable[[int], int]) -> Cuts:
        """Return the cuts for a step; `count_readings` counts readings by chunk size."""
        cuts, most = self.cuts, self.fine_readings
        # There is at least one chunk per query.
        if num_queries > most:
            return cuts
        for chunk in cuts.fine:
            if count_readings(chunk) <= most:
                return Cuts(chunk)
        if cuts.coarse and count_readings(cuts.coarse) >= 2 * most:
            return Cuts(cuts.coarse, cuts.tail)
        return cuts

    @property
    def narrow_members(self) -> int:
        return self.narrow_rows // self.group

    @property
    def wide_members(self) -> int:
        return self.wide_rows // self.group
