"""A step's plan on the CPU: its tables, and a work list for each window, by the shortest way.

Most steps are those before but for a token a row: their lists are advanced (`advance`). Other steps
of decodes have a short way of their own (`decode_list`), and what is left is `work_list.build`'s.
All three make the same lists.

Plain numpy, no torch, no device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from parrot_engine.attention.advance import advance, goes_on
from parrot_engine.attention.decode_list import build_decodes
from parrot_engine.attention.interface import AttentionShape
from parrot_engine.attention.policy import Policy
from parrot_engine.attention.tables import Tables, flatten_tables
from parrot_engine.attention.work_list import WorkList, build
from parrot_engine.batch import BatchRow


class HostPlan(NamedTuple):
    """One step, laid out on the CPU; its arrays are only read."""

    tables: Tables
    lists: dict[int | None, WorkList]

    @property
    def parts(self) -> Parts:
        """What a plan of fixed capacity needs for it."""
        lists = self.lists.values()
        return Parts(
            any(len(work.tiles) for work in lists),
            any(len(work.wide) for work in lists),
            any(len(work.merges) for work in lists),
        )


class Parts(NamedTuple):
    """Which kinds of work a plan may hold, besides narrow items."""

    tiles: bool
    wide: bool
    merges: bool = True

    def cover(self, other: Parts) -> bool:
        """Whether `other` has nothing that is not here."""
        return all(mine >= theirs for mine, theirs in zip(self, other, strict=True))


class HostPlanner:
    """Lays out one step after the other."""

    def __init__(
        self, shape: AttentionShape, policy: Policy, windows: Sequence[int | None]
    ) -> None:
        """For layers with these windows."""
        self._shape = shape
        self._policy = policy
        self._windows = windows
        #: What was laid out last, and whether rows shared in it.
        self._before: HostPlan | None = None
        self._shared = True

    def lay_out(self, rows: Sequence[BatchRow], *, share: bool = True) -> HostPlan:
        """The plan of a step of at least one row; rows as in `StepBatch`.

        Without `share` every row reads for itself.
        """
        tables = flatten_tables(rows, self._shape.block_size)
        before = self._before
        if before is not None and (share != self._shared or not goes_on(before.tables, tables)):
            before = None
        self._shared = share
        lists = {window: self._list(tables, before, window, share) for window in self._windows}
        self._before = HostPlan(tables, lists)
        return self._before

    def _list(
        self, tables: Tables, before: HostPlan | None, window: int | None, share: bool
    ) -> WorkList:
        shape, policy = self._shape, self._policy
        work = None
        if before is not None:
            work = advance(before.lists[window], before.tables, tables, policy, window)
        if work is None:
            work = build_decodes(tables, shape, policy, window, share=share)
        return work or build(tables, shape, policy, window, share=share)
