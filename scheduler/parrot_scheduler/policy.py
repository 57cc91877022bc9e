"""The four questions of scheduling, and what an answer looks like.

Each is a small class behind one of these protocols; `Scheduler` asks them in this order and does
all bookkeeping. A policy keeps no clock and draws no random numbers of its own: it gets `now`, and
a `random.Random` at construction if it needs one. To try a new idea, write one class and name it
in the folder's `POLICIES`: a dict from names to factories `(SchedulerConfig, random.Random) -> the
policy`. There is one instance of each policy for each pool.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from parrot_scheduler.actions import Retention
from parrot_scheduler.config import SchedulerConfig
from parrot_scheduler.task import ApplicationId, EngineId, TenantId
from parrot_scheduler.task_state import Entry

if TYPE_CHECKING:
    from parrot_scheduler.engines.pool import Pool


@dataclass(slots=True, eq=False)
class Application:
    """What the scheduler knows of one application on one pool. Compared by identity."""

    id: ApplicationId
    tenant: TenantId
    arrived_at: float
    #: Unfinished tasks by state.
    num_held: int = 0
    num_queued: int = 0
    num_placed: int = 0
    #: Work done so far: uncached prompt tokens and generated tokens, and the KV-token-steps of
    #: finished tasks (`p x d + d^2 / 2`, Justitia, arXiv 2510.17015).
    served_tokens: float = 0.0
    served_kv_steps: float = 0.0
    #: Largest context of its tasks so far, in tokens: what comes back when it comes back.
    context_tokens: int = 0
    #: When its last task ended; None while one is unfinished.
    idle_since: float | None = None
    admitted: bool = False
    #: The caller said that no more of its tasks will come.
    has_finished: bool = False
    #: Order of arrival on its pool: breaks every tie.
    sequence: int = 0
    #: Engine where its last task ran. It may be gone: see `Pool.row_of`.
    last_engine: EngineId | None = None
    #: Tokens of KV that it left on `last_engine` when it paused, to be kept there; part of the
    #: column `kept`.
    kept_tokens: float = 0.0
    #: Tasks that it had in all.
    num_tasks: int = 0
    templates: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Choice:
    """A place for a task; see `Reasons` for what the fields are for."""

    row: int
    decided_by: str
    expected_cached_tokens: int
    candidates: int
    cost: float
    details: dict[str, float | int | str] = field(default_factory=dict)


class Wait(NamedTuple):
    """An engine has room for the task, but another one is worth waiting for."""

    #: Room on any of these (bit r for row r) is what it waits for.
    rows: int
    #: It waits no longer than this.
    until: float
    #: Room elsewhere is good enough where the predicted end of the task plus the prefill that it
    #: takes from others comes to no more than this.
    toll_s: float
    #: For that prediction: prompt tokens to compute there, all its tokens, and its decode steps.
    new_tokens: float
    tokens: float
    steps: float


class Waiting(NamedTuple):
    """An application at the door."""

    application: Application
    #: The first of its tasks.
    first: Entry
    #: When it came to the door.
    since: float


class HeldRank(NamedTuple):
    """Where an application stands at the door, smaller first."""

    #: Whose turn it counts for: its tenant, or "" where the order does not tell tenants apart.
    tenant: TenantId
    rank: tuple[float, ...]


class AdmissionPolicy(Protocol):
    """1. May an application's tasks enter the queue, or is it held at the door?

    Whole applications are held, never single calls of one that runs. The scheduler asks for the
    next ones whenever tasks end or engines come and go, and admits any application that was held
    longer than `SchedulerConfig.max_hold_s` without asking. In which turn they are asked for is
    the order policy's: see `Door`.
    """

    name: str

    def may_enter(self, application: Application, first: Entry, pool: Pool, now: float) -> bool:
        """Whether a new (or returning, paused) application may run now."""
        ...

    def next_of(self, held: Iterable[Waiting], pool: Pool, now: float) -> Application | None:
        """Which of the held ones enters next; None: wait until there is more room.

        `held` are a few of those that return, then a few new ones, each kind in the order of the
        queue that they would join: see `Door.shown`.
        """
        ...

    def entered(self, entry: Entry, application: Application, pool: Pool) -> None:
        """A task may be placed from now on (Fills done ahead are not told of)."""
        ...

    def placed(self, entry: Entry, application: Application, pool: Pool) -> None:
        """A task that entered has been placed; the columns of its engine count it already."""
        ...

    def ended(self, entry: Entry, application: Application, pool: Pool) -> None:
        """A task that entered has ended, placed or not."""
        ...


class OrderPolicy(Protocol):
    """2. Which queued task is placed next? All calls are O(log n) in queued tasks.

    Fills done ahead (`max_tokens` 0) never get here: they run when nothing else wants to.
    Applications at the door are not queued yet, but stand there in the same order: tenants by
    `share_of`, those of one tenant by the rank that `held` gave.
    """

    name: str

    def held(self, entry: Entry, application: Application, now: float) -> HeldRank:
        """An application stops at the door; `entry` is its first task. Its tenant waits."""
        ...

    def let_in(self, application: Application) -> None:
        """It is at the door no more; its tasks are pushed next, if it has any."""
        ...

    def share_of(self, tenant: TenantId) -> float:
        """What a tenant with something held was served, and will be by what is queued already."""
        ...

    def push(self, entry: Entry, application: Application, now: float) -> None:
        """A task enters the queue."""
        ...

    def remove(self, entry: Entry) -> None:
        """It leaves the queue unplaced (cancelled, refused); unknown entries do nothing."""
        ...

    def update(self, entry: Entry, application: Application, now: float) -> None:
        """Its objective, groups, priority or successors have changed."""
        ...

    def first(self, now: float) -> Entry | None:
        """The task to place next, left in the queue; None when there is none."""
        ...

    def set_aside(self, entry: Entry) -> None:
        """There is no room for this queued task at the moment: `first` passes it over.

        It still waits: for fairness its tenant and application count as waiting.
        """
        ...

    def bring_back(self, now: float, entries: Iterable[Entry] | None = None) -> None:
        """There may be room again: these, which were set aside, are back where they were.

        None: everything is.
        """
        ...

    def pop(self, entry: Entry, application: Application, now: float) -> None:
        """`entry` has been placed: `first` gave it, now or before it was set aside, or a group
        took it along.
        """
        ...

    def finished(self, entry: Entry, application: Application, now: float) -> None:
        """A placed task ended; its counts are final."""
        ...

    def application_finished(self, application: Application, now: float) -> None:
        """It has no task left and none will come; or it is forgotten."""
        ...

    def __len__(self) -> int:
        """Queued tasks, those set aside included."""
        ...

    def shares(self) -> dict[TenantId, float]:
        """What each tenant that is remembered has had so far, in the policy's own measure."""
        ...


class PlacePolicy(Protocol):
    """3. On which engine? One instance for each pool.

    The rows of `pool.table` that `accepts` are the candidates. Never loop over them in Python:
    take candidates from `pool.prefixes`, numpy expressions over columns, or both.
    """

    name: str
    #: Whether tasks wait in the scheduler until an engine has room for them (True), or are pushed
    #: to an engine's own queue at once, as gateways without a queue do.
    late_binding: bool

    def place(
        self, entry: Entry, application: Application, pool: Pool, now: float
    ) -> Choice | Wait | None:
        """A place, or what to wait for. Tasks that are bound to an engine never get here.

        None: it is asked again when an engine has more room, and could hold the task.
        """
        ...

    def placed(self, entry: Entry, choice: Choice, pool: Pool, now: float) -> None:
        """The task has been placed there."""
        ...

    def ended(self, entry: Entry, pool: Pool, now: float) -> None:
        """A task ended, placed or not; forget what was remembered for it."""
        ...


class KeepPolicy(Protocol):
    """4. What should an engine do with a task's KV once the task has ended?"""

    name: str

    def retention(
        self, entry: Entry, application: Application, pool: Pool, now: float
    ) -> Retention:
        """Asked as a task is placed."""
        ...

    def expired(
        self, applications: Sequence[Application], pool: Pool, now: float
    ) -> list[Application]:
        """Which paused applications' KV is not worth its memory any more.

        `applications` are those with `kept_tokens`, longest idle first.
        """
        ...


AdmissionFactory: TypeAlias = Callable[[SchedulerConfig, random.Random], AdmissionPolicy]
OrderFactory: TypeAlias = Callable[[SchedulerConfig, random.Random], OrderPolicy]
PlaceFactory: TypeAlias = Callable[[SchedulerConfig, random.Random], PlacePolicy]
KeepFactory: TypeAlias = Callable[[SchedulerConfig, random.Random], KeepPolicy]


@dataclass(frozen=True, slots=True)
class Policies:
    """How to make the four policies of a pool."""

    admission: AdmissionFactory
    order: OrderFactory
    place: PlaceFactory
    keep: KeepFactory
