"""The four questions of scheduling, and what an answer looks like.

Each is a small class behind one of these protocols; `Scheduler` asks them in this order and does
all bookkeeping. A policy keeps no clock and draws no random numbers of its own: it gets `now`, and
a `random.Random` at construction if it needs one. To try a new idea, write one class and name it
in the folder's `POLICIES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from parrot_scheduler.actions import Retention
from parrot_scheduler.entry import Entry
from parrot_scheduler.task import ApplicationId, TenantId

if TYPE_CHECKING:
    from parrot_scheduler.pool import Pool


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
    #: Engine row where its last task ran; -1 none. May be out of date: see `Pool.row_of`.
    last_engine: str | None = None
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


class AdmissionPolicy(Protocol):
    """1. May an application's tasks enter the queue, or is it held at the door?

    Whole applications are held, never single calls of one that runs. The scheduler asks for the
    next ones whenever tasks end or engines come and go, and admits any application that was held
    longer than `SchedulerConfig.max_hold_s` without asking.
    """

    name: str

    def may_enter(self, application: Application, first: Entry, pool: Pool, now: float) -> bool:
        """Whether a new (or returning, paused) application may run now."""
        ...

    def next_of(self, held: Sequence[Application], pool: Pool, now: float) -> Application | None:
        """Which of the held ones should be tried next; they are in order of arrival."""
        ...


class OrderPolicy(Protocol):
    """2. Which queued task is placed next? One instance for each pool; all calls are O(log n)."""

    name: str

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

    def pop(self, entry: Entry, application: Application, now: float) -> None:
        """`entry`, which `first` gave or a group took along, has been placed."""
        ...

    def finished(self, entry: Entry, application: Application, now: float) -> None:
        """A placed task ended; its counts are final."""
        ...

    def __len__(self) -> int:
        """Queued tasks."""
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
    ) -> Choice | None:
        """A place, or None: it should wait. Tasks that are bound to an engine never get here."""
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
        """Which paused applications' KV is not worth its memory any more; longest idle first."""
        ...
