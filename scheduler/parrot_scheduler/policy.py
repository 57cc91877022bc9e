"""The four questions of scheduling as base classes, and the types of their answers.

A policy is one small class that inherits from one of these and overrides the methods it decides
with. `SchedulerConfig` names it by its import path; those of this package have short names, in the
`POLICIES` of their kind. `ModelScheduler` calls the policies in the order in which they stand here
and does all bookkeeping; each model has its own instances. A policy reads no clock and no random
numbers of its own: `now` (seconds) is an argument, and `make` gets a seeded `random.Random`.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias

from parrot_scheduler.actions import Retention
from parrot_scheduler.config import SchedulerConfig
from parrot_scheduler.engines.pool import EnginePool
from parrot_scheduler.task import TenantId
from parrot_scheduler.task_state import Application, TaskState


class Policy(ABC):
    """Base of the four kinds of policies."""

    #: Its name in explanations and logs.
    name: str
    #: Other `SchedulerConfig` fields that it sets when it is named as a whole policy. Default:
    #: none.
    setup: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def make(cls, config: SchedulerConfig, rng: random.Random) -> Self:
        """Return a new one for one model. Default: call the class without arguments."""
        return cls()


class AdmissionCandidate(NamedTuple):
    """A held application, as admission policies see it."""

    application: Application
    #: Its first task.
    first: TaskState
    #: When it was held.
    since: float


class AdmissionRank(NamedTuple):
    """Position of a held application in the admission queue."""

    #: Tenant charged for the admission; "" if the order does not distinguish tenants.
    tenant: TenantId
    #: Rank within the tenant: smaller is admitted earlier.
    rank: tuple[float, ...]


class AdmissionPolicy(Policy):
    """1. May an application's tasks enter the queue, or is the application held?

    Whole applications are held, never single tasks of a running one. The policy is called again
    whenever tasks end or engines come and go. An application held for longer than
    `SchedulerConfig.max_hold_s` is admitted without a call. The order policy decides the turn of
    held applications: see `AdmissionQueue`.
    """

    @abstractmethod
    def may_enter(
        self, application: Application, first: TaskState, pool: EnginePool, now: float
    ) -> bool:
        """Return true if a new (or returning, paused) application with this first task may run."""

    def choose(
        self, candidates: Iterable[AdmissionCandidate], pool: EnginePool, now: float
    ) -> Application | None:
        """Return the held application to admit next; None waits for more room.

        `candidates` are a few applications with retained KV, then a few others, each kind in queue
        order: see `AdmissionQueue.candidates`. Default: the first that may enter.
        """
        for candidate in candidates:
            if self.may_enter(candidate.application, candidate.first, pool, now):
                return candidate.application
        return None

    def entered(self, state: TaskState, application: Application, pool: EnginePool) -> None:
        """Note that a task may be placed from now on (not called for Fills ahead). Default:
        nothing.
        """
        return

    def placed(self, state: TaskState, application: Application, pool: EnginePool) -> None:
        """Note that an entered task has been placed; its engine's columns count it already.

        Default: nothing.
        """
        return

    def ended(self, state: TaskState, application: Application, pool: EnginePool) -> None:
        """Note that an entered task has ended, placed or not. Default: nothing."""
        return


class OrderPolicy(Policy):
    """2. Which queued task is placed next? All calls are O(log n) in queued tasks.

    Orders that rank tasks or applications by a key inherit from `TaskOrder` or `ApplicationOrder`
    (`order/ranked.py`) and write one method. Fills ahead (`max_tokens` 0) are not queued here: they
    run when nothing else waits. Held applications wait in the same order: tenants by `service_of`,
    those of one tenant by `admission_rank`.
    """

    @abstractmethod
    def push(self, state: TaskState, application: Application, now: float) -> None:
        """Add a task to the queue."""

    @abstractmethod
    def remove(self, state: TaskState) -> None:
        """Remove an unplaced task (cancelled or refused); unknown tasks are ignored."""

    @abstractmethod
    def update(self, state: TaskState, application: Application, now: float) -> None:
        """Apply a change of the task's objective, groups, priority or successors."""

    @abstractmethod
    def first(self, now: float) -> TaskState | None:
        """Return the task to place next without removing it; None if there is none."""

    @abstractmethod
    def block(self, state: TaskState) -> None:
        """Pass over a queued task in `first`, because there is no room for it now.

        It still waits: for fairness its tenant and application count as waiting.
        """

    @abstractmethod
    def unblock(self, now: float, states: Iterable[TaskState] | None = None) -> None:
        """Restore these blocked tasks to their positions, as there may be room; None means all."""

    @abstractmethod
    def pop(self, state: TaskState, application: Application, now: float) -> None:
        """Remove a queued task that has been placed: from `first`, blocked before, or with its
        group.
        """

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of queued tasks, blocked ones included."""

    def finished(self, state: TaskState, application: Application, now: float) -> None:
        """Note that a placed task has ended; its counts are final. Default: nothing."""
        return

    def application_finished(self, application: Application, now: float) -> None:
        """Note that an application has finished or is forgotten. Default: nothing."""
        return

    @abstractmethod
    def admission_rank(
        self, state: TaskState, application: Application, now: float
    ) -> AdmissionRank:
        """Return the position of an application held from now on; `state` is its first task."""

    def admitted(self, application: Application) -> None:
        """Note that an application is no longer held; its tasks, if any, are pushed next. Default:
        nothing.
        """
        return

    def service_of(self, tenant: TenantId) -> float:
        """Return the service of a tenant with held applications, including its queued tasks.

        Smaller is admitted earlier. Default: all tenants are equal.
        """
        return 0.0

    def service_by_tenant(self) -> dict[TenantId, float]:
        """Return each tenant's service so far, in the policy's own unit. Default: unknown."""
        return {}


@dataclass(slots=True)
class EngineChoice:
    """An engine for a task; `Reasons` explains the fields after `row`."""

    row: int
    decided_by: str
    expected_cached_tokens: int
    candidates: int
    cost: float
    details: dict[str, float | int | str] = field(default_factory=dict)
    #: Rows it was compared with and the prompt tokens that they cache, best first. For
    #: explanations.
    compared: Sequence[tuple[int, float]] = ()


class PlacementPolicy(Policy):
    """3. On which engine does a task run?

    The candidates are the rows of `pool.table` that `accepts` marks. Python loops over them are too
    slow: use `pool.prefixes`, numpy expressions over columns, or both.
    """

    #: True: tasks wait in the scheduler until an engine has room. False: they go to an engine's own
    #: queue at once, as in gateways without a queue.
    late_binding: bool = False

    @abstractmethod
    def place(
        self, state: TaskState, application: Application, pool: EnginePool, now: float
    ) -> EngineChoice | None:
        """Choose an engine for a task. Not called for tasks bound to an engine.

        None: no engine has room; the policy is called again when there is more.
        """

    def placed(self, state: TaskState, choice: EngineChoice, pool: EnginePool, now: float) -> None:
        """Note that the task has been placed. Default: nothing."""
        return

    def ended(self, state: TaskState, pool: EnginePool, now: float) -> None:
        """Forget the state of an ended task, placed or not. Default: nothing."""
        return


class RetentionPolicy(Policy):
    """4. What does an engine do with a task's KV after the task ends?"""

    def retention_of(
        self, state: TaskState, application: Application, pool: EnginePool, now: float
    ) -> Retention:
        """Return a placed task's retention. Default: `normal`, the engine's cache decides."""
        return "normal"

    def expired(
        self, applications: Sequence[Application], pool: EnginePool, now: float
    ) -> list[Application]:
        """Return paused applications whose retained KV is no longer worth its memory.

        `applications` are those with `retained_tokens`, longest idle first. Default: none.
        """
        return []


AdmissionFactory: TypeAlias = Callable[[SchedulerConfig, random.Random], AdmissionPolicy]
OrderFactory: TypeAlias = Callable[[SchedulerConfig, random.Random], OrderPolicy]
PlacementFactory: TypeAlias = Callable[[SchedulerConfig, random.Random], PlacementPolicy]
RetentionFactory: TypeAlias = Callable[[SchedulerConfig, random.Random], RetentionPolicy]


@dataclass(frozen=True, slots=True)
class Policies:
    """Factories of a model's four policies."""

    admission: AdmissionFactory
    order: OrderFactory
    placement: PlacementFactory
    retention: RetentionFactory
