"""Events: everything that the scheduler knows comes in as one of these.

Events may be late, repeated or out of order, and may name tasks and engines that are gone: the
scheduler ignores what makes no sense any more, and counts it.

Values, not to be changed once they are made. They are not frozen, because a frozen one takes four
times as long to make.
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
    """A submitted task has changed; None leaves a field as it is."""

    task_id: TaskId
    objective: Objective | None = None
    groups: tuple[GroupRef, ...] | None = None
    priority: int | None = None
    successors: int | None = None


@dataclass(slots=True, unsafe_hash=True)
class TaskProgress:
    """A placed task got on. Counts are totals of the task, and only grow."""

    task_id: TaskId
    #: Prompt tokens with KV, those found in a cache included.
    filled_tokens: int
    #: Prompt tokens that were found in a cache.
    cached_tokens: int
    #: Over all its sequences.
    generated_tokens: int


@dataclass(slots=True, unsafe_hash=True)
class TaskFinished:
    """A placed task ended on its engine, successfully or not."""

    task_id: TaskId
    cached_tokens: int
    generated_tokens: int
    #: False: it failed, and its length is not used for predictions.
    succeeded: bool = True


@dataclass(slots=True, unsafe_hash=True)
class TaskCancelled:
    """A task is cancelled, waiting or placed; the caller has freed it on its engine."""

    task_id: TaskId


@dataclass(slots=True, unsafe_hash=True)
class ApplicationFinished:
    """No call of this application will come any more."""

    application: ApplicationId


@dataclass(slots=True, unsafe_hash=True)
class EngineJoined:
    """An engine takes work from now on. A second one of the same id replaces the first."""

    engine: EngineDescription


@dataclass(slots=True, unsafe_hash=True)
class EngineDraining:
    """An engine finishes what it has and takes nothing new."""

    engine_id: EngineId


@dataclass(slots=True, unsafe_hash=True)
class EngineResumed:
    """An engine that was draining takes new work again."""

    engine_id: EngineId


@dataclass(slots=True, unsafe_hash=True)
class EngineLeft:
    """An engine is gone. Tasks placed there end: the caller submits them again if it will."""

    engine_id: EngineId


@dataclass(slots=True, unsafe_hash=True)
class EngineReport:
    """An engine's load by its own account; may be stale, or nonsense."""

    engine_id: EngineId
    running: int
    waiting: int
    #: Tokens of KV in use by contexts that are not mere cache.
    used_tokens: int
    #: A better model of its steps, where one was measured.
    step_model: StepModel | None = None


@dataclass(slots=True, unsafe_hash=True)
class BlocksStored:
    """Blocks that the engine can find again from now on."""

    engine_id: EngineId
    hashes: tuple[BlockHash, ...]


@dataclass(slots=True, unsafe_hash=True)
class BlocksEvicted:
    """Blocks that it cannot find any more; `hashes` None stands for all."""

    engine_id: EngineId
    hashes: tuple[BlockHash, ...] | None


@dataclass(slots=True, unsafe_hash=True)
class Tick:
    """Time has passed; nothing else."""


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
