"""Held applications of one model, and the order in which they are admitted."""

from __future__ import annotations

from bisect import insort_right
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from parrot_scheduler.lazy_heap import LazyHeap
from parrot_scheduler.policy import AdmissionCandidate, OrderPolicy
from parrot_scheduler.task import ApplicationId, TaskId, TenantId
from parrot_scheduler.task_state import Application, TaskState

#: Tenants of each kind offered to an admission policy, and applications of them in all.
_MAX_CANDIDATES = 16
#: Tenants behind the front that are re-sorted in one look because their service has grown.
_MAX_RESORTED = 64


@dataclass(slots=True, eq=False)
class HeldApplication:
    """An application in the admission queue."""

    application: Application
    since: float
    reason: str
    #: True if an engine retains KV for it.
    returning: bool
    #: The view that admission policies get.
    candidate: AdmissionCandidate
    tenant: TenantId = ""
    tasks: dict[TaskId, TaskState] = field(default_factory=dict)

    def withdraw(self, state: TaskState) -> None:
        del self.tasks[state.task.id]
        if state is self.candidate.first and self.tasks:
            first = next(iter(self.tasks.values()))
            self.candidate = AdmissionCandidate(self.application, first, self.since)


class _TenantQueues:
    """Tenants by service so far, and each tenant's held applications by rank."""

    def __init__(self, order: OrderPolicy) -> None:
        self._order = order
        self._by_tenant: dict[TenantId, LazyHeap[HeldApplication]] = {}
        self._ranks: dict[HeldApplication, tuple[float, ...]] = {}
        # Tenants with the least service, sorted by it; and all others.
        self._front: list[tuple[float, TenantId]] = []
        self._behind: LazyHeap[TenantId] = LazyHeap()
        # The last result of `first`; None once it is stale.
        self._candidates: list[HeldApplication] | None = []

    def add(self, held: HeldApplication, rank: tuple[float, ...]) -> None:
        self._candidates = None
        self._ranks[held] = rank
        tenant = held.tenant
        queue = self._by_tenant.get(tenant)
        if queue is None:
            queue = self._by_tenant[tenant] = LazyHeap()
            self._behind.push(tenant, self._order.service_of(tenant))
        elif tenant in self._behind:
            self._behind.push(tenant, self._order.service_of(tenant))
        queue.push(held, rank)

    def remove(self, held: HeldApplication) -> None:
        self._candidates = None
        del self._ranks[held]
        queue = self._by_tenant[held.tenant]
        queue.remove(held)
        if not queue:
            del self._by_tenant[held.tenant]
            if not self._behind.remove(held.tenant):
                self._front = [place for place in self._front if place[1] != held.tenant]

    def first(self) -> list[HeldApplication]:
        """Return the first applications of the tenants with the least service."""
        moved = self._sort_front()
        if moved or self._candidates is None:
            each = max(1, _MAX_CANDIDATES // max(len(self._front), 1))
            self._candidates = [
                held for _, tenant in self._front for held in self._first_of(tenant, each)
            ]
        return self._candidates

    def _sort_front(self) -> bool:
        """Sort the front; return true if the service of one of its tenants has changed.

        A tenant behind the front is re-sorted only when it comes up, since service mostly grows. It
        comes up only after a tenant in the front has changed, come or gone.
        """
        order, behind, front = self._order, self._behind, self._front
        moved = [place for place in front if order.service_of(place[1]) != place[0]]
        if moved:
            self._front = front = [place for place in front if place not in moved]
            for _, mover in moved:
                behind.push(mover, order.service_of(mover))
        resorted = 0
        while (tenant := behind.first()) is not None:
            known = behind.first_key()
            is_full = len(front) >= _MAX_CANDIDATES
            if is_full and known >= front[-1][0]:
                break
            service = order.service_of(tenant)
            if service > known and resorted < _MAX_RESORTED:
                resorted += 1
                behind.push(tenant, service)
                continue
            if is_full:
                if service >= front[-1][0]:
                    break
                last_service, last = front.pop()
                behind.push(last, last_service)
            behind.remove(tenant)
            insort_right(front, (service, tenant), key=_service)
        return bool(moved)

    def _first_of(self, tenant: TenantId, count: int) -> list[HeldApplication]:
        queue = self._by_tenant[tenant]
        first: list[HeldApplication] = []
        while len(first) < count and (held := queue.first()) is not None:
            first.append(held)
            if len(first) < count:
                queue.remove(held)
        for held in first:
            queue.push(held, self._ranks[held])
        return first


def _service(place: tuple[float, TenantId]) -> float:
    return place[0]


class AdmissionQueue:
    """Held applications in two queues: those with KV retained on an engine, and all others.

    Applications with retained KV go first. An application whose KV is gone waits with the new ones.
    It came earlier, so it precedes those with equal work, but a long chain of unrelated calls does
    not shut out short applications by returning after each call.

    The order policy chooses the next one, as for queued tasks: the tenant with the least service,
    and its application with the lowest rank. If the longest held went first instead, a flooding
    tenant would fill the list that an admission policy chooses from.
    """

    def __init__(self, order: OrderPolicy) -> None:
        self._order = order
        #: In order of arrival; only this class changes it.
        self.held: OrderedDict[ApplicationId, HeldApplication] = OrderedDict()
        self._returning = _TenantQueues(order)
        self._others = _TenantQueues(order)

    def __len__(self) -> int:
        return len(self.held)

    def oldest(self) -> HeldApplication | None:
        return next(iter(self.held.values()), None)

    def hold(
        self, application: Application, first: TaskState, reason: str, now: float
    ) -> HeldApplication:
        candidate = AdmissionCandidate(application, first, now)
        held = HeldApplication(application, now, reason, application.retained_tokens > 0, candidate)
        held.tenant, rank = self._order.admission_rank(first, application, now)
        held.tasks[first.task.id] = first
        self.held[application.id] = held
        self._queue_of(held).add(held, rank)
        return held

    def remove(self, held: HeldApplication) -> None:
        """Remove an application that is admitted, or whose last held task has ended."""
        del self.held[held.application.id]
        self._queue_of(held).remove(held)
        self._order.admitted(held.application)

    def candidates(self) -> Iterator[AdmissionCandidate]:
        """Return a few applications to choose from, those with retained KV first, each kind in its
        order.

        Offers up to 16 tenants of each kind. With fewer tenants, each offers more applications, 16
        in all.
        """
        for queue in (self._returning, self._others):
            for held in queue.first():
                yield held.candidate

    def _queue_of(self, held: HeldApplication) -> _TenantQueues:
        return self._returning if held.returning else self._others
