"""Our order: fair between tenants, whole applications within one, the critical path within these.

1. Tenants by what they were served: uncached prompt tokens and twice the output tokens (VTC with
   DLPM's charge, arXiv 2401.00588 and 2501.14312). Charged when a task is placed, put right when
   it ends. A tenant that comes back starts no lower than whoever is served now.
2. Within a tenant by the priority field.
3. Within a priority, calls that somebody waits for or that have a deadline, by the latest moment
   at which they have to start; and all others by application. Three of four placements go to the
   first kind while both wait. Without a time of its own, a call that somebody waits for is due
   together with its application: three times the length of its path after the last pause.
4. Applications by fair virtual finish time (Justitia, arXiv 2510.17015): the virtual time of their
   arrival plus their whole work, expected from what applications of the same kind needed. Of an
   unknown kind: as much again as it had already, so that it falls behind as it goes on (least
   attained service).
5. Within an application the longest remaining path first. A task group counts as its longest
   member, and its members follow each other.

And every fourth placement goes to a task that waited longer than `starvation_s`: see `Aging`.

Bound: between two tenants with waiting tasks that always find room, charges since both began to
wait differ by at most one task's largest charge, plus what predictions of tasks in flight are
wrong by, plus what age-based turns gave.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from parrot_scheduler.config import SchedulerConfig
from parrot_scheduler.lazy_heap import LazyHeap
from parrot_scheduler.order.aging import Aging
from parrot_scheduler.order.demand import Demand, work_of
from parrot_scheduler.policy import Application, HeldRank
from parrot_scheduler.task import TenantId
from parrot_scheduler.task_state import Entry

#: What an output token costs, in uncached prompt tokens.
OUTPUT_WEIGHT = 2.0
#: While both kinds wait, one placement in so many goes to calls that nobody waits for.
BATCH_SHARE = 4
#: Calls that somebody waits for should end within so many times their own length.
_STRETCH = 3.0
#: An application without calls for longer than this has paused: somebody thinks, a tool runs.
_PAUSE_S = 1.0
#: Tenants looked at in search of one to forget; those that wait are kept beyond the limit.
_LOOKS = 8
#: Priorities beyond this count as this.
_MAX_PRIORITY = 100


def charge_of(entry: Entry, cached: float, output: float) -> float:
    """What a task costs its tenant."""
    return max(0.0, entry.task.prompt_tokens - cached) + OUTPUT_WEIGHT * output


def _priority_of(entry: Entry) -> int:
    return max(-_MAX_PRIORITY, min(entry.priority, _MAX_PRIORITY))


@dataclass(slots=True, eq=False)
class _Bundle:
    """A task group's queued members, or a single call."""

    key: str | Entry
    members: LazyHeap[Entry] = field(default_factory=LazyHeap)
    longest_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Calls:
    """The queued calls of an application, of one priority, that nobody waits for."""

    bundles: LazyHeap[_Bundle] = field(default_factory=LazyHeap)
    by_key: dict[str | Entry, _Bundle] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Level:
    """A tenant's queued calls of one priority."""

    priority: int
    urgent: LazyHeap[Entry] = field(default_factory=LazyHeap)
    applications: LazyHeap[Application] = field(default_factory=LazyHeap)
    calls: dict[Application, _Calls] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Tenant:
    id: TenantId
    sequence: int
    served: float = 0.0
    #: Queued tasks, those set aside included, and what they will be charged at most.
    num_queued: int = 0
    queued_charge: float = 0.0
    #: Applications at the door.
    num_held: int = 0

    @property
    def is_waiting(self) -> bool:
        """Whether anything of it waits, here or at the door."""
        return self.num_queued + self.num_held > 0

    levels: LazyHeap[_Level] = field(default_factory=LazyHeap)
    by_priority: dict[int, _Level] = field(default_factory=dict)
    #: Urgent placements since the last one that was not.
    num_urgent: int = 0


@dataclass(slots=True)
class _Program:
    """What is remembered of an application between its calls."""

    virtual_start: float
    first_work: float
    #: When its calls since its last pause should all have ended.
    due: float
    done_work: float = 0.0
    num_unfinished: int = 0
    paused_at: float = 0.0


@dataclass(slots=True)
class _Spot:
    """Where a queued task is."""

    tenant: _Tenant
    application: Application
    level: _Level
    bundle: _Bundle | None
    is_aside: bool = False


class Fair:
    """See the module's text."""

    name = "fair"

    def __init__(self, config: SchedulerConfig) -> None:
        self._tenants: LazyHeap[_Tenant] = LazyHeap()
        self._known: OrderedDict[TenantId, _Tenant] = OrderedDict()
        self._max_tenants = config.max_tenants
        self._count = 0
        #: What the tenant that is served now has been served.
        self._floor = 0.0
        self._spots: dict[Entry, _Spot] = {}
        self._aside: dict[Entry, None] = {}
        self._charged: dict[Entry, float] = {}
        #: What each queued task would be charged with nothing cached.
        self._most: dict[Entry, float] = {}
        self._programs: dict[Application, _Program] = {}
        self._num_active = 0
        # Work done, shared equally between the applications active meanwhile.
        self._virtual = 0.0
        self._aging = Aging(config.starvation_s)
        self._demand = Demand(config.max_templates)

    # The door

    def held(self, entry: Entry, application: Application, now: float) -> HeldRank:
        """By priority, then by virtual finish time: the one with the least work ahead goes first.

        Calls that somebody waits for are no exception here, or a tenant's chats would shut out its
        other work: a call is short beside an application.
        """
        tenant = self._waiting_tenant(application.tenant)
        tenant.num_held += 1
        program = self._programs.get(application)
        if program is None:
            work = self._demand.work(application) or work_of(entry, entry.expected_output)
            finish = self._virtual + work
        else:
            finish = self._finish_tag(application)[0]
        return HeldRank(tenant.id, (_priority_of(entry), finish, application.sequence))

    def let_in(self, application: Application) -> None:
        """Its tenant waits here from now on."""
        self._known[application.tenant].num_held -= 1

    def share_of(self, tenant: TenantId) -> float:
        """Charges, those of queued tasks included: what is let in counts at once."""
        known = self._known[tenant]
        return known.served + known.queued_charge

    # Queue

    def push(self, entry: Entry, application: Application, now: float) -> None:
        """Into its tenant's queue."""
        program = self._programs.get(application)
        path_s = self._demand.path_s(entry)
        if program is None:
            first_work = work_of(entry, entry.expected_output)
            program = _Program(self._virtual, first_work, now + _STRETCH * path_s)
            self._programs[application] = program
        if program.num_unfinished == 0:
            self._num_active += 1
            if now - program.paused_at > _PAUSE_S:
                program.due = now + _STRETCH * path_s
        program.due = max(program.due, now + path_s)
        program.num_unfinished += 1
        tenant = self._waiting_tenant(application.tenant)
        tenant.num_queued += 1
        most = charge_of(entry, 0.0, entry.expected_output)
        self._most[entry] = most
        tenant.queued_charge += most
        self._insert(entry, tenant, application)

    def _insert(self, entry: Entry, tenant: _Tenant, application: Application) -> None:
        priority = _priority_of(entry)
        level = tenant.by_priority.get(priority)
        if level is None:
            level = tenant.by_priority[priority] = _Level(priority)
            tenant.levels.push(level, priority)
        bundle = None
        start = self._latest_start(entry, application)
        if start is not None:
            level.urgent.push(entry, (start, entry.sequence))
        else:
            bundle = self._insert_batch(entry, application, level)
        self._spots[entry] = _Spot(tenant, application, level, bundle)
        self._tenants.push(tenant, (tenant.served, tenant.sequence))
        self._aging.add(entry)

    def _insert_batch(self, entry: Entry, application: Application, level: _Level) -> _Bundle:
        calls = level.calls.get(application)
        if calls is None:
            calls = level.calls[application] = _Calls()
            level.applications.push(application, self._finish_tag(application))
        key: str | Entry = entry.groups[0].id if entry.groups else entry
        bundle = calls.by_key.get(key)
        if bundle is None:
            bundle = calls.by_key[key] = _Bundle(key)
        path_s = self._demand.path_s(entry)
        if path_s > bundle.longest_s or not bundle.members:
            bundle.longest_s = max(path_s, bundle.longest_s)
            calls.bundles.push(bundle, (-bundle.longest_s, entry.sequence))
        bundle.members.push(entry, (-path_s, entry.sequence))
        return bundle

    def _take_out(self, entry: Entry) -> None:
        spot = self._spots[entry]
        level, application, tenant = spot.level, spot.application, spot.tenant
        self._aging.remove(entry)
        if spot.bundle is None:
            level.urgent.remove(entry)
        else:
            calls = level.calls[application]
            spot.bundle.members.remove(entry)
            if not spot.bundle.members:
                calls.bundles.remove(spot.bundle)
                del calls.by_key[spot.bundle.key]
            if not calls.by_key:
                level.applications.remove(application)
                del level.calls[application]
        if not level.urgent and not level.calls:
            tenant.levels.remove(level)
            del tenant.by_priority[level.priority]
        if not tenant.levels:
            self._tenants.remove(tenant)

    def remove(self, entry: Entry) -> None:
        """It leaves the queue unplaced."""
        spot = self._leave(entry)
        if spot is not None:
            self._unfinished(spot.application, self._programs[spot.application].paused_at)

    def _leave(self, entry: Entry) -> _Spot | None:
        spot = self._spots.get(entry)
        if spot is None:
            return None
        if spot.is_aside:
            del self._aside[entry]
        else:
            self._take_out(entry)
        del self._spots[entry]
        tenant = spot.tenant
        tenant.num_queued -= 1
        most = self._most.pop(entry)
        tenant.queued_charge = tenant.queued_charge - most if tenant.num_queued else 0.0
        return spot

    def update(self, entry: Entry, application: Application, now: float) -> None:
        """Where it belongs now."""
        spot = self._spots.get(entry)
        if spot is not None and not spot.is_aside:
            self._take_out(entry)
            self._insert(entry, spot.tenant, application)

    def set_aside(self, entry: Entry) -> None:
        """Pass it over until `bring_back`."""
        self._take_out(entry)
        self._spots[entry].is_aside = True
        self._aside[entry] = None

    def bring_back(self, now: float, entries: Iterable[Entry] | None = None) -> None:
        """These are passed over no more; None: nothing is."""
        for entry in list(self._aside) if entries is None else entries:
            del self._aside[entry]
            spot = self._spots[entry]
            self._insert(entry, spot.tenant, spot.application)

    def first(self, now: float) -> Entry | None:
        """The task to place next."""
        due = self._aging.due(now)
        if due is not None:
            return due
        tenant = self._tenants.first()
        level = tenant.levels.first() if tenant is not None else None
        if tenant is None or level is None:
            return None
        if level.urgent and (not level.calls or tenant.num_urgent < BATCH_SHARE - 1):
            return level.urgent.first()
        application = level.applications.first()
        bundle = level.calls[application].bundles.first() if application is not None else None
        return bundle.members.first() if bundle is not None else None

    def pop(self, entry: Entry, application: Application, now: float) -> None:
        """It has been placed: its tenant is charged."""
        self._aging.placed(entry, now)
        spot = self._leave(entry)
        if spot is None:
            return
        tenant = spot.tenant
        self._floor = max(self._floor, tenant.served)
        tenant.num_urgent = tenant.num_urgent + 1 if spot.bundle is None else 0
        charge = charge_of(entry, entry.expected_cached, entry.expected_output)
        self._charged[entry] = charge
        self._charge(tenant, charge)

    # Ends

    def finished(self, entry: Entry, application: Application, now: float) -> None:
        """What it really took is known."""
        self._demand.observe(entry, now)
        charged = self._charged.pop(entry, 0.0)
        real = charge_of(entry, entry.cached_tokens, entry.generated_tokens)
        tenant = self._tenant(application.tenant)
        self._charge(tenant, real - charged)
        work = work_of(entry, entry.generated_tokens)
        self._virtual += work / max(1, self._num_active)
        self._programs[application].done_work += work
        self._unfinished(application, now)
        for level in tenant.by_priority.values():
            if application in level.calls:
                level.applications.push(application, self._finish_tag(application))

    def application_finished(self, application: Application, now: float) -> None:
        """Its whole work teaches what its kind needs."""
        program = self._programs.pop(application, None)
        if program is not None:
            self._demand.ended(application, program.done_work)

    def _unfinished(self, application: Application, now: float) -> None:
        program = self._programs[application]
        program.num_unfinished -= 1
        if program.num_unfinished == 0:
            self._num_active -= 1
            program.paused_at = now

    # Ranks

    def _finish_tag(self, application: Application) -> tuple[float, int]:
        """Virtual time at which the application would end if all shared the engines equally."""
        program = self._programs[application]
        expected = self._demand.work(application)
        if expected is None:
            expected = program.first_work + 2 * program.done_work
        work = max(expected, program.done_work)
        return (program.virtual_start + work, application.sequence)

    def _latest_start(self, entry: Entry, application: Application) -> float | None:
        """When a call has to start to be in time; None: nobody waits for it."""
        kind, seconds = entry.objective
        if kind == "throughput":
            return None
        path_s = self._demand.path_s(entry)
        if kind == "deadline" and entry.deadline is not None:
            return entry.deadline - path_s
        if kind == "ttft" and seconds is not None:
            return entry.submitted_at + seconds
        return self._programs[application].due - path_s

    def _tenant(self, tenant_id: TenantId) -> _Tenant:
        tenant = self._known.get(tenant_id)
        if tenant is None:
            for _ in range(_LOOKS):
                if len(self._known) < self._max_tenants:
                    break
                oldest = next(iter(self._known.values()))
                if oldest.is_waiting:
                    self._known.move_to_end(oldest.id)
                else:
                    del self._known[oldest.id]
            self._count += 1
            tenant = self._known[tenant_id] = _Tenant(tenant_id, self._count, self._floor)
        self._known.move_to_end(tenant_id)
        return tenant

    def _waiting_tenant(self, tenant_id: TenantId) -> _Tenant:
        """A tenant of which something more waits: one that comes back starts from the floor."""
        tenant = self._tenant(tenant_id)
        if not tenant.is_waiting:
            tenant.served = max(tenant.served, self._floor)
        return tenant

    def _charge(self, tenant: _Tenant, amount: float) -> None:
        tenant.served += amount
        if tenant in self._tenants:
            self._tenants.push(tenant, (tenant.served, tenant.sequence))

    def __len__(self) -> int:
        return len(self._spots)

    def shares(self) -> dict[TenantId, float]:
        """Tokens charged to each tenant; one that comes back is lifted to those that wait."""
        return {tenant.id: tenant.served for tenant in self._known.values()}
