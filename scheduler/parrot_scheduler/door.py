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

    def add(self, held: Held, rank: tuple[float, ...]) -> None:
        """One more."""
        self._of.setdefault(held.tenant, LazyHeap()).push(held, rank)
        self._tenants.push(held.tenant, self._order.share_of(held.tenant))

    def remove(self, held: Held) -> None:
        """One of them is gone."""
        line = self._of[held.tenant]
        line.remove(held)
        if not line:
            del self._of[held.tenant]
            self._tenants.remove(held.tenant)

    def first(self) -> list[Held]:
        """A few: of the tenants that had least, those whose turn it is; O(log n) each.

        A tenant's place is put right when it comes up, as shares mostly grow.
        """
        tenants, share_of = self._tenants, self._order.share_of
        resorted = 0
        while True:
            chosen = tenants.smallest(_SHOWN)
            shares = {tenant: share_of(tenant) for tenant in chosen}
            grown = [tenant for tenant in chosen if shares[tenant] > tenants.key_of(tenant)]
            if not grown or resorted >= _MAX_RESORTED:
                break
            resorted += len(grown)
            for tenant in grown:
                tenants.push(tenant, shares[tenant])
        for tenant in chosen:
            tenants.push(tenant, shares[tenant])
        each = max(1, _SHOWN // max(1, len(chosen)))
        return [held for tenant in chosen for held in self._of[tenant].smallest(each)]


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
