"""Events: all that the scheduler knows comes in as one of these.

Events may be late, repeated or out of order, and may name tasks and engines that have gone. The
scheduler ignores and counts events that no longer make sense.

Treat events as immutable. They are not frozen because creating a frozen one takes four times as
long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from parrot_scheduler.task import (
    ApplicationId,
    BlockHash,
    EngineDescription,
    EngineId,
    GroupRef,
    Objective,
    StepModel,
    Task,
    TaskId,
)


@dataclass(slots=True, unsafe_hash=True)
class TaskSubmitted:
    """A task is ready to run: all its inputs are known."""

    task: Task


@dataclass(slots=True, unsafe_hash=True)
class TaskUpdated:
    """A submitted task has changed; None leaves a field unchanged."""

    task_id: TaskId
    objective: Objective | None = None
    groups: tuple[GroupRef, ...] | None = None
    priority: int | None = None
    successors: int | None = None


@dataclass(slots=True, unsafe_hash=True)
class TaskProgress:
    """Progress of a placed task. Counts are totals of the task and never shrink."""

    task_id: TaskId
    #: Prompt tokens with KV, including tokens found in a cache.
    filled_tokens: int
    #: Prompt tokens found in a cache.
    cached_tokens: int
    #: Sum over all its sequences.
    generated_tokens: int


@dataclass(slots=True, unsafe_hash=True)
class TaskFinished:
    """A placed task has ended on its engine, successfully or not."""

    task_id: TaskId
    cached_tokens: int
    generated_tokens: int
    #: False: it failed, and predictions ignore its length.
    succeeded: bool = True


@dataclass(slots=True, unsafe_hash=True)
class TaskCancelled:
    """A waiting or placed task was cancelled; the caller has freed it on its engine."""

    task_id: TaskId


@dataclass(slots=True, unsafe_hash=True)
class ApplicationFinished:
    """The application will make no more calls."""

    application: ApplicationId


@dataclass(slots=True, unsafe_hash=True)
class EngineJoined:
    """An engine accepts work from now on. A second engine with the same id replaces the first."""

    engine: EngineDescription


@dataclass(slots=True, unsafe_hash=True)
class EngineDraining:
    """An engine finishes its work and accepts no more."""

    engine_id: EngineId


@dataclass(slots=True, unsafe_hash=True)
class EngineResumed:
    """A draining engine accepts new work again."""

    engine_id: EngineId


@dataclass(slots=True, unsafe_hash=True)
class EngineLeft:
    """An engine has left. Its tasks end; the caller may submit them again."""

    engine_id: EngineId


@dataclass(slots=True, unsafe_hash=True)
class EngineReport:
    """An engine's load as it reports it; may be stale or invalid."""

    engine_id: EngineId
    running: int
    waiting: int
    #: Tokens of KV in use by contexts, cached-only blocks excluded.
    used_tokens: int
    #: A better step model, if one was measured.
    step_model: StepModel | None = None


@dataclass(slots=True, unsafe_hash=True)
class BlocksStored:
    """Blocks that the engine has cached from now on."""

    engine_id: EngineId
    hashes: tuple[BlockHash, ...]


@dataclass(slots=True, unsafe_hash=True)
class BlocksEvicted:
    """Blocks that the engine no longer caches; `hashes` None means all."""

    engine_id: EngineId
    hashes: tuple[BlockHash, ...] | None


@dataclass(slots=True, unsafe_hash=True)
class Tick:
    """Time has passed."""


Event: TypeAlias = (
    TaskSubmitted
    | TaskUpdated
    | TaskProgress
    | TaskFinished
    | TaskCancelled
    | ApplicationFinished
    | EngineJoined
    | EngineDraining
    | EngineResumed
    | EngineLeft
    | EngineReport
    | BlocksStored
    | BlocksEvicted
    | Tick
)
