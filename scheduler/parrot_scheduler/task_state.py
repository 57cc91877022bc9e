"""The scheduler's memory of a task, from its submission to its end, and of an application."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from parrot_scheduler.prefix_index.index import PrefixClaim
from parrot_scheduler.task import ApplicationId, EngineId, GroupRef, Objective, Task, TenantId

#: `new`: just submitted; `held`: its application waits for admission; `queued`: it waits for an
#: engine; `placed`: it has one; `ended`: the scheduler has forgotten it.
TaskStatus: TypeAlias = Literal["new", "held", "queued", "placed", "ended"]


@dataclass(slots=True)
class EngineLoad:
    """The figures that a placed task adds to its engine's row, to be taken away at its end."""

    sequences: int
    latency_sequences: int
    #: Prompt tokens that are neither computed nor expected in the engine's cache.
    pending_prefill: float
    #: Tokens of KV besides the blocks of `claim`: the rest of the prompt, and the output.
    private_tokens: float
    #: Seconds per token promised to the task; inf without a promise.
    step_limit_s: float
    claim: PrefixClaim


@dataclass(slots=True, eq=False)
class TaskState:
    """A submitted task. Compared by identity.

    `objective`, `groups`, `priority` and `successors` start as the task's own, and change with
    `TaskUpdated`.
    """

    task: Task
    #: Order of submission, over all tasks: breaks every tie.
    sequence: int
    submitted_at: float
    #: Expected output tokens, over all its sequences.
    expected_output: int
    objective: Objective
    groups: tuple[GroupRef, ...]
    priority: int
    successors: int
    status: TaskStatus = "new"
    #: Seconds that its application was held while it waited.
    held_s: float = 0.0
    #: Absolute time by which it should be done; None without such an objective.
    deadline: float | None = None

    # Once placed
    engine_id: EngineId | None = None
    placed_at: float = 0.0
    #: Row of the engine in its pool's table; -1 while not placed.
    engine_row: int = -1
    #: Tokens, as expected at placement and as reported since.
    expected_cached: int = 0
    filled_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    load: EngineLoad | None = None
    #: Whether a `Cancel` has been sent.
    is_cancelled: bool = False

    @property
    def is_fill(self) -> bool:
        """True if it only computes a prompt, ahead of the call that will need it."""
        return self.task.max_tokens == 0

    @property
    def working_set(self) -> int:
        """Tokens of KV that it needs by itself, expected output included."""
        return self.task.prompt_tokens + self.expected_output


@dataclass(slots=True, eq=False)
class Application:
    """One application on one model's engines, from its first task on. Compared by identity."""

    id: ApplicationId
    tenant: TenantId
    arrived_at: float
    #: Unfinished tasks by status.
    num_held: int = 0
    num_queued: int = 0
    num_placed: int = 0
    #: Service of its finished tasks: uncached prompt tokens + generated tokens.
    served_tokens: float = 0.0
    #: Largest context of its tasks so far, in tokens.
    context_tokens: int = 0
    #: Tokens of its last ended task's context that no other task on the engine needed then.
    own_tokens: float = 0.0
    #: When its last task ended; None while one is unfinished.
    idle_since: float | None = None
    #: Whether the admission policy, or a bound, has let it run.
    admitted: bool = False
    #: Whether the caller said that no more of its tasks will come.
    has_finished: bool = False
    #: Order of arrival: breaks every tie.
    sequence: int = 0
    #: Engine where its last task ran. It may be gone: see `EnginePool.row_of`.
    last_engine: EngineId | None = None
    #: Tokens of KV retained on `last_engine` while it pauses; part of the column `retained`.
    retained_tokens: float = 0.0
    #: Whether its KV is to be retained when its last unfinished task ends.
    retain_on_pause: bool = False
    #: Tasks that it had in all.
    num_tasks: int = 0
    #: Prompt templates of its tasks, the first ones only.
    templates: list[str] = field(default_factory=list)

    @property
    def num_unfinished(self) -> int:
        return self.num_held + self.num_queued + self.num_placed
