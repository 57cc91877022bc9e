"""Orders that rank applications first, and the calls of one application after that."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from parrot_scheduler.lazy_heap import LazyHeap
from parrot_scheduler.order.aging import Aging
from parrot_scheduler.policy import Application, HeldRank
from parrot_scheduler.task import TenantId
from parrot_scheduler.task_state import Entry


class ByApplication(ABC):
    """The first application by `rank` is served; of its calls, the first by `rank_call`."""

    name: str

    def __init__(self, aging: Aging | None) -> None:
        self._applications: LazyHeap[Application] = LazyHeap()
        self._calls: dict[Application, LazyHeap[Entry]] = {}
        self._of: dict[Entry, Application] = {}
        self._aside: dict[Entry, None] = {}
        self._aging = aging

    @abstractmethod
    def rank(self, application: Application) -> tuple[float, int]:
        """Smaller is served earlier."""

    def rank_call(self, entry: Entry) -> tuple[float, ...]:
        """Smaller is served earlier, within an application."""
        return (entry.priority, entry.sequence)

    def held(self, entry: Entry, application: Application, now: float) -> HeldRank:
        """By its rank now."""
        return HeldRank("", self.rank(application))

    def let_in(self, application: Application) -> None:  # noqa: B027 - nothing to do by default
        """Nothing is remembered of applications at the door."""

    def share_of(self, tenant: TenantId) -> float:
        """Tenants are not told apart."""
        return 0.0

    def push(self, entry: Entry, application: Application, now: float) -> None:
        """Into its application's queue."""
        self._of[entry] = application
        self._insert(entry, application)

    def _insert(self, entry: Entry, application: Application) -> None:
        calls = self._calls.get(application)
        if calls is None:
            calls = self._calls[application] = LazyHeap()
            self._applications.push(application, self.rank(application))
        calls.push(entry, self.rank_call(entry))
        if self._aging is not None:
            self._aging.add(entry)

    def _take_out(self, entry: Entry, application: Application) -> None:
        calls = self._calls.get(application)
        if calls is not None and calls.remove(entry) and not calls:
            del self._calls[application]
            self._applications.remove(application)

    def remove(self, entry: Entry) -> None:
        """Out of the queue."""
        application = self._of.pop(entry, None)
        if application is None:
            return
        self._aside.pop(entry, None)
        self._take_out(entry, application)
        if self._aging is not None:
            self._aging.remove(entry)

    def update(self, entry: Entry, application: Application, now: float) -> None:
        """Rank it anew."""
        if entry in self._of and entry not in self._aside:
            self._insert(entry, application)

    def first(self, now: float) -> Entry | None:
        """The first call of the first application, or one that is due by age."""
        if self._aging is not None:
            due = self._aging.due(now)
            if due is not None:
                return due
        application = self._applications.first()
        return None if application is None else self._calls[application].first()

    def set_aside(self, entry: Entry) -> None:
        """Pass it over until `bring_back`."""
        self._take_out(entry, self._of[entry])
        if self._aging is not None:
            self._aging.remove(entry)
        self._aside[entry] = None

    def bring_back(self, now: float, entries: Iterable[Entry] | None = None) -> None:
        """These are passed over no more; None: nothing is."""
        for entry in list(self._aside) if entries is None else entries:
            del self._aside[entry]
            self._insert(entry, self._of[entry])

    def pop(self, entry: Entry, application: Application, now: float) -> None:
        """Out of the queue; counts for turns by age."""
        if self._aging is not None:
            self._aging.placed(entry, now)
        self.remove(entry)

    def finished(self, entry: Entry, application: Application, now: float) -> None:
        """Its application may rank differently now."""
        if application in self._calls:
            self._applications.push(application, self.rank(application))

    def application_finished(self, application: Application, now: float) -> None:
        """Without queued calls there is nothing to forget."""
        assert application not in self._calls, f"{application.id} has queued calls"

    def __len__(self) -> int:
        return len(self._of)

    def shares(self) -> dict[TenantId, float]:
        """Tenants are not told apart."""
        return {}
