"""The door: applications of one pool that are held, and whose turn it is to enter."""

from __future__ import annotations

from bisect import insort_right
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from parrot_scheduler.lazy_heap import LazyHeap
from parrot_scheduler.policy import Application, OrderPolicy, Waiting
from parrot_scheduler.task import ApplicationId, TaskId, TenantId
from parrot_scheduler.task_state import Entry

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
    #: What admission policies see of it.
    waiting: Waiting
    tenant: TenantId = ""
    entries: dict[TaskId, Entry] = field(default_factory=dict)

    def withdraw(self, entry: Entry) -> None:
        """One of its tasks waits no more."""
        del self.entries[entry.task.id]
        if entry is self.waiting.first and self.entries:
            first = next(iter(self.entries.values()))
            self.waiting = Waiting(self.application, first, self.since)


class _Line:
    """Tenants by what they have had, and the applications of each by rank."""

    def __init__(self, order: OrderPolicy) -> None:
        self._order = order
        self._of: dict[TenantId, LazyHeap[Held]] = {}
        self._ranks: dict[Held, tuple[float, ...]] = {}
        # The tenants that had least, with what they had, in this order; and all others.
        self._front: list[tuple[float, TenantId]] = []
        self._behind: LazyHeap[TenantId] = LazyHeap()
        # What `first` found last; None once something is different.
        self._shown: list[Held] | None = []

    def add(self, held: Held, rank: tuple[float, ...]) -> None:
        """One more."""
        self._shown = None
        self._ranks[held] = rank
        tenant = held.tenant
        line = self._of.get(tenant)
        if line is None:
            line = self._of[tenant] = LazyHeap()
            self._behind.push(tenant, self._order.share_of(tenant))
        elif tenant in self._behind:
            self._behind.push(tenant, self._order.share_of(tenant))
        line.push(held, rank)

    def remove(self, held: Held) -> None:
        """One of them is gone."""
        self._shown = None
        del self._ranks[held]
        line = self._of[held.tenant]
        line.remove(held)
        if not line:
            del self._of[held.tenant]
            if not self._behind.remove(held.tenant):
                self._front = [stood for stood in self._front if stood[1] != held.tenant]

    def first(self) -> list[Held]:
        """A few: of the tenants that had least, those whose turn it is."""
        moved = self._sort_in()
        if moved or self._shown is None:
            each = max(1, _SHOWN // max(len(self._front), 1))
            self._shown = [held for _, tenant in self._front for held in self._some(tenant, each)]
        return self._shown

    def _sort_in(self) -> bool:
        """Put the front right; False: it is as it was.

        A tenant further behind is put right when it comes up, as shares mostly grow.
        """
        order, behind, front = self._order, self._behind, self._front
        moved = [stood for stood in front if order.share_of(stood[1]) != stood[0]]
        if moved:
            self._front = front = [stood for stood in front if stood not in moved]
            for _, mover in moved:
                behind.push(mover, order.share_of(mover))
        resorted, has_moved = 0, bool(moved)
        while (tenant := behind.first()) is not None:
            had = behind.first_key()
            is_full = len(front) >= _SHOWN
            if is_full and had >= front[-1][0]:
                break
            share = order.share_of(tenant)
            if share > had and resorted < _MAX_RESORTED:
                resorted += 1
                behind.push(tenant, share)
                continue
            if is_full:
                if share >= front[-1][0]:
                    break
                share_of_last, last = front.pop()
                behind.push(last, share_of_last)
            behind.remove(tenant)
            insort_right(front, (share, tenant), key=_share)
            has_moved = True
        return has_moved

    def _some(self, tenant: TenantId, count: int) -> list[Held]:
        """The first applications of a tenant."""
        line = self._of[tenant]
        some: list[Held] = []
        while len(some) < count and (held := line.first()) is not None:
            some.append(held)
            if len(some) < count:
                line.remove(held)
        for held in some:
            line.push(held, self._ranks[held])
        return some


def _share(stood: tuple[float, TenantId]) -> float:
    return stood[0]


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
        waiting = Waiting(application, first, now)
        held = Held(application, now, reason, application.kept_tokens > 0, waiting)
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
                yield held.waiting

    def _line(self, held: Held) -> _Line:
        return self._returning if held.returning else self._new
