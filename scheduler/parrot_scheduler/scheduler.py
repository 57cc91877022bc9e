"""The scheduler: events in, actions out.

Deterministic and synchronous: the same events at the same times give the same actions, byte for
byte. It reads no clock, does no I/O, and draws random numbers only from its own seed. Both the
gateway and the simulator are shells around it.
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
from parrot_scheduler.policy import Policies
from parrot_scheduler.queue.dispatcher import Dispatcher
from parrot_scheduler.queue.model_queue import ModelQueue
from parrot_scheduler.snapshot import snapshot_of
from parrot_scheduler.task import EngineId, Task, TaskId
from parrot_scheduler.task_state import Entry


def policies_of(config: SchedulerConfig) -> Policies:
    """The policies that a configuration names.

    Raises:
        ValueError: There is no policy of such a name; says which there are.
    """
    return Policies(
        admission=_named(admission.POLICIES, "admission", config.admission),
        order=_named(order.POLICIES, "order", config.order),
        place=_named(placement.POLICIES, "place", config.place),
        keep=_named(retention.POLICIES, "keep", config.keep),
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
    `step` is called when `WakeAt` asks for it. Placed tasks are forgotten once their end is
    reported or their engine leaves.

    `policies` replaces those that `config` names.
    """

    def __init__(
        self, config: SchedulerConfig | None = None, *, policies: Policies | None = None
    ) -> None:
        self.config = config or SchedulerConfig()
        self._policies = policies or policies_of(self.config)
        #: Events that made no sense, by kind.
        self.ignored: dict[str, int] = {}
        #: Actions so far, by kind.
        self.counts: dict[str, int] = {}
        self._now = 0.0
        self._started = False
        self._sequence = 0
        self._tasks: dict[TaskId, tuple[ModelQueue, Entry]] = {}
        self._engines: dict[EngineId, ModelQueue] = {}
        self._models: dict[str, tuple[ModelQueue, Dispatcher]] = {}
        self._wake_at = -math.inf
        self._actions: list[Action] = []

    @classmethod
    def from_config(cls, config: SchedulerConfig) -> Scheduler:
        """A scheduler with the policies that `config` names.

        Raises:
            ValueError: There is no policy of such a name.
        """
        return cls(config)

    @property
    def now(self) -> float:
        """The latest time that it was told."""
        return self._now

    @property
    def num_tasks(self) -> int:
        """Tasks that wait or are placed."""
        return len(self._tasks)

    def step(self, now: float, events: Iterable[Event]) -> list[Action]:
        """Take in what happened, in this order, and say what to do.

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
            self._take(event)
        self._dispatch()
        for action in actions:
            kind = type(action).__name__
            self.counts[kind] = self.counts.get(kind, 0) + 1
        return actions

    def snapshot(self) -> dict[str, Any]:
        """How things stand, as plain data: queues, held applications, engines, tenants."""
        return snapshot_of(self)

    @property
    def models(self) -> dict[str, ModelQueue]:
        """Each model's queue, by name; to be read only."""
        return {name: queue for name, (queue, _) in self._models.items()}

    # Events

    def _take(self, event: Event) -> None:
        match event:
            case TaskSubmitted():
                self._submit(event.task)
            case TaskProgress():
                self._progress(event)
            case TaskFinished():
                self._finish(event)
            case TaskCancelled():
                found = self._tasks.get(event.task_id)
                if found is None:
                    self._ignore("TaskCancelled")
                else:
                    found[0].cancel(found[1], self._now)
            case TaskUpdated():
                found = self._tasks.get(event.task_id)
                if found is None:
                    self._ignore("TaskUpdated")
                else:
                    found[0].update(found[1], event, self._now)
            case ApplicationFinished():
                known = [
                    queue.finish_application(event.application, self._now)
                    for queue, _ in self._models.values()
                ]
                if not any(known):
                    self._ignore("ApplicationFinished")
            case EngineJoined():
                description = event.engine
                old = self._engines.pop(description.id, None)
                if old is not None:
                    old.leave(description.id, self._now)
                queue = self._queue(description.model)
                queue.join(description, self._now)
                self._engines[description.id] = queue
            case Tick():
                for queue, _ in self._models.values():
                    queue.has_room = True
            case _:
                self._take_of_engine(event)

    def _take_of_engine(
        self,
        event: EngineDraining | EngineLeft | EngineReport | BlocksStored | BlocksEvicted,
    ) -> None:
        queue = self._engines.get(event.engine_id)
        if queue is None:
            self._ignore(type(event).__name__)
            return
        row = queue.pool.row_of(event.engine_id)
        match event:
            case EngineDraining():
                if not queue.drain(event.engine_id, self._now):
                    self._ignore("EngineDraining")
            case EngineLeft():
                del self._engines[event.engine_id]
                queue.leave(event.engine_id, self._now)
            case EngineReport():
                if not queue.pool.report(row, event):
                    self._ignore("EngineReport")
            case BlocksStored():
                queue.pool.prefixes.stored(row, event.hashes)
            case BlocksEvicted():
                queue.pool.prefixes.evicted(row, event.hashes)

    def _submit(self, task: Task) -> None:
        known = self._tasks.get(task.id)
        if known is not None:
            if known[1].task == task:
                self._ignore("TaskSubmitted")
            else:
                text = f"task {task.id} lives already, and is another one"
                self._actions.append(Reject(task.id, "duplicate", text))
            return
        num_waiting = sum(len(queue.waiting) for queue, _ in self._models.values())
        if num_waiting >= self.config.max_queued:
            text = f"{num_waiting} tasks wait; at most {self.config.max_queued} may"
            self._actions.append(Reject(task.id, "queue_full", text))
            return
        queue = self._queue(task.model)
        self._sequence += 1
        sequences = max(1, task.num_sequences)
        length = max(0, task.max_tokens)
        if self.config.predict_lengths:
            length = queue.lengths.predict(task.tenant, task.template, length)
        kind, seconds = task.objective
        entry = Entry(
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
        self._tasks[task.id] = (queue, entry)
        queue.submit(entry, self._now)

    def _progress(self, event: TaskProgress) -> None:
        found = self._tasks.get(event.task_id)
        if found is None or found[1].state != "placed":
            self._ignore("TaskProgress")
            return
        queue, entry = found
        prompt = entry.task.prompt_tokens
        filled = max(entry.filled_tokens, min(event.filled_tokens, prompt))
        cached = max(entry.cached_tokens, min(event.cached_tokens, prompt))
        generated = max(entry.generated_tokens, min(event.generated_tokens, _limit(entry.task)))
        if (filled, cached, generated) != (
            event.filled_tokens,
            event.cached_tokens,
            event.generated_tokens,
        ):
            self._ignore("TaskProgress")
        queue.progress(entry, filled, cached, generated, self._now)

    def _finish(self, event: TaskFinished) -> None:
        found = self._tasks.get(event.task_id)
        if found is None or found[1].state != "placed":
            self._ignore("TaskFinished")
            return
        queue, entry = found
        entry.cached_tokens = max(0, min(event.cached_tokens, entry.task.prompt_tokens))
        entry.generated_tokens = max(0, min(event.generated_tokens, _limit(entry.task)))
        queue.finish(entry, self._now, succeeded=event.succeeded)

    # Bookkeeping

    def _queue(self, model: str) -> ModelQueue:
        known = self._models.get(model)
        if known is None:
            queue = ModelQueue(model, self.config, self._policies, self._emit, self._ended)
            queue.no_engine_since = self._now
            known = self._models[model] = (queue, Dispatcher(queue))
        return known[0]

    def _dispatch(self) -> None:
        next_bound: float | None = None
        for model, (queue, dispatcher) in list(self._models.items()):
            dispatcher.run(self._now)
            if queue.is_empty():
                del self._models[model]
                continue
            bound = dispatcher.next_bound(self._now)
            if bound is not None and (next_bound is None or bound < next_bound):
                next_bound = bound
        # A wish that stands and comes earlier does no harm: the shell ticks, and asks again.
        if next_bound is not None and not self._now < self._wake_at <= next_bound:
            self._wake_at = next_bound
            self._actions.append(WakeAt(next_bound))

    def _emit(self, action: Action) -> None:
        self._actions.append(action)

    def _ended(self, entry: Entry) -> None:
        del self._tasks[entry.task.id]

    def _ignore(self, kind: str) -> None:
        self.ignored[kind] = self.ignored.get(kind, 0) + 1


def _limit(task: Task) -> int:
    """Tokens that a task generates at most."""
    return max(0, task.max_tokens) * max(1, task.num_sequences)
