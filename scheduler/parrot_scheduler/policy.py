"""The four questions of scheduling as base classes, and the types of their answers.

A policy is one small class: it inherits from one of these and overrides what it decides by. It is
named by its import path in `SchedulerConfig`; those of this package have names of their own, in the
`POLICIES` of their kind. `ModelScheduler` calls the policies in the order in which they stand here
and does all bookkeeping; each model has an instance of each. A policy reads no clock and draws no
random numbers of its own: `now` (seconds) is an argument, and `make` gets a seeded `random.Random`.
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

    #: What explanations and logs call it.
    name: str
    #: Fields of `SchedulerConfig` that it runs with when it is named as a whole set-up, besides
    #: itself. Default: all as they are.
    setup: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def make(cls, config: SchedulerConfig, rng: random.Random) -> Self:
        """Return a new one for one model. Default: made without arguments."""
        return cls()


class AdmissionCandidate(NamedTuple):
    """An application that is held, as admission policies see it."""

    application: Application
    #: The first of its tasks.
    first: TaskState
    #: When it was held.
    since: float


class AdmissionRank(NamedTuple):
    """Where a held application stands in the admission queue."""

    #: Tenant whose turn its admission is; "" where the order does not distinguish tenants.
    tenant: TenantId
    #: Within the tenant, smaller is admitted earlier.
    rank: tuple[float, ...]


class AdmissionPolicy(Policy):
    """1. May an application's tasks enter the queue, or is the application held?

    Whole applications are held, never single tasks of a running one. The policy is called again
    whenever tasks end or engines come and go, and admits what was held for longer than
    `SchedulerConfig.max_hold_s` without asking. In which turn held applications are offered is the
    order policy's decision: see `AdmissionQueue`.
    """

    @abstractmethod
    def may_enter(
        self, application: Application, first: TaskState, pool: EnginePool, now: float
    ) -> bool:
        """Return true if a new (or returning, paused) application with this first task may run."""

    def choose(
        self, candidates: Iterable[AdmissionCandidate], pool: EnginePool, now: float
    ) -> Application | None:
        """The held application to admit next; None: wait for more room.

        `candidates` are a few that return to KV retained for them, then a few others, each kind in
        the order of the queue: see `AdmissionQueue.candidates`. Default: the first that may enter.
        """
        for candidate in candidates:
            if self.may_enter(candidate.application, candidate.first, pool, now):
                return candidate.application
        return None

    def entered(self, state: TaskState, application: Application, pool: EnginePool) -> None:
        """A task may be placed from now on (not called for Fills ahead). Default: nothing."""
        return

    def placed(self, state: TaskState, application: Application, pool: EnginePool) -> None:
        """A task that entered has been placed; its engine's columns count it already.

        Default: nothing.
        """
        return

    def ended(self, state: TaskState, application: Application, pool: EnginePool) -> None:
        """A task that entered has ended, placed or not. Default: nothing."""
        return


class OrderPolicy(Policy):
    """2. Which queued task is placed next? All calls are O(log n) in queued tasks.

    Orders that rank tasks or applications by a key inherit from `TaskOrder` or `ApplicationOrder`
    (`order/ranked.py`), which leave one method to write. Fills ahead (`max_tokens` 0) are not
    queued here: they run when nothing else waits. Held applications wait in the same order:
    tenants by `service_of`, those of one tenant by `admission_rank`.
    """

    # Queued tasks

    @abstractmethod
    def push(self, state: TaskState, application: Application, now: float) -> None:
        """A task enters the queue."""

    @abstractmethod
    def remove(self, state: TaskState) -> None:
        """It leaves the queue unplaced (cancelled, refused); unknown tasks do nothing."""

    @abstractmethod
    def update(self, state: TaskState, application: Application, now: float) -> None:
        """Its objective, groups, priority or successors have changed."""

    @abstractmethod
    def first(self, now: float) -> TaskState | None:
        """The task to place next, left in the queue; None when there is none."""

    @abstractmethod
    def block(self, state: TaskState) -> None:
        """There is no room for this queued task at the moment: `first` passes it over.

        It still waits: for fairness its tenant and application count as waiting.
        """

    @abstractmethod
    def unblock(self, now: float, states: Iterable[TaskState] | None = None) -> None:
        """There may be room again: these blocked tasks are back where they were. None: all."""

    @abstractmethod
    def pop(self, state: TaskState, application: Application, now: float) -> None:
        """A queued task has been placed: given by `first`, blocked before, or with its group."""

    @abstractmethod
    def __len__(self) -> int:
        """Queued tasks, blocked ones included."""

    # What happens besides

    def finished(self, state: TaskState, application: Application, now: float) -> None:
        """A placed task has ended; its counts are final. Default: nothing."""
        return

    def application_finished(self, application: Application, now: float) -> None:
        """It has no task left and none will come, or it is forgotten. Default: nothing."""
        return

    # Held applications, and tenants

    @abstractmethod
    def admission_rank(
        self, state: TaskState, application: Application, now: float
    ) -> AdmissionRank:
        """Where an application that is held from now on stands; `state` is its first task."""

    def admitted(self, application: Application) -> None:
        """It is held no more; its tasks are pushed next, if it has any. Default: nothing."""
        return

    def service_of(self, tenant: TenantId) -> float:
        """Service of a tenant with a held application, what its queued tasks will get included.

        Smaller is admitted earlier. Default: all tenants are equal.
        """
        return 0.0

    def service_by_tenant(self) -> dict[TenantId, float]:
        """Service of each tenant so far, in the policy's own measure. Default: none is known."""
        return {}


@dataclass(slots=True)
class EngineChoice:
    """An engine for a task; see `Reasons` for what the fields after `row` are for."""

    row: int
    decided_by: str
    expected_cached_tokens: int
    candidates: int
    cost: float
    details: dict[str, float | int | str] = field(default_factory=dict)
    #: Rows of engines that it was compared with, and prompt tokens that these cache; the best ones
    #: first. For explanations.
    compared: Sequence[tuple[int, float]] = ()


class PlacementPolicy(Policy):
    """3. On which engine does a task run?

    The rows of `pool.table` that `accepts` are the candidates. Loops over them in Python are too
    slow: use `pool.prefixes`, numpy expressions over columns, or both.
    """

    #: Whether tasks wait in the scheduler until an engine has room for them; otherwise they go to
    #: an engine's own queue at once, as with gateways that have no queue.
    late_binding: bool = False

    @abstractmethod
    def place(
        self, state: TaskState, application: Application, pool: EnginePool, now: float
    ) -> EngineChoice | None:
        """An engine. Not called for tasks bound to an engine.

        None: no engine has room; called again when one has more.
        """

    def placed(self, state: TaskState, choice: EngineChoice, pool: EnginePool, now: float) -> None:
        """The task has been placed there. Default: nothing."""
        return

    def ended(self, state: TaskState, pool: EnginePool, now: float) -> None:
        """A task has ended, placed or not: forget what was kept for it. Default: nothing."""
        return


class RetentionPolicy(Policy):
    """4. What does an engine do with a task's KV once the task has ended?"""

    def retention_of(
        self, state: TaskState, application: Application, pool: EnginePool, now: float
    ) -> Retention:
        """Called as a task is placed. Default: `normal`, the engine's own cache decides."""
        return "normal"

    def expired(
        self, applications: Sequence[Application], pool: EnginePool, now: float
    ) -> list[Application]:
        """Paused applications whose retained KV is not worth its memory any more.

        `applications` are those with `retained_tokens`, longest idle first. Default: none.
        """
        return []


AdmissionFactory: TypeAlias = Callable[[SchedulerConfig, random.Random], AdmissionPolicy]
OrderFactory: TypeAlias = Callable[[SchedulerConfig, random.Random], OrderPolicy]
PlacementFactory: TypeAlias = Callable[[SchedulerConfig, random.Random], PlacementPolicy]
RetentionFactory: TypeAlias = Callable[[SchedulerConfig, random.Random], RetentionPolicy]


@dataclass(frozen=True, slots=True)
class Policies:
    """Factories of the four policies of each model."""

    admission: AdmissionFactory
    order: OrderFactory
    placement: PlacementFactory
    retention: RetentionFactory
