"""The default order: fair between tenants, whole applications within one, critical path first.

1. Tenants by service: uncached prompt tokens and twice the output tokens (VTC with DLPM's charge,
   arXiv 2401.00588 and 2501.14312). A task is charged at placement, and
   the charge is corrected at its end. A returning tenant starts no lower than the one served now.
2. Within a tenant by the priority field, smaller first.
3. Within a priority, latency tasks and those with a deadline by their latest start time, and
   all others by application. Three of four placements go to the first kind while
   both wait. A latency task without a bound of its own is due with its application: three times
   the length of its path after the last pause.
4. Applications by fair virtual finish time (Justitia, arXiv 2510.17015): the virtual time of their
   arrival plus their expected total work, which is learned from applications of the same kind and
   covers at least the chain predicted at the first task (`Task.successors`). If neither is
   known, it is the first task's work plus twice the work done so far, so the application falls
   behind as it runs (least attained service).
5. Within an application the longest remaining path first. A task group counts as its longest
   member, and its members follow each other.

Every fourth placement goes to a task that has waited longer than `starvation_s`: see `Aging`.

Bound: between two tenants with waiting tasks that always find room, charges since both began to
wait differ by at most one task's largest charge, plus the prediction error of tasks in flight, plus
placements by age.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass
from typing import Self

from parrot_scheduler.config import SchedulerConfig
from parrot_scheduler.lazy_heap import HeapItem, ItemHeap
from parrot_scheduler.order.demand import DemandPredictor, work_of
from parrot_scheduler.order.ranked import Aging, RankedOrder
from parrot_scheduler.policy import AdmissionRank
from parrot_scheduler.task import TenantId
from parrot_scheduler.task_state import Application, TaskState

#: Charge of an output token, in uncached prompt tokens.
OUTPUT_WEIGHT = 2.0
#: While both kinds wait, one of this many placements goes to a throughput task.
BATCH_SHARE = 4
#: A latency task without a bound should end within this many times its path's length.
_STRETCH = 3.0
#: An application without tasks for longer than this has paused: a user thinks, or a tool runs.
_PAUSE_S = 1.0
#: Tenants examined in search of one to forget; waiting tenants are kept even beyond the limit.
_LOOKS = 8
#: Larger priorities, in either direction, are clamped to this.
_MAX_PRIORITY = 100


def charge_of(state: TaskState, cached: float, output: float) -> float:
    """Return a task's charge to its tenant, in uncached prompt tokens."""
    return max(0.0, state.task.prompt_tokens - cached) + OUTPUT_WEIGHT * output


def _foretold_work(state: TaskState) -> float:
    """Return the work of a task and its predicted successors; 0 if none are predicted."""
    if not state.successors:
        return 0.0
    return (1 + state.successors) * work_of(state, state.expected_output)


def _priority_of(state: TaskState) -> int:
    return max(-_MAX_PRIORITY, min(state.priority, _MAX_PRIORITY))


class _QueuedTask(HeapItem):
    """A queued task. A blocked one is in none of the queues."""

    __slots__ = ("group", "most", "queue", "state", "tasks", "tenant")

    def __init__(self, state: TaskState, tenant: _Tenant, most: float) -> None:
        super().__init__()
        self.state = state
        self.tenant = tenant
        #: Its charge if nothing is cached.
        self.most = most
        #: The queues it is in: its tenant's queue of its priority (None while blocked), its
        #: application's queue (None for urgent tasks) and its group's queue (None without a group).
        self.queue: _PriorityQueue | None = None
        self.tasks: _ApplicationQueue | None = None
        self.group: _GroupQueue | None = None


class _GroupQueue(ItemHeap[_QueuedTask]):
    """Queued members of a task group, longest path first."""

    __slots__ = ("longest_s", "name")

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        #: Seconds of the longest member's path.
        self.longest_s = 0.0


class _ApplicationQueue(ItemHeap[HeapItem]):
    """An application's queued throughput tasks of one priority: groups, and single tasks."""

    __slots__ = ("by_group",)

    def __init__(self) -> None:
        super().__init__()
        #: None until a task with a group comes.
        self.by_group: dict[str, _GroupQueue] | None = None


class _PriorityQueue:
    """A tenant's queued tasks of one priority."""

    __slots__ = ("applications", "by_application", "priority", "urgent")

    def __init__(self, priority: int) -> None:
        self.priority = priority
        #: Latency tasks and those with a deadline, by latest start.
        self.urgent: ItemHeap[_QueuedTask] = ItemHeap()
        self.applications: ItemHeap[_ApplicationQueue] = ItemHeap()
        self.by_application: dict[Application, _ApplicationQueue] = {}


class _Tenant(HeapItem):
    __slots__ = (
        "by_priority", "id", "num_held", "num_queued", "num_urgent", "queued_charge", "sequence",
        "served",
    )  # fmt: skip

    def __init__(self, tenant_id: TenantId, sequence: int, served: float) -> None:
        super().__init__()
        self.id = tenant_id
        self.sequence = sequence
        #: Charges so far; raised when the tenant returns.
        self.served = served
        #: Queued tasks, blocked ones included, and their largest possible charge.
        self.num_queued = 0
        self.queued_charge = 0.0
        #: Held applications.
        self.num_held = 0
        self.by_priority: dict[int, _PriorityQueue] = {}
        #: Placements of urgent tasks since the last one of another task.
        self.num_urgent = 0


@dataclass(slots=True)
class _ApplicationRecord:
    """Order's state of an application between its tasks; work is in KV-token-steps."""

    virtual_start: float
    first_work: float
    #: Expected work of the chain predicted at the first task; 0 if none was.
    foretold_work: float
    #: Time by which its tasks since its last pause should all have ended.
    due: float
    done_work: float = 0.0
    num_unfinished: int = 0
    paused_at: float = 0.0


class Fair(RankedOrder):
    """The default order: see the module's docstring.

    Args:
        config: `starvation_s` (wait in seconds before a task is placed by age), `max_tenants` and
            `max_templates` (limits on remembered items).
    """

    name = "fair"

    @classmethod
    def make(cls, config: SchedulerConfig, rng: random.Random) -> Self:
        """Return a new one for one model."""
        return cls(config)

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(Aging(config.starvation_s))
        self._tenants: ItemHeap[_Tenant] = ItemHeap()
        self._known: OrderedDict[TenantId, _Tenant] = OrderedDict()
        self._max_tenants = config.max_tenants
        self._count = 0
        #: Service of the tenant served now: a returning tenant starts no lower.
        self._floor = 0.0
        self._queued: dict[TaskState, _QueuedTask] = {}
        #: Charges of placed tasks.
        self._charged: dict[TaskState, float] = {}
        self._records: dict[Application, _ApplicationRecord] = {}
        self._num_active = 0
        # Virtual time: work done, divided equally between the applications active meanwhile.
        self._virtual = 0.0
        self._demand = DemandPredictor(config.max_templates)

    def admission_rank(
        self, state: TaskState, application: Application, now: float
    ) -> AdmissionRank:
        """Rank by priority, then by virtual finish time: the least remaining work goes first.

        Latency tasks get no exception here: a task is short beside an application, so a tenant's
        chats would shut out its other work.
        """
        tenant = self._waiting_tenant(application.tenant)
        tenant.num_held += 1
        record = self._records.get(application)
        if record is None:
            work = max(
                self._demand.work(application) or work_of(state, state.expected_output),
                _foretold_work(state),
            )
            finish = self._virtual + work
        else:
            finish = self._finish_tag(application)[0]
        return AdmissionRank(tenant.id, (_priority_of(state), finish, application.sequence))

    def admitted(self, application: Application) -> None:
        self._known[application.tenant].num_held -= 1

    def service_of(self, tenant: TenantId) -> float:
        """Return the tenant's charges, including queued tasks, so an admitted application counts at
        once.
        """
        known = self._known[tenant]
        return known.served + known.queued_charge

    def push(self, state: TaskState, application: Application, now: float) -> None:
        record = self._records.get(application)
        path_s = self._demand.path_s(state)
        if record is None:
            first_work = work_of(state, state.expected_output)
            record = _ApplicationRecord(
                self._virtual, first_work, _foretold_work(state), now + _STRETCH * path_s
            )
            self._records[application] = record
        if record.num_unfinished == 0:
            self._num_active += 1
            if now - record.paused_at > _PAUSE_S:
                record.due = now + _STRETCH * path_s
        record.due = max(record.due, now + path_s)
        record.num_unfinished += 1
        tenant = self._waiting_tenant(application.tenant)
        tenant.num_queued += 1
        most = charge_of(state, 0.0, state.expected_output)
        tenant.queued_charge += most
        self._queued[state] = _QueuedTask(state, tenant, most)
        super().push(state, application, now)

    def _insert(self, state: TaskState, application: Application) -> None:
        queued = self._queued[state]
        if queued.queue is not None:
            self._take_out(state, application)
        tenant, priority = queued.tenant, _priority_of(state)
        queue = tenant.by_priority.get(priority)
        if queue is None:
            queue = tenant.by_priority[priority] = _PriorityQueue(priority)
        queued.queue = queue
        if state.objective.kind == "throughput":
            self._insert_by_application(queued, application, queue)
        else:
            queue.urgent.push(queued, (self._latest_start(state, application), state.sequence))
        self._tenants.push(tenant, (tenant.served, tenant.sequence))

    def _insert_by_application(
        self, queued: _QueuedTask, application: Application, queue: _PriorityQueue
    ) -> None:
        state, tasks = queued.state, queue.by_application.get(application)
        if tasks is None:
            tasks = queue.by_application[application] = _ApplicationQueue()
            queue.applications.push(tasks, self._finish_tag(application))
        queued.tasks = tasks
        path_s = self._demand.path_s(state)
        if not state.groups:
            tasks.push(queued, (-path_s, state.sequence))
            return
        name = state.groups[0].id
        by_group = tasks.by_group
        if by_group is None:
            by_group = tasks.by_group = {}
        group = by_group.get(name)
        if group is None:
            group = by_group[name] = _GroupQueue(name)
        queued.group = group
        if path_s > group.longest_s or not group:
            group.longest_s = max(path_s, group.longest_s)
            tasks.push(group, (-group.longest_s, state.sequence))
        group.push(queued, (-path_s, state.sequence))

    def _take_out(self, state: TaskState, application: Application) -> None:
        queued = self._queued[state]
        tenant, queue, tasks, group = queued.tenant, queued.queue, queued.tasks, queued.group
        assert queue is not None, f"task {state.task.id} is blocked"
        queued.queue = queued.tasks = queued.group = None
        if tasks is None:
            queue.urgent.remove(queued)
        else:
            if group is None:
                tasks.remove(queued)
            else:
                group.remove(queued)
                if not group and tasks.by_group is not None:
                    tasks.remove(group)
                    del tasks.by_group[group.name]
            if not tasks:
                queue.applications.remove(tasks)
                del queue.by_application[application]
        if not queue.urgent and not queue.by_application:
            del tenant.by_priority[queue.priority]
            if not tenant.by_priority:
                self._tenants.remove(tenant)

    def remove(self, state: TaskState) -> None:
        application = self._leave(state)
        if application is not None:
            self._unfinished(self._records[application], None)

    def _leave(self, state: TaskState) -> Application | None:
        application = super()._leave(state)
        if application is not None:
            queued = self._queued.pop(state)
            tenant = queued.tenant
            tenant.num_queued -= 1
            charge = tenant.queued_charge - queued.most
            tenant.queued_charge = charge if tenant.num_queued else 0.0
        return application

    def _lowest(self) -> TaskState | None:
        tenant = self._tenants.first()
        if tenant is None:
            return None
        queue = tenant.by_priority[min(tenant.by_priority)]
        first: HeapItem | None
        if queue.urgent and (not queue.by_application or tenant.num_urgent < BATCH_SHARE - 1):
            first = queue.urgent.first()
        else:
            tasks = queue.applications.first()
            first = tasks.first() if tasks is not None else None
            if isinstance(first, _GroupQueue):
                first = first.first()
        return first.state if isinstance(first, _QueuedTask) else None

    def pop(self, state: TaskState, application: Application, now: float) -> None:
        """Charge the tenant of a task that has been placed."""
        self._aging.placed(state, now)
        if self._leave(state) is None:
            return
        tenant = self._known[application.tenant]
        if tenant.served > self._floor:
            self._floor = tenant.served
        is_urgent = state.objective.kind != "throughput"
        tenant.num_urgent = tenant.num_urgent + 1 if is_urgent else 0
        charge = charge_of(state, state.expected_cached, state.expected_output)
        self._charged[state] = charge
        self._charge(tenant, charge)

    def finished(self, state: TaskState, application: Application, now: float) -> None:
        """Correct the charge of an ended task by its actual cost."""
        self._rank_alone()
        self._demand.observe(state, now)
        charged = self._charged.pop(state, 0.0)
        real = charge_of(state, state.cached_tokens, state.generated_tokens)
        tenant = self._tenant(application.tenant)
        self._charge(tenant, real - charged)
        work = work_of(state, state.generated_tokens)
        self._virtual += work / max(1, self._num_active)
        record = self._records[application]
        record.done_work += work
        self._unfinished(record, now)
        if record.num_unfinished:
            for queue in tenant.by_priority.values():
                tasks = queue.by_application.get(application)
                if tasks is not None:
                    queue.applications.push(tasks, self._finish_tag(application))

    def application_finished(self, application: Application, now: float) -> None:
        """Learn the total work of an application's kind."""
        record = self._records.pop(application, None)
        if record is not None:
            self._demand.ended(application, record.done_work)

    def _unfinished(self, record: _ApplicationRecord, now: float | None) -> None:
        """Note that a task of the application has ended at `now`; None if it was never placed."""
        record.num_unfinished -= 1
        if record.num_unfinished == 0:
            self._num_active -= 1
            if now is not None:
                record.paused_at = now

    def _finish_tag(self, application: Application) -> tuple[float, int]:
        """Return the virtual time at which the application would end if all shared the engines
        equally.
        """
        record = self._records[application]
        expected = self._demand.work(application)
        if expected is None and not record.foretold_work:
            expected = record.first_work + 2 * record.done_work
        work = max(expected or 0.0, record.foretold_work, record.done_work)
        return (record.virtual_start + work, application.sequence)

    def _latest_start(self, state: TaskState, application: Application) -> float:
        """Return the latest time at which a task with a latency goal must start."""
        kind, seconds = state.objective
        if kind == "ttft" and seconds is not None:
            return state.submitted_at + seconds
        due = state.deadline if kind == "deadline" else None
        if due is None:
            due = self._records[application].due
        return due - self._demand.path_s(state)

    def _tenant(self, tenant_id: TenantId) -> _Tenant:
        tenant = self._known.get(tenant_id)
        if tenant is None:
            for _ in range(_LOOKS):
                if len(self._known) < self._max_tenants:
                    break
                oldest = next(iter(self._known.values()))
                if oldest.num_queued + oldest.num_held:
                    self._known.move_to_end(oldest.id)
                else:
                    del self._known[oldest.id]
            self._count += 1
            tenant = self._known[tenant_id] = _Tenant(tenant_id, self._count, self._floor)
        self._known.move_to_end(tenant_id)
        return tenant

    def _waiting_tenant(self, tenant_id: TenantId) -> _Tenant:
        """Return a tenant that is about to wait; a returning one starts from the floor."""
        tenant = self._tenant(tenant_id)
        if not tenant.num_queued + tenant.num_held:
            tenant.served = max(tenant.served, self._floor)
        return tenant

    def _charge(self, tenant: _Tenant, amount: float) -> None:
        tenant.served += amount
        if tenant.place is not None:
            self._tenants.push(tenant, (tenant.served, tenant.sequence))

    def service_by_tenant(self) -> dict[TenantId, float]:
        """Return each tenant's charges; a returning tenant is raised to the waiting ones' level."""
        return {tenant.id: tenant.served for tenant in self._known.values()}
