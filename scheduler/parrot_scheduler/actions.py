"""Actions: the scheduler's decisions. Its caller carries them out and reports back with events.

Treat them as immutable; `events` explains why they are not frozen.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from parrot_scheduler.task import ApplicationId, EngineId, TaskId

#: The reason for refusing a task.
RejectCode: TypeAlias = Literal[
    "no_engine",  # no engine of the model joined in time
    "queue_full",  # more than `max_queued` tasks wait
    "wait_too_long",  # it waited longer than `max_wait_s`
    "too_large",  # no engine of the model can hold it
    "engine_left",  # the engine it is bound to has left
    "duplicate",  # a live task has the same id
]

#: What an engine does with a task's KV after the task ends: `keep` it longer than other KV (its
#: application will return soon), treat it like any other (`normal`), or evict it first (`drop`).
Retention: TypeAlias = Literal["keep", "normal", "drop"]


class Alternative(NamedTuple):
    """An engine that the task could have been placed on, in its state at placement."""

    engine_id: EngineId
    #: Prompt tokens expected in the engine's cache.
    cached_tokens: int
    #: Sequences placed on the engine.
    batch: int
    #: Expected seconds from placement to the task's end.
    finish_s: float
    #: True if the engine had room for the task.
    has_room: bool


@dataclass(slots=True, unsafe_hash=True)
class Reasons:
    """Explanation of a placement, for traces, the live page and tests."""

    #: Name of the placement policy, and the rule that decided: `prefix`, `group`, `load`, `bound`,
    #: ….
    policy: str
    decided_by: str
    #: Seconds in the scheduler's queue, and the part of them spent held with the application.
    waited_s: float
    held_s: float
    #: Prompt tokens expected in the chosen engine's cache.
    expected_cached_tokens: int
    #: Output tokens that the scheduler expects.
    expected_output_tokens: int
    #: Number of engines compared, and the cost of the chosen one in the policy's own unit.
    candidates: int
    cost: float
    #: Further figures of the policy: numbers or short words.
    details: dict[str, float | int | str] = field(default_factory=dict)
    #: The chosen engine and the best alternatives; only with `SchedulerConfig.explain`.
    alternatives: tuple[Alternative, ...] = ()


@dataclass(slots=True, unsafe_hash=True)
class Place:
    """Run a task on an engine."""

    task_id: TaskId
    engine_id: EngineId
    #: Priority in the engine's own queue: smaller runs earlier.
    priority: int
    retention: Retention
    reasons: Reasons


@dataclass(slots=True, unsafe_hash=True)
class Hold:
    """An application's tasks wait in the admission queue until there is room for them."""

    application: ApplicationId
    #: An application that calls several models is held for each model separately.
    model: str
    reason: str


@dataclass(slots=True, unsafe_hash=True)
class Release:
    """A held application may run."""

    application: ApplicationId
    model: str


@dataclass(slots=True, unsafe_hash=True)
class Reject:
    """A submitted task will not run; the scheduler has forgotten it."""

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
    """Drop the KV that an engine retains for an application; it will not be used again."""

    application: ApplicationId
    engine_id: EngineId


@dataclass(slots=True, unsafe_hash=True)
class WakeAt:
    """Send a `Tick` at this time unless another event comes first; replaces earlier ones."""

    time: float


Action: TypeAlias = Place | Hold | Release | Reject | Cancel | Forget | WakeAt
