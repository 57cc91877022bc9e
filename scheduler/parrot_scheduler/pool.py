"""The engines of one model, what they hold, and what waits for them."""

from __future__ import annotations

from parrot_scheduler.prefix_index import PrefixIndex
from parrot_scheduler.table import EngineTable
from parrot_scheduler.task import EngineId


class Pool:
    """What policies see of one model's engines; `Scheduler` alone changes it."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.table = EngineTable()
        #: Which engine holds which blocks, by row.
        self.prefixes = PrefixIndex()

    def row_of(self, engine_id: EngineId | None) -> int:
        """The row of an engine that is here; -1 otherwise."""
        return self.table.row_of(engine_id)
