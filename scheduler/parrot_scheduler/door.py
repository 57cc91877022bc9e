"""The door: applications of one pool that are held, and whose turn it is to enter."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from parrot_scheduler.entry import Entry
from parrot_scheduler.lazy_heap import LazyHeap
from parrot_scheduler.policy import Application, OrderPolicy, Waiting
from parrot_scheduler.task import ApplicationId, TaskId, TenantId

#: Tenants of each kind that an admission policy chooses from, and their applications in all.
_SHOWN = 16
#: Tenants whose share has grown since they were sorted in; so many are put right for one look.
_MAX_RESORTED = 64


@dataclass(slots=True, eq=False)
class Held:
    """An application at the door."""

    application: Application
    since: float
    reason: str
    returning: bool
    tenant: TenantId = ""
    entries: dict[TaskId, Entry] = field(default_factory=dict)


class _Line:
    """Tenants by what they have had, and the applications of each by rank."""

    def __init__(self, order: OrderPolicy) -> None:
        self._order = order
        self._tenants: LazyHeap[TenantId] = LazyHeap()
        self._of: dict[TenantId, LazyHeap[Held]] = {}
        self._ranks: dict[Held, tuple[float, ...]] = {}

    def add(self, held: Held, rank: tuple[float, ...]) -> None:
        """One more."""
        self._ranks[held] = rank
        self._of.setdefault(held.tenant, LazyHeap()).push(held, rank)
        self._tenants.push(held.tenant, self._order.share_of(held.tenant))

    def remove(self, held: Held) -> None:
        """One of them is gone."""
        del self._ranks[held]
        line = self._of[held.tenant]
        line.remove(held)
        if not line:
            del self._of[held.tenant]
            self._tenants.remove(held.tenant)

    def first(self) -> list[Held]:
        """A few: of the tenants that had least, those whose turn it is; O(log n) each.

        A tenant's place is put right when it comes up, as shares mostly grow.
        """
        tenants: list[TenantId] = []
        resorted = 0
        while len(tenants) < _SHOWN and (tenant := self._tenants.first()) is not None:
            share = self._order.share_of(tenant)
            stale = share > self._tenants.first_key() and resorted < _MAX_RESORTED
            if stale:
                resorted += 1
                self._tenants.push(tenant, share)
            else:
                self._tenants.remove(tenant)
                tenants.append(tenant)
        shown: list[Held] = []
        for tenant in tenants:
            self._tenants.push(tenant, self._order.share_of(tenant))
            line = self._of[tenant]
            some: list[Held] = []
            while len(some) < max(1, _SHOWN // len(tenants)) and (held := line.first()) is not None:
                line.remove(held)
                some.append(held)
            for held in some:
                line.push(held, self._ranks[held])
            shown += some
        return shown


class Door:
    """Applications that are held, in two lines: those whose context waits for them, and all others.

    The first go before the second. One whose context is gone stands beside new ones: it came
    earlier, so it goes first among those with as much work, but a long chain of calls that share
    nothing does not shut out short applications by returning after each call.

    Who is next is the order policy's business, as for queued tasks: the tenant that had least, and
    of a tenant's applications the one of the lowest rank. Looking at the longest held ones instead
    would let a tenant that floods fill the door, with nothing left to choose from behind it.
    """

    def __init__(self, order: OrderPolicy) -> None:
        self._order = order
        #: In order of arrival.
        self.held: OrderedDict[ApplicationId, Held] = OrderedDict()
        self._returning = _Line(order)
        self._new = _Line(order)

    def __len__(self) -> int:
        """Applications that are held."""
        return len(self.held)

    def get(self, application: ApplicationId) -> Held | None:
        """An application that is held."""
        return self.held.get(application)

    def oldest(self) -> Held | None:
        """The one that is held for longest."""
        return next(iter(self.held.values()), None)

    def stop(self, application: Application, first: Entry, reason: str, now: float) -> Held:
        """An application is held from now on; `first` is its first task."""
        held = Held(application, now, reason, returning=application.kept_tokens > 0)
        held.tenant, rank = self._order.held(first, application, now)
        held.entries[first.task.id] = first
        self.held[application.id] = held
        self._line(held).add(held, rank)
        return held

    def leave(self, held: Held) -> None:
        """An application is held no more."""
        del self.held[held.application.id]
        self._line(held).remove(held)
        self._order.let_in(held.application)

    def shown(self) -> Iterator[Waiting]:
        """A few to choose from, those with a context on an engine first, each kind in its order.

        Up to 16 tenants of each kind; of fewer tenants more applications, 16 in all.
        """
        for line in (self._returning, self._new):
            for held in line.first():
                yield Waiting(held.application, next(iter(held.entries.values())), held.since)

    def _line(self, held: Held) -> _Line:
        return self._returning if held.returning else self._new
