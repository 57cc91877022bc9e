"""Which engine holds which prefix blocks, as far as the scheduler knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from parrot_scheduler.task import BlockHash


class Match(NamedTuple):
    """The longest run of a prompt's blocks that an engine holds, for those that hold any."""

    #: Row of each engine.
    rows: list[int]
    #: Leading blocks of the prompt that it holds, at least one.
    blocks: list[int]


class PrefixIndex:
    """Block hashes by the engines (rows) that hold them; bounded, least recently used out first."""

    def match(self, prefix: Sequence[BlockHash]) -> Match:
        """Who holds how much of a prompt. Cost does not grow with the number of engines."""
        raise NotImplementedError
