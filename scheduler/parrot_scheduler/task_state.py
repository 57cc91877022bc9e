"""A task in the scheduler's hands, from its submission to its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from parrot_scheduler.engines.prefix_index import Claim
from parrot_scheduler.task import EngineId, GroupRef, Objective, Task

#: `new`: it has just come; `held`: its application is at the door; `queued`: it waits for a place;
#: `placed`: it has one; `ended`: the scheduler has forgotten it.
State: TypeAlias = Literal["new", "held", "queued", "placed", "ended"]


@dataclass(slots=True)
class Account:
    """What a placed task adds to the columns of its engine's row, to be taken away again."""

    sequences: int
    latency_sequences: int
    pending_prefill: float
    #: Working set besides the blocks of its claim: the prompt's rest and the output.
    private_tokens: float
    #: Seconds a token that are promised to it; inf: nothing is.
    step_limit_s: float
    claim: Claim


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
    state: State = "new"
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
    account: Account | None = None
    #: The caller has been told to stop it.
    is_cancelled: bool = False

    @property
    def is_fill(self) -> bool:
        """Whether it is a Fill alone, done ahead of its call."""
        return self.task.max_tokens == 0

    @property
    def working_set(self) -> int:
        """Tokens of KV that it needs by itself, expected output included."""
        return self.task.prompt_tokens + self.expected_output
