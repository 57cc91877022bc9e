"""The scheduler: events in, actions out.

Deterministic and synchronous: the same events at the same times give the same actions, byte for
byte. It reads no clock, does no I/O, and draws random numbers only from its own seed. The gateway
and the simulator both run it, each with its own clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from parrot_scheduler import admission, order, placement, retention
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
    Event,
    TaskCancelled,
    TaskFinished,
    TaskProgress,
    TaskSubmitted,
    TaskUpdated,
    Tick,
)
from parrot_scheduler.model_scheduler import ModelScheduler
from parrot_scheduler.policy import Policies
from parrot_scheduler.snapshot import snapshot_of
from parrot_scheduler.task import EngineDescription, EngineId, Task, TaskId
from parrot_scheduler.task_state import TaskState

#: Events that are ignored unless their task is placed.
_OF_PLACED_TASKS = (TaskProgress, TaskFinished)


def policies_of(config: SchedulerConfig) -> Policies:
    """The policies that a configuration names.

    Raises:
        ValueError: An unknown policy; lists the known ones.
    """
    return Policies(
        admission=_named(admission.POLICIES, "admission", config.admission),
        order=_named(order.POLICIES, "order", config.order),
        placement=_named(placement.POLICIES, "place", config.place),
        retention=_named(retention.POLICIES, "keep", config.keep),
    )


def _named(policies: dict[str, Any], field: str, name: str) -> Any:
    try:
        return policies[name]
    except KeyError:
        known = ", ".join(sorted(policies))
        raise ValueError(f"{field}: no policy is called {name!r}; there are {known}") from None


class Scheduler:
    """Decides which task runs where and when.

    Every submitted task is placed or refused within `SchedulerConfig.max_wait_s`, provided that
    `step` is called at the time of each `WakeAt`. Placed tasks are forgotten once their end is
    reported or their engine leaves.

    `policies` replaces those that `config` names.
    """

    def __init__(
        self, config: SchedulerConfig | None = None, *, policies: Policies | None = None
    ) -> None:
        self.config = config or SchedulerConfig()
        self._policies = policies or policies_of(self.config)
        #: Events that were ignored because they made no sense, by kind.
        self.ignored: dict[str, int] = {}
        #: Actions so far, by kind.
        self.counts: dict[str, int] = {}
        self._now = 0.0
        self._started = False
        self._sequence = 0
        self._tasks: dict[TaskId, tuple[ModelScheduler, TaskState]] = {}
        self._engines: dict[EngineId, ModelScheduler] = {}
        #: Models with engines or tasks, by name; to be read only.
        self.models: dict[str, ModelScheduler] = {}
        self._wake_at = -math.inf
        self._actions: list[Action] = []

    @property
    def now(self) -> float:
        return self._now

    @property
    def num_tasks(self) -> int:
        """Tasks that wait or are placed."""
        return len(self._tasks)

    def step(self, now: float, events: Iterable[Event]) -> list[Action]:
        """Apply events in this order, and decide what to do.

        A `now` that is earlier than the last one, or no number, counts as the last one.
        """
        if not math.isfinite(now) or (self._started and now < self._now):
            self._ignore("clock")
        else:
            self._now = now
            self._started = True
        actions: list[Action] = []
        self._actions = actions
        for event in events:
            self._apply(event)
        self._dispatch()
        for action in actions:
            kind = type(action).__name__
            self.counts[kind] = self.counts.get(kind, 0) + 1
        return actions

    def snapshot(self) -> dict[str, Any]:
        """How things stand, as plain data: queues, held applications, engines, tenants."""
        return {
            "now": self._now,
            "policies": {
                name: getattr(self.config, name) for name in ("admission", "order", "place", "keep")
            },
            "actions": dict(self.counts),
            "ignored": dict(self.ignored),
            "models": {name: snapshot_of(model, self._now) for name, model in self.models.items()},
        }

    # Events

    def _apply(self, event: Event) -> None:
        match event:
            case TaskSubmitted():
                self._submit(event.task)
            case TaskProgress() | TaskFinished() | TaskCancelled() | TaskUpdated():
                self._apply_to_task(event)
            case ApplicationFinished():
                known = [
                    model.finish_application(event.application, self._now)
                    for model in self.models.values()
                ]
                if not any(known):
                    self._ignore("ApplicationFinished")
            case EngineJoined():
                self._join(event.engine)
            case Tick():
                for model in self.models.values():
                    model.search_all()
            case _:
                self._apply_to_engine(event)

    def _apply_to_task(
        self, event: TaskProgress | TaskFinished | TaskCancelled | TaskUpdated
    ) -> None:
        found = self._tasks.get(event.task_id)
        needs_placement = isinstance(event, _OF_PLACED_TASKS)
        if found is None or (needs_placement and found[1].status != "placed"):
            self._ignore(type(event).__name__)
            return
        model, state = found
        match event:
            case TaskProgress():
                prompt = state.task.prompt_tokens
                filled = max(state.filled_tokens, min(event.filled_tokens, prompt))
                cached = max(state.cached_tokens, min(event.cached_tokens, prompt))
                generated = max(
                    state.generated_tokens, min(event.generated_tokens, _limit(state.task))
                )
                if (filled, cached, generated) != (
                    event.filled_tokens,
                    event.cached_tokens,
                    event.generated_tokens,
                ):
                    self._ignore("TaskProgress")
                model.progress(state, filled, cached, generated, self._now)
            case TaskFinished():
                state.cached_tokens = max(0, min(event.cached_tokens, state.task.prompt_tokens))
                state.generated_tokens = max(0, min(event.generated_tokens, _limit(state.task)))
                model.finish(state, self._now, succeeded=event.succeeded)
            case TaskCancelled():
                model.cancel(state, self._now)
            case TaskUpdated():
                model.update(state, event, self._now)

    def _apply_to_engine(
        self, event: EngineDraining | EngineLeft | EngineReport | BlocksStored | BlocksEvicted
    ) -> None:
        model = self._engines.get(event.engine_id)
        if model is None:
            self._ignore(type(event).__name__)
            return
        row = model.pool.row_of(event.engine_id)
        match event:
            case EngineDraining():
                if not model.drain(event.engine_id, self._now):
                    self._ignore("EngineDraining")
            case EngineLeft():
                del self._engines[event.engine_id]
                model.leave(event.engine_id, self._now)
            case EngineReport():
                if not model.pool.report(row, event):
                    self._ignore("EngineReport")
            case BlocksStored():
                model.pool.prefixes.stored(row, event.hashes)
            case BlocksEvicted():
                model.pool.prefixes.evicted(row, event.hashes)

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
            if known[1].task == task:
                self._ignore("TaskSubmitted")
            else:
                text = f"task {task.id} lives already, and is another one"
                self._actions.append(Reject(task.id, "duplicate", text))
            return
        num_waiting = sum(len(model.waiting) for model in self.models.values())
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
        self._tasks[task.id] = (model, state)
        model.submit(state, self._now)

    # Bookkeeping

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
        # An earlier `WakeAt` that still stands does no harm: a new one follows its `Tick`.
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
    """Tokens that a task generates at most."""
    return max(0, task.max_tokens) * max(1, task.num_sequences)
