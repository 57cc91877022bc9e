"""The scheduler: events in, actions out.

Deterministic and synchronous: the same events at the same times give the same actions, byte for
byte. It reads no clock, does no I/O, and draws random numbers only from its own seed. The gateway
and the simulator both run it, each with its own clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from parrot_scheduler.actions import Action, Reject, WakeAt
from parrot_scheduler.config import SchedulerConfig
from parrot_scheduler.events import (
    ApplicationFinished,
    BlocksEvicted,
    BlocksStored,
    EngineDraining,
    EngineJoined,
    EngineLeft,
    EngineReport,
    EngineResumed,
    Event,
    TaskCancelled,
    TaskFinished,
    TaskProgress,
    TaskSubmitted,
    TaskUpdated,
    Tick,
)
from parrot_scheduler.model_scheduler import ModelScheduler
from parrot_scheduler.policies import policies_of
from parrot_scheduler.policy import Policies
from parrot_scheduler.snapshot import snapshot_of
from parrot_scheduler.task import EngineDescription, EngineId, Task, TaskId
from parrot_scheduler.task_state import TaskState


class Scheduler:
    """Decides which task runs where and when.

    If `step` is called at the time of each `WakeAt`, every submitted task is placed or refused
    within `SchedulerConfig.max_wait_s`. A placed task is forgotten when its end is reported or its
    engine leaves.

    `policies` overrides those named in `config`.
    """

    def __init__(
        self, config: SchedulerConfig | None = None, *, policies: Policies | None = None
    ) -> None:
        self.config = config or SchedulerConfig()
        self._policies = policies or policies_of(self.config)
        #: Ignored events that made no sense, by kind.
        self.ignored: dict[str, int] = {}
        #: Number of actions so far, by kind.
        self.counts: dict[str, int] = {}
        self._now = 0.0
        self._started = False
        self._sequence = 0
        self._tasks: dict[TaskId, TaskState] = {}
        self._engines: dict[EngineId, ModelScheduler] = {}
        #: Models with engines or tasks, by name; read-only for callers.
        self.models: dict[str, ModelScheduler] = {}
        self._wake_at = -math.inf
        self._actions: list[Action] = []
        self._handlers: dict[type[Event], Callable[[Any], None]] = {
            TaskSubmitted: self._on_submitted,
            TaskProgress: self._on_progress,
            TaskFinished: self._on_finished,
            TaskCancelled: self._on_cancelled,
            TaskUpdated: self._on_updated,
            ApplicationFinished: self._on_application_finished,
            EngineJoined: self._on_joined,
            EngineDraining: self._on_draining,
            EngineResumed: self._on_resumed,
            EngineLeft: self._on_left,
            EngineReport: self._on_report,
            BlocksStored: self._on_stored,
            BlocksEvicted: self._on_evicted,
            Tick: self._on_tick,
        }

    @property
    def now(self) -> float:
        return self._now

    @property
    def num_tasks(self) -> int:
        """Return the number of waiting and placed tasks."""
        return len(self._tasks)

    def step(self, now: float, events: Iterable[Event]) -> list[Action]:
        """Apply events in this order, and return the resulting actions.

        A `now` that is not finite, or earlier than the last one, counts as the last one.
        """
        if not math.isfinite(now) or (self._started and now < self._now):
            self._ignore("clock")
        else:
            self._now = now
            self._started = True
        actions: list[Action] = []
        self._actions = actions
        handlers = self._handlers
        for event in events:
            handlers[type(event)](event)
        self._dispatch()
        counts = self.counts
        for action in actions:
            kind = type(action).__name__
            counts[kind] = counts.get(kind, 0) + 1
        return actions

    def snapshot(self) -> dict[str, Any]:
        """Return the current state as plain data: queues, held applications, engines, tenants."""
        return {
            "now": self._now,
            "policies": {
                name: getattr(self.config, name) for name in ("admission", "order", "place", "keep")
            },
            "actions": dict(self.counts),
            "ignored": dict(self.ignored),
            "models": {name: snapshot_of(model, self._now) for name, model in self.models.items()},
        }

    def _on_submitted(self, event: TaskSubmitted) -> None:
        self._submit(event.task)

    def _on_progress(self, event: TaskProgress) -> None:
        state = self._tasks.get(event.task_id)
        if state is None or state.status != "placed":
            self._ignore("TaskProgress")
            return
        task = state.task
        prompt, limit = task.prompt_tokens, _limit(task)
        filled, cached, generated = event.filled_tokens, event.cached_tokens, event.generated_tokens
        if not (
            state.filled_tokens <= filled <= prompt
            and state.cached_tokens <= cached <= prompt
            and state.generated_tokens <= generated <= limit
        ):
            filled = max(state.filled_tokens, min(filled, prompt))
            cached = max(state.cached_tokens, min(cached, prompt))
            generated = max(state.generated_tokens, min(generated, limit))
            given = (event.filled_tokens, event.cached_tokens, event.generated_tokens)
            if (filled, cached, generated) != given:
                self._ignore("TaskProgress")
        self.models[task.model].progress(state, filled, cached, generated, self._now)

    def _on_finished(self, event: TaskFinished) -> None:
        state = self._tasks.get(event.task_id)
        if state is None or state.status != "placed":
            self._ignore("TaskFinished")
            return
        task = state.task
        state.cached_tokens = max(0, min(event.cached_tokens, task.prompt_tokens))
        state.generated_tokens = max(0, min(event.generated_tokens, _limit(task)))
        self.models[task.model].finish(state, self._now, succeeded=event.succeeded)

    def _on_cancelled(self, event: TaskCancelled) -> None:
        state = self._tasks.get(event.task_id)
        if state is None:
            self._ignore("TaskCancelled")
        else:
            self.models[state.task.model].cancel(state, self._now)

    def _on_updated(self, event: TaskUpdated) -> None:
        state = self._tasks.get(event.task_id)
        if state is None:
            self._ignore("TaskUpdated")
        else:
            self.models[state.task.model].update(state, event, self._now)

    def _on_application_finished(self, event: ApplicationFinished) -> None:
        is_known = False
        for model in self.models.values():
            is_known |= model.finish_application(event.application, self._now)
        if not is_known:
            self._ignore("ApplicationFinished")

    def _on_tick(self, event: Tick) -> None:
        for model in self.models.values():
            model.search_all()

    def _on_joined(self, event: EngineJoined) -> None:
        self._join(event.engine)

    def _on_draining(self, event: EngineDraining) -> None:
        model = self._engines.get(event.engine_id)
        if model is None or not model.drain(event.engine_id, self._now):
            self._ignore("EngineDraining")

    def _on_resumed(self, event: EngineResumed) -> None:
        model = self._engines.get(event.engine_id)
        if model is None or not model.resume(event.engine_id, self._now):
            self._ignore("EngineResumed")

    def _on_left(self, event: EngineLeft) -> None:
        model = self._engines.pop(event.engine_id, None)
        if model is None:
            self._ignore("EngineLeft")
        else:
            model.leave(event.engine_id, self._now)

    def _on_report(self, event: EngineReport) -> None:
        model = self._engines.get(event.engine_id)
        if model is None or not model.pool.report(model.pool.row_of(event.engine_id), event):
            self._ignore("EngineReport")

    def _on_stored(self, event: BlocksStored) -> None:
        model = self._engines.get(event.engine_id)
        if model is None:
            self._ignore("BlocksStored")
        else:
            pool = model.pool
            pool.prefixes.stored(pool.row_of(event.engine_id), event.hashes)

    def _on_evicted(self, event: BlocksEvicted) -> None:
        model = self._engines.get(event.engine_id)
        if model is None:
            self._ignore("BlocksEvicted")
        else:
            pool = model.pool
            pool.prefixes.evicted(pool.row_of(event.engine_id), event.hashes)

    def _join(self, engine: EngineDescription) -> None:
        old = self._engines.pop(engine.id, None)
        if old is not None:
            old.leave(engine.id, self._now)
        model = self._model(engine.model)
        model.join(engine, self._now)
        self._engines[engine.id] = model

    def _submit(self, task: Task) -> None:
        known = self._tasks.get(task.id)
        if known is not None:
            if known.task == task:
                self._ignore("TaskSubmitted")
            else:
                text = f"task {task.id} lives already, and is another one"
                self._actions.append(Reject(task.id, "duplicate", text))
            return
        num_waiting = 0
        for each in self.models.values():
            num_waiting += len(each.waiting)
        if num_waiting >= self.config.max_queued:
            text = f"{num_waiting} tasks wait; at most {self.config.max_queued} may"
            self._actions.append(Reject(task.id, "queue_full", text))
            return
        model = self._model(task.model)
        self._sequence += 1
        sequences = max(1, task.num_sequences)
        length = max(0, task.max_tokens)
        if self.config.predict_lengths:
            length = model.lengths.predict(task.tenant, task.template, length)
        kind, seconds = task.objective
        state = TaskState(
            task=task,
            sequence=self._sequence,
            submitted_at=self._now,
            expected_output=length * sequences,
            objective=task.objective,
            groups=task.groups,
            priority=task.priority,
            successors=max(0, task.successors),
            deadline=self._now + seconds if kind == "deadline" and seconds is not None else None,
        )
        self._tasks[task.id] = state
        model.submit(state, self._now)

    def _model(self, name: str) -> ModelScheduler:
        known = self.models.get(name)
        if known is None:
            known = self.models[name] = ModelScheduler(
                name,
                self.config,
                self._policies,
                now=self._now,
                emit=self._emit,
                on_ended=self._forget,
            )
        return known

    def _dispatch(self) -> None:
        next_due: float | None = None
        for name, model in list(self.models.items()):
            model.dispatch(self._now)
            if model.is_empty:
                del self.models[name]
                continue
            due = model.next_due(self._now)
            if due is not None and (next_due is None or due < next_due):
                next_due = due
        # A stale earlier `WakeAt` is harmless: its `Tick` leads to a new one.
        if next_due is not None and not self._now < self._wake_at <= next_due:
            self._wake_at = next_due
            self._actions.append(WakeAt(next_due))

    def _emit(self, action: Action) -> None:
        self._actions.append(action)

    def _forget(self, state: TaskState) -> None:
        del self._tasks[state.task.id]

    def _ignore(self, kind: str) -> None:
        self.ignored[kind] = self.ignored.get(kind, 0) + 1


def _limit(task: Task) -> int:
    """Return the most tokens that a task may generate."""
    return max(0, task.max_tokens) * max(1, task.num_sequences)
