"""First come, first served: calls in order of submission, whoever's they are."""

from __future__ import annotations

from collections.abc import Iterable

from parrot_scheduler.lazy_heap import LazyHeap
from parrot_scheduler.policy import Application, HeldRank
from parrot_scheduler.task import TenantId
from parrot_scheduler.task_state import Entry


class Fcfs:
    """Calls in order of submission. Knows neither tenants, applications nor priorities."""

    name = "fcfs"

    def __init__(self) -> None:
        self._queue: LazyHeap[Entry] = LazyHeap()
        self._aside: dict[Entry, None] = {}

    def held(self, entry: Entry, application: Application, now: float) -> HeldRank:
        """By the submission of its first task."""
        return HeldRank("", (entry.sequence,))

    def let_in(self, application: Application) -> None:
        """Nothing is remembered of applications."""

    def share_of(self, tenant: TenantId) -> float:
        """Tenants are not told apart."""
        return 0.0

    def push(self, entry: Entry, application: Application, now: float) -> None:
        """By submission."""
        self._queue.push(entry, entry.sequence)

    def remove(self, entry: Entry) -> None:
        """Out of the queue."""
        self._queue.remove(entry)
        self._aside.pop(entry, None)

    def update(self, entry: Entry, application: Application, now: float) -> None:
        """Nothing that can change matters here."""

    def first(self, now: float) -> Entry | None:
        """The oldest one."""
        return self._queue.first()

    def set_aside(self, entry: Entry) -> None:
        """Pass it over until `bring_back`."""
        if self._queue.remove(entry):
            self._aside[entry] = None

    def bring_back(self, now: float, entries: Iterable[Entry] | None = None) -> None:
        """These are passed over no more; None: nothing is."""
        for entry in list(self._aside) if entries is None else entries:
            del self._aside[entry]
            self._queue.push(entry, entry.sequence)

    def pop(self, entry: Entry, application: Application, now: float) -> None:
        """Out of the queue."""
        self.remove(entry)

    def finished(self, entry: Entry, application: Application, now: float) -> None:
        """Ends change nothing here."""

    def application_finished(self, application: Application, now: float) -> None:
        """Nothing is remembered of applications."""

    def __len__(self) -> int:
        return len(self._queue) + len(self._aside)

    def shares(self) -> dict[TenantId, float]:
        """Tenants are not told apart."""
        return {}
