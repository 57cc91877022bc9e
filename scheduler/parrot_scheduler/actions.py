"""Actions: the scheduler's decisions, which its caller carries out and answers with events.

Values, not to be changed; see `events` for why they are not frozen.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from parrot_scheduler.task import ApplicationId, EngineId, TaskId

#: Why a task was refused.
RejectCode: TypeAlias = Literal[
    "no_engine",  # no engine of the model came within the bound
    "queue_full",  # more tasks wait than `max_queued` allows
    "wait_too_long",  # it waited longer than `max_wait_s`
    "too_large",  # no engine of the model can hold it
    "engine_left",  # the engine that it is bound to is gone
    "duplicate",  # a task of this id lives already
]

#: What an engine does with a task's KV once it has ended: `keep` it longer than other KV (its
#: application comes back soon), treat it as any other (`normal`), or evict it first (`drop`).
Retention: TypeAlias = Literal["keep", "normal", "drop"]


class Alternative(NamedTuple):
    """An engine that a task could have been placed on, as it was when the task was placed."""

    engine_id: EngineId
    #: Prompt tokens expected in its cache.
    cached_tokens: int
    #: Sequences placed there.
    batch: int
    #: Seconds that the task was expected to take there, from its placement on.
    finish_s: float
    #: Whether it had room for the task.
    has_room: bool


@dataclass(slots=True, unsafe_hash=True)
class Reasons:
    """Why a task went where it went, and when; for traces, pictures and tests."""

    #: Name of the placement policy, and what decided: `prefix`, `group`, `load`, `bound`, ….
    policy: str
    decided_by: str
    #: Seconds in the scheduler's queue, and of these held with its whole application.
    waited_s: float
    held_s: float
    #: Prompt tokens expected in the chosen engine's cache.
    expected_cached_tokens: int
    #: Output tokens that it counts with.
    expected_output_tokens: int
    #: Engines that were looked at, and the cost of the chosen one in the policy's own measure.
    candidates: int
    cost: float
    #: Further figures of the policy; values are numbers or short words.
    details: dict[str, float | int | str] = field(default_factory=dict)
    #: The chosen engine and the best of the others, with `SchedulerConfig.explain`.
    alternatives: tuple[Alternative, ...] = ()


@dataclass(slots=True, unsafe_hash=True)
class Place:
    """Run a task on an engine."""

    task_id: TaskId
    engine_id: EngineId
    #: For the engine's own queue: smaller runs earlier.
    priority: int
    retention: Retention
    reasons: Reasons


@dataclass(slots=True, unsafe_hash=True)
class Hold:
    """An application's tasks wait in the admission queue until there is room for them."""

    application: ApplicationId
    #: An application with calls to several models is held for each model by itself.
    model: str
    reason: str


@dataclass(slots=True, unsafe_hash=True)
class Release:
    """A held application may run."""

    application: ApplicationId
    model: str


@dataclass(slots=True, unsafe_hash=True)
class Reject:
    """A submitted task will not be run; it is forgotten."""

    task_id: TaskId
    code: RejectCode
    message: str


@dataclass(slots=True, unsafe_hash=True)
class Cancel:
    """Stop a placed task (a Fill ahead that is in the way); the caller reports its end."""

    task_id: TaskId
    reason: str


@dataclass(slots=True, unsafe_hash=True)
class Forget:
    """KV retained on an engine for an application is of no use any more: drop what is its own."""

    application: ApplicationId
    engine_id: EngineId


@dataclass(slots=True, unsafe_hash=True)
class WakeAt:
    """Send a `Tick` at this time, if nothing else happens before; replaces earlier ones."""

    time: float


Action: TypeAlias = Place | Hold | Release | Reject | Cancel | Forget | WakeAt
