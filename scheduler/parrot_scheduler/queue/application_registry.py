"""Applications of one model, from their first task until they finish or are forgotten."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from parrot_scheduler.engines.pool import EnginePool
from parrot_scheduler.task import ApplicationId, EngineId, Task
from parrot_scheduler.task_state import Application, TaskState

#: Templates remembered per application.
_MAX_TEMPLATES = 8


class ApplicationRegistry:
    """The known applications, and the KV retained for paused ones.

    Remembers at most `max_paused` paused applications and forgets the longest idle first.
    Unfinished tasks bound the others.

    Args:
        pool: the engines.
        max_paused: limit on paused applications.
        on_forgotten: called with each application that is forgotten.
    """

    def __init__(
        self, pool: EnginePool, max_paused: int, on_forgotten: Callable[[Application], None]
    ) -> None:
        self._pool = pool
        self._max_paused = max_paused
        self._on_forgotten = on_forgotten
        #: Remembered applications; only this class changes it.
        self.by_id: dict[ApplicationId, Application] = {}
        self._paused: OrderedDict[ApplicationId, Application] = OrderedDict()
        self._retained: OrderedDict[ApplicationId, Application] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return len(self.by_id)

    def register(self, task: Task, now: float) -> Application:
        """Return the application of a new task, creating it if needed."""
        known = self.by_id.get(task.application)
        if known is None:
            self._count += 1
            known = Application(task.application, task.tenant, now, sequence=self._count)
            self.by_id[task.application] = known
        known.num_tasks += 1
        known.has_finished = False
        known.idle_since = None
        self._paused.pop(known.id, None)
        template = task.template
        if template and len(known.templates) < _MAX_TEMPLATES and template not in known.templates:
            known.templates.append(template)
        return known

    def retained(self) -> list[Application]:
        """Return paused applications with KV retained on an engine, longest idle first."""
        return list(self._retained.values())

    @property
    def num_active(self) -> int:
        """Return the number of applications with unfinished tasks."""
        return len(self.by_id) - len(self._paused)

    @property
    def num_retained(self) -> int:
        return len(self._retained)

    def add_service(self, state: TaskState, application: Application, own_tokens: float) -> None:
        """Add an ended task's service to its application; the task's counts are final.

        Args:
            own_tokens: tokens of its context that no other task on its engine needs.
        """
        task = state.task
        sequences = max(1, task.num_sequences)
        output = state.generated_tokens / sequences
        uncached = max(0, task.prompt_tokens - state.cached_tokens)
        application.served_tokens += uncached + state.generated_tokens
        application.context_tokens = max(
            application.context_tokens, task.prompt_tokens + int(output)
        )
        application.own_tokens = own_tokens
        application.last_engine = state.engine_id

    def pause(self, application: Application, now: float) -> None:
        """Pause an application without unfinished tasks; `retain_on_pause` keeps its KV on its last
        engine.
        """
        retain, application.retain_on_pause = application.retain_on_pause, False
        application.idle_since = now
        self._paused[application.id] = application
        row = self._pool.row_of(application.last_engine)
        if retain and row >= 0:
            capacity = self._pool.table.scalars.capacity[row]
            application.retained_tokens = min(application.own_tokens, capacity)
            self._pool.retain(row, application.retained_tokens)
            self._retained[application.id] = application
        if len(self._paused) > self._max_paused:
            self.forget(next(iter(self._paused.values())))

    def release_retained(self, application: Application) -> None:
        """Stop counting the KV that an application left on an engine as retained."""
        if application.retained_tokens:
            row = self._pool.row_of(application.last_engine)
            if row >= 0:
                self._pool.retain(row, -application.retained_tokens)
            application.retained_tokens = 0.0
            self._retained.pop(application.id, None)

    def engine_left(self, engine_id: EngineId) -> None:
        """Release all KV retained on an engine. Call it while the engine still has its row."""
        for application in self.retained():
            if application.last_engine == engine_id:
                self.release_retained(application)

    def forget(self, application: Application) -> None:
        """Forget an application without unfinished tasks."""
        self.release_retained(application)
        self._paused.pop(application.id, None)
        del self.by_id[application.id]
        self._on_forgotten(application)
