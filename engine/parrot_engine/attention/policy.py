"""Measured parameters of how attention work is split and packed."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Cuts(NamedTuple):
    """Where keys are cut, in tokens, chunks being multiples of blocks and of a kernel's tile.

    A cut lets several programs read the keys of a row, and costs a merge of what they found.
    """

    #: Keys of a chunk.
    chunk: int
    #: Up to so many keys behind a row's last whole chunk are read with it unless it is shared.
    tail: int = 0
    #: Smaller chunks, the smallest first, for steps whose readings would leave the device idle.
    fine: tuple[int, ...] = ()
    #: A larger chunk, for steps of few queries and many keys; 0: none.
    coarse: int = 0


#: Partial results of attention that a step may have where graphs are to hold it: 135 MB with 32
#: heads of 128.
MAX_SLOTS = 8192
#: Most tokens of a graph with prefill: larger steps keep the device busy for longer than it takes
#: to launch them one by one (13 to 24 ms for 32 layers, by the host's CPU).
MAX_MIXED_TOKENS = 1024


class TileCuts(NamedTuple):
    """Parameters by which the keys of prefill tiles are cut; `tiles` describes the trade-off.

    Costs are in keys: the time that a program takes for one of them.
    """

    #: The numbers of parts to choose from for the tile of most keys; (1,) cuts nothing.
    parts: tuple[int, ...]
    #: Keys of a part, at least.
    least: int
    #: What a program costs besides its keys.
    start: int
    #: What it costs to write and to merge the results of as many programs as run at once.
    merge: int
    #: Cuts may bring so many times the programs that run at once, since graphs have room for them,
    #: and launch them whether they are there or not.
    rounds: int = 1
    #: How much longer a key takes a program that shares its multiprocessor with others.
    crowded: float = 1.0
    #: The numbers of parts to choose from for the last tiles of a step too large for a graph, by a
    #: kernel of one program a multiprocessor; none: they are not cut.
    last: tuple[int, ...] = ()


class Policy(NamedTuple):
    """Constant for a model on a device."""

    cuts: Cuts
    #: The smallest chunk is taken with which a step has at most so many readings (a query and a
    #: chunk that it reads); the coarse one where it makes twice as many, if the step has no more
    #: queries than this; else the usual one.
    fine_readings: int
    #: Alignment of an item's first key within its chunk: keys of a tile.
    align: int
    #: Rows (queries x heads of a group) of the narrow and of the wide tile.
    narrow_rows: int
    wide_rows: int
    #: Query heads of a KV head.
    group: int
    #: Tokens of a prefill tile.
    tile_tokens: int
    tile_cuts: TileCuts
    #: Prefill tiles that the device runs at the same time, with a program for each KV head.
    tile_round: int
    #: And of these, how many have multiprocessors for themselves.
    tiles_alone: int
    #: Multiprocessors, and programs of a tile.
    num_sms: int
    num_kv_heads: int
    #: Prefill tiles are cut only as far as the step has no more partial results than this.
    max_slots: int
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
    #: Wide items that the device runs at the same time, with a program for each KV head.
    wide_round: int

    def cuts_of(self, num_queries: int, count_readings: Callable[[int], int]) -> Cuts:
        """Return where to cut a step's keys; `count_readings` counts readings by chunk size."""
        cuts, most = self.cuts, self.fine_readings
        # A chunk a query is the least.
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
