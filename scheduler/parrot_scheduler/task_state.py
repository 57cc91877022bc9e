"""The scheduler's state of a task, from submission to end, and of an application."""

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
    """The amounts that a placed task adds to its engine's row; subtracted at its end."""

    sequences: int
    latency_sequences: int
    #: Prompt tokens neither computed nor expected in the engine's cache.
    pending_prefill: float
    #: Tokens of KV besides the blocks of `claim`: the rest of the prompt, and the output.
    private_tokens: float
    #: Seconds per token promised to the task; inf if there is no promise.
    step_limit_s: float
    claim: PrefixClaim


@dataclass(slots=True, eq=False)
class TaskState:
    """A submitted task. Compared by identity.

    `objective`, `groups`, `priority` and `successors` start with the task's own values, and change
    with `TaskUpdated`.
    """

    task: Task
    #: Order of submission over all tasks; breaks every tie.
    sequence: int
    submitted_at: float
    #: Expected output tokens, over all its sequences.
    expected_output: int
    objective: Objective
    groups: tuple[GroupRef, ...]
    priority: int
    successors: int
    status: TaskStatus = "new"
    #: Seconds that its application was held during its wait.
    held_s: float = 0.0
    #: Absolute time by which it should be done; None if its objective has none.
    deadline: float | None = None

    # Set at placement.
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
    #: True once a `Cancel` has been sent.
    is_cancelled: bool = False

    @property
    def is_fill(self) -> bool:
        """Return true if it only computes a prompt, ahead of the call that needs it."""
        return self.task.max_tokens == 0

    @property
    def working_set(self) -> int:
        """Return the tokens of KV that it needs by itself, expected output included."""
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
    #: Context tokens of its last ended task that no other task on the engine needed then.
    own_tokens: float = 0.0
    #: End of its last task; None while one is unfinished.
    idle_since: float | None = None
    #: True once the admission policy or a limit has let it run.
    admitted: bool = False
    #: True once the caller has said that no more of its tasks will come.
    has_finished: bool = False
    #: Order of arrival; breaks every tie.
    sequence: int = 0
    #: Engine of its last task. It may have left: see `EnginePool.row_of`.
    last_engine: EngineId | None = None
    #: Tokens of KV retained on `last_engine` during a pause; part of the column `retained`.
    retained_tokens: float = 0.0
    #: True: its KV is retained when its last unfinished task ends.
    retain_on_pause: bool = False
    #: Number of its tasks so far.
    num_tasks: int = 0
    #: Templates of its first few tasks.
    templates: list[str] = field(default_factory=list)

    @property
    def num_unfinished(self) -> int:
        return self.num_held + self.num_queued + self.num_placed
