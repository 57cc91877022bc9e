"""The block table of one context, as a list to work with and as an array to hand out.

A step needs the tables of all its rows as arrays of int32; making them anew in every step, from
lists of hundreds of blocks, would cost more than the rest of its planning.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

_MIN_CAPACITY = 8


class BlockTable:
    """Block ids in the order of the positions that they hold."""

    __slots__ = ("_array", "_view", "ids")

    def __init__(self, ids: Iterable[int] = ()) -> None:
        #: The ids, to be read only; changes go through the methods.
        self.ids = list(ids)
        self._array = np.empty(max(_MIN_CAPACITY, 2 * len(self.ids)), dtype=np.int32)
        self._array[: len(self.ids)] = self.ids
        #: What `array` gave out last; None when the length has changed since.
        self._view: npt.NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def array(self) -> npt.NDArray[np.int32]:
        """The ids as a view, which is right until the table changes."""
        view = self._view
        if view is None:
            view = self._view = self._array[: len(self.ids)]
        return view

    def append(self, block: int) -> None:
        """Add a block at the end."""
        count = len(self.ids)
        if count == len(self._array):
            grown = np.empty(2 * count, dtype=np.int32)
            grown[:count] = self._array
            self._array = grown
        self._array[count] = block
        self.ids.append(block)
        self._view = None

    def replace(self, index: int, block: int) -> None:
        """Put another block in place of one."""
        self.ids[index] = block
        self._array[index] = block

    def truncate(self, count: int) -> None:
        """Keep the first `count` blocks only."""
        del self.ids[count:]
        self._view = None
