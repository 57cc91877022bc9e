"""A task in the scheduler's hands, from its submission to its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from parrot_scheduler.task import EngineId, GroupRef, Objective, Task

#: `held`: its application is at the door; `queued`: it waits for a place; `placed`: it has one.
State: TypeAlias = Literal["held", "queued", "placed"]


@dataclass(slots=True, eq=False)
class Entry:
    """What the scheduler remembers of one task. Compared by identity.

    `objective`, `groups`, `priority` and `successors` begin as the task's own, and change with
    `TaskUpdated`.
    """

    task: Task
    #: Order of submission, over all tasks: breaks every tie.
    sequence: int
    submitted_at: float
    #: Output tokens that are counted with, over all its sequences.
    expected_output: int
    objective: Objective
    groups: tuple[GroupRef, ...]
    priority: int
    successors: int
    state: State = "queued"
    #: Seconds spent held, up to now.
    held_s: float = 0.0
    #: Absolute time by which it should be done; None without such an objective.
    deadline: float | None = None

    # Once placed
    engine_id: EngineId | None = None
    placed_at: float = 0.0
    #: Row of the engine in its pool's table; only valid while placed.
    engine_row: int = -1
    expected_cached: int = 0
    filled_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    #: What this entry adds to the columns of its engine's row, to be taken away again.
    accounted: dict[str, float] = field(default_factory=dict)
