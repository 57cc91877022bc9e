"""Applications of one pool: from their first task until they end or are too many."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from parrot_scheduler.engines.pool import Pool
from parrot_scheduler.policy import Application
from parrot_scheduler.task import ApplicationId, Task
from parrot_scheduler.task_state import Entry

#: Templates remembered of one application.
_MAX_TEMPLATES = 8


class Applications:
    """What is known of each application, and what paused ones keep on engines.

    At most `max_applications` are remembered besides those with unfinished tasks, which are
    bounded by these: longest idle first out.
    """

    def __init__(
        self, pool: Pool, max_applications: int, forgotten: Callable[[Application], None]
    ) -> None:
        self._pool = pool
        self._max = max_applications
        self._forgotten = forgotten
        self._all: dict[ApplicationId, Application] = {}
        self._idle: OrderedDict[ApplicationId, Application] = OrderedDict()
        self._kept: OrderedDict[ApplicationId, Application] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        """Applications that are remembered."""
        return len(self._all)

    def get(self, application: ApplicationId) -> Application | None:
        """An application that is remembered."""
        return self._all.get(application)

    def of(self, task: Task, now: float) -> Application:
        """A task's application, new if need be."""
        known = self._all.get(task.application)
        if known is None:
            self._count += 1
            known = Application(task.application, task.tenant, now, sequence=self._count)
            self._all[task.application] = known
        known.num_tasks += 1
        known.has_finished = False
        known.idle_since = None
        self._idle.pop(known.id, None)
        template = task.template
        if template and len(known.templates) < _MAX_TEMPLATES and template not in known.templates:
            known.templates.append(template)
        return known

    def kept(self) -> list[Application]:
        """Those with KV kept on an engine, longest idle first."""
        return list(self._kept.values())

    @property
    def num_kept(self) -> int:
        """How many have KV kept on an engine."""
        return len(self._kept)

    def served(self, entry: Entry, application: Application) -> None:
        """A placed task has ended with these counts."""
        task = entry.task
        sequences = max(1, task.num_sequences)
        output = entry.generated_tokens / sequences
        uncached = max(0, task.prompt_tokens - entry.cached_tokens)
        application.served_tokens += uncached + entry.generated_tokens
        application.served_kv_steps += sequences * (task.prompt_tokens * output + output**2 / 2)
        application.context_tokens = max(
            application.context_tokens, task.prompt_tokens + int(output)
        )
        application.last_engine = entry.engine_id

    def rest(self, application: Application, now: float, *, keep: bool) -> None:
        """It has no unfinished task; `keep`: its KV should stay where its last task ran."""
        application.idle_since = now
        self._idle[application.id] = application
        row = self._pool.row_of(application.last_engine)
        if keep and row >= 0:
            capacity = self._pool.table.cells.capacity[row]
            application.kept_tokens = min(float(application.context_tokens), capacity)
            self._pool.keep(row, application.kept_tokens)
            self._kept[application.id] = application
        if len(self._idle) > self._max:
            self.forget(next(iter(self._idle.values())))

    def let_go(self, application: Application) -> None:
        """What it left on an engine does not count as kept any more."""
        if application.kept_tokens:
            row = self._pool.row_of(application.last_engine)
            if row >= 0:
                self._pool.keep(row, -application.kept_tokens)
            application.kept_tokens = 0.0
            self._kept.pop(application.id, None)

    def engine_left(self, engine_id: str) -> None:
        """Nothing is kept there any more. Called while the engine has its row."""
        for application in self.kept():
            if application.last_engine == engine_id:
                self.let_go(application)

    def forget(self, application: Application) -> None:
        """An application without unfinished tasks is remembered no longer."""
        self.let_go(application)
        self._idle.pop(application.id, None)
        del self._all[application.id]
        self._forgotten(application)
