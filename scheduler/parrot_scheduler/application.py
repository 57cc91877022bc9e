"""What the scheduler knows of one application."""

from __future__ import annotations

from dataclasses import dataclass, field

from parrot_scheduler.task import ApplicationId, EngineId, TenantId


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
    #: The same in KV-token-steps, `p x d + d^2 / 2` for p prompt and d output tokens: what a task
    #: takes of an engine's memory over time (Justitia, arXiv 2510.17015).
    served_kv_steps: float = 0.0
    #: Largest context of its tasks so far, in tokens.
    context_tokens: int = 0
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
        """Tasks that wait or are placed."""
        return self.num_held + self.num_queued + self.num_placed
