"""Adapters of a tensor-parallel engine: each rank reads its part, and all have it before a step.

All ranks read at the same time, beside the steps; an adapter is served only after all have read the
same weights. Messages between the steps tell the workers from when on steps may name an adapter, or
no longer do, in the same order for all.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from parrot_engine.batch import Adapter, AdapterMemory
from parrot_engine.distributed.step_message import AdapterChange
from parrot_engine.distributed.worker_group import WorkerGroup
from parrot_engine.exceptions import AdapterError, ShardError


class RankedAdapter(NamedTuple):
    """An adapter that every rank has read; implements `parrot_engine.batch.Adapter`."""

    #: Rank 0's part, and the number of the workers' parts.
    own: Adapter
    number: int

    @property
    def id(self) -> str:
        return self.own.id

    @property
    def rank(self) -> int:
        return self.own.rank


class LeaderAdapters:
    """The adapters of all ranks, on rank 0; implements `parrot_engine.batch.AdapterMemory`."""

    def __init__(self, own: AdapterMemory, workers: WorkerGroup) -> None:
        self._own = own
        self._workers = workers
        self.count = own.count

    def read(self, folder: Path) -> RankedAdapter:
        """Read an adapter on all ranks, and wait for them; see `AdapterMemory`.

        Raises:
            AdapterError: the adapter cannot be used on every rank.
        """
        own = self._own.read(folder)
        try:
            return RankedAdapter(own, self._workers.read_adapter(str(folder), own.id))
        except ShardError as error:
            raise AdapterError(str(error)) from error

    def add(self, adapter: RankedAdapter) -> None:
        self._own.add(adapter.own)
        self._workers.send(AdapterChange(add=adapter.number))

    def remove(self, adapter_id: str) -> None:
        self._own.remove(adapter_id)
        self._workers.send(AdapterChange(remove=adapter_id))


class WorkerAdapters:
    """The adapters of another rank: read when rank 0 asks, and kept until steps name them."""

    def __init__(self, own: AdapterMemory | None) -> None:
        self._own = own
        self._read: dict[int, Any] = {}

    def read(self, number: int, folder: str, adapter_id: str) -> str:
        """Read an adapter under a number, in any thread; return the error, or ""."""
        assert self._own is not None
        try:
            adapter = self._own.read(Path(folder))
        except Exception as error:
            return str(error) or type(error).__name__
        if adapter.id != adapter_id:
            return "its files changed while they were read"
        self._read[number] = adapter
        return ""

    def forget(self, number: int) -> None:
        """Forget an adapter that another rank could not read."""
        with suppress(KeyError):
            del self._read[number]

    def apply(self, change: AdapterChange) -> None:
        assert self._own is not None
        if change.add:
            self._own.add(self._read.pop(change.add))
        if change.remove:
            self._own.remove(change.remove)
