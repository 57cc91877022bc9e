"""All tasks of one model, from the door to their end, and the engines that they run on."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable

from parrot_scheduler.actions import Action, Forget, Hold, Reject, RejectCode, Release
from parrot_scheduler.config import SchedulerConfig
from parrot_scheduler.engines.pool import Pool
from parrot_scheduler.events import TaskUpdated
from parrot_scheduler.lazy_heap import LazyHeap
from parrot_scheduler.lengths import Lengths
from parrot_scheduler.policy import Application, Policies
from parrot_scheduler.queue.admission_queue import Door, Held
from parrot_scheduler.queue.application_registry import Applications
from parrot_scheduler.task import ApplicationId, EngineDescription, EngineId, TaskId
from parrot_scheduler.task_state import Entry


class ModelQueue:
    """One model's pool of engines and its tasks. `Scheduler` routes events here.

    `emit` takes what is to be done, `ended` every task that has ended in whatever way.
    """

    def __init__(
        self,
        model: str,
        config: SchedulerConfig,
        policies: Policies,
        emit: Callable[[Action], None],
        ended: Callable[[Entry], None],
    ) -> None:
        self.config = config
        self.pool = Pool(model, config.max_blocks)
        rng = random.Random(f"{config.seed}:{model}")  # noqa: S311 - choices, not secrets
        self.admission = policies.admission(config, rng)
        self.order = policies.order(config, rng)
        self.place = policies.place(config, rng)
        self.keep = policies.keep(config, rng)
        self.applications = Applications(
            self.pool,
            config.max_applications,
            lambda application: self.order.application_finished(application, self.now),
        )
        self.lengths = Lengths(config.max_templates)
        #: Every task that is not placed, in order of submission.
        self.waiting: OrderedDict[TaskId, Entry] = OrderedDict()
        self.door = Door(self.order)
        #: Fills done ahead that wait.
        self.fills: OrderedDict[TaskId, Entry] = OrderedDict()
        self.no_engine_since: float | None = 0.0
        #: The task that an engine is drained for, and that engine's row.
        self.reserved: tuple[Entry, int] | None = None
        self.emit = emit
        self._ended = ended
        self.now = 0.0
        self._bound: dict[EngineId, dict[TaskId, Entry]] = {}
        #: Queued members of each task group, the longest first.
        self.groups: dict[str, LazyHeap[Entry]] = {}
        self.placed_fills: dict[TaskId, Entry] = {}
        # Applications whose last placed task should be kept.
        self._keeps: dict[ApplicationId, None] = {}
        #: Whether everything has to be looked at again: more has changed since tasks were last
        #: looked at than that there is more room on some engines.
        self.has_room = True
        #: Rows that have more room than when tasks were last looked at, bit r for row r.
        self.opened = 0
        #: Sequence of the first task that has not been looked at yet.
        self.fresh_from: int | None = None

    def is_empty(self) -> bool:
        """No engine and no task."""
        return not (len(self.pool.table) or self.waiting)

    # Tasks

    def submit(self, entry: Entry, now: float) -> None:
        """A new task: at the door, or into the queue."""
        self.now = now
        task = entry.task
        self.waiting[task.id] = entry
        application = self.applications.of(task, now)
        if task.bound_to is not None:
            self._bound.setdefault(task.bound_to, {})[task.id] = entry
            if not self.pool.takes_work(self.pool.row_of(task.bound_to)):
                self.reject(entry, "engine_left", f"engine {task.bound_to} is not here")
                return
        if not self._fits(entry):
            return
        if entry.is_fill:
            entry.state = "queued"
            application.num_queued += 1
            self.fills[task.id] = entry
            return
        held = self.door.get(application.id)
        if held is None:
            runs = application.num_queued + application.num_placed > 0
            if (
                (runs and application.admitted)
                or not self.pool.num_accepting
                or self.admission.may_enter(application, entry, self.pool, now)
            ):
                application.admitted = True
                self.enter(entry, application)
                return
            held = self.door.stop(application, entry, "working set", now)
            self.emit(Hold(application.id, self.pool.model, held.reason))
        entry.state = "held"
        application.num_held += 1
        held.entries[task.id] = entry

    def let_in(self, held: Held) -> None:
        """An application is not at the door any more."""
        application = held.application
        self.door.leave(held)
        self.emit(Release(application.id, self.pool.model))

    def enter(self, entry: Entry, application: Application) -> None:
        """A task may be placed from now on."""
        entry.state = "queued"
        application.num_queued += 1
        self._join_groups(entry)
        self.admission.entered(entry, application, self.pool)
        self.order.push(entry, application, self.now)
        if self.fresh_from is None or entry.sequence < self.fresh_from:
            self.fresh_from = entry.sequence

    def update(self, entry: Entry, event: TaskUpdated, now: float) -> None:
        """What is known of a task has changed."""
        self.now = now
        if event.groups is not None:
            if entry.state == "queued":
                self.leave_groups(entry)
            entry.groups = event.groups
            if entry.state == "queued" and not entry.is_fill:
                self._join_groups(entry)
        if event.objective is not None:
            entry.objective = event.objective
            seconds = event.objective.seconds
            timed = event.objective.kind == "deadline" and seconds is not None
            entry.deadline = entry.submitted_at + seconds if timed and seconds else None
            if entry.state == "placed":
                self.pool.set_objective(entry, event.objective)
        if event.priority is not None:
            entry.priority = event.priority
        if event.successors is not None:
            entry.successors = max(0, event.successors)
        if entry.state == "queued" and not entry.is_fill:
            self.order.update(entry, self.application_of(entry), now)
            self.has_room = True

    def progress(self, entry: Entry, filled: int, cached: int, generated: int, now: float) -> None:
        """A placed task got on; counts are sane."""
        pending, row = self.pool.table.cells.pending_prefill, entry.engine_row
        was_pending = pending[row] > 0
        self.pool.progress(entry, filled, cached, generated)
        if was_pending and pending[row] <= 0:
            self.opened |= 1 << row

    def finish(self, entry: Entry, now: float, *, succeeded: bool) -> None:
        """A placed task ended on its engine."""
        self.now = now
        task = entry.task
        if succeeded:
            self.pool.computed(entry)
            if self.config.predict_lengths:
                length = entry.generated_tokens / max(1, task.num_sequences)
                self.lengths.observe(task.tenant, task.template, length, task.max_tokens)
        application = self.application_of(entry)
        row = entry.engine_row
        self.pool.release(entry)
        self.placed_fills.pop(task.id, None)
        application.num_placed -= 1
        self.applications.served(entry, application)
        if not entry.is_fill:
            self.order.finished(entry, application, now)
            self.admission.ended(entry, application, self.pool)
        self.place.ended(entry, self.pool, now)
        self.opened |= 1 << row
        self._forget(entry, application)

    def cancel(self, entry: Entry, now: float) -> None:
        """Nobody wants the task any more."""
        self.now = now
        if entry.state == "placed":
            self.finish(entry, now, succeeded=False)
        else:
            self._withdraw(entry)

    def reject(self, entry: Entry, code: RejectCode, message: str) -> None:
        """A waiting task is refused."""
        self._withdraw(entry)
        self.emit(Reject(entry.task.id, code, message))

    def _withdraw(self, entry: Entry) -> None:
        """A task that waits ends."""
        application = self.application_of(entry)
        held = self.door.get(application.id)
        if entry.state == "held" and held is not None:
            application.num_held -= 1
            held.withdraw(entry)
            if not held.entries:
                self.let_in(held)
        elif entry.state == "queued":
            application.num_queued -= 1
            if entry.is_fill:
                del self.fills[entry.task.id]
            else:
                self.order.remove(entry)
                self.admission.ended(entry, application, self.pool)
                self.leave_groups(entry)
            self.place.ended(entry, self.pool, self.now)
            self.has_room = True
        self.leave_waiting(entry)
        self._forget(entry, application)

    def leave_waiting(self, entry: Entry) -> None:
        """A task does not wait any more."""
        del self.waiting[entry.task.id]
        engine = entry.task.bound_to
        if engine is not None:
            bound = self._bound[engine]
            del bound[entry.task.id]
            if not bound:
                del self._bound[engine]
        if self.reserved is not None and self.reserved[0] is entry:
            self.reserved = None
            self.pool.reserve(-1)
            self.has_room = True

    def _join_groups(self, entry: Entry) -> None:
        for group in entry.groups:
            members = self.groups.setdefault(group.id, LazyHeap())
            members.push(entry, (-entry.working_set, entry.sequence))

    def leave_groups(self, entry: Entry) -> None:
        """A task is not queued any more, or not in these groups."""
        for group in entry.groups:
            members = self.groups.get(group.id)
            if members is not None:
                members.remove(entry)
                if not members:
                    del self.groups[group.id]

    def _forget(self, entry: Entry, application: Application) -> None:
        entry.state = "ended"
        self._ended(entry)
        if application.num_held + application.num_queued + application.num_placed == 0:
            if application.has_finished:
                self.applications.forget(application)
                return
            keep = self._keeps.pop(application.id, False) is not False
            self.applications.rest(application, self.now, keep=keep)

    def application_of(self, entry: Entry) -> Application:
        """The application of a task that has not ended."""
        application = self.applications.get(entry.task.application)
        assert application is not None, f"task {entry.task.id} has lost its application"
        return application

    def _fits(self, entry: Entry) -> bool:
        """Whether an engine of the model could hold it; refused if not, shortened if need be."""
        pool, task = self.pool, entry.task
        row = pool.row_of(task.bound_to)
        if row < 0 and not pool.num_accepting:
            return True
        capacity = int(pool.table.cells.capacity[row] if row >= 0 else pool.largest_capacity)
        if task.prompt_tokens + min(1, task.max_tokens) > capacity:
            self.reject(
                entry,
                "too_large",
                f"{task.prompt_tokens} prompt tokens; engines of {pool.model} hold {capacity}",
            )
            return False
        entry.expected_output = min(entry.expected_output, capacity - task.prompt_tokens)
        return True

    # Engines

    def join(self, engine: EngineDescription, now: float) -> None:
        """An engine that is not here takes work from now on."""
        self.now = now
        largest = self.pool.largest_capacity
        self.pool.join(engine)
        self.no_engine_since = None
        self.has_room = True
        if largest == 0:
            for entry in list(self.waiting.values()):
                if entry.state != "ended":
                    self._fits(entry)

    def drain(self, engine_id: EngineId, now: float) -> bool:
        """An engine takes nothing new; False: it did not before either."""
        self.now = now
        if not self.pool.drain(self.pool.row_of(engine_id)):
            return False
        self._without(engine_id)
        return True

    def leave(self, engine_id: EngineId, now: float) -> None:
        """An engine is gone, and the tasks placed there end."""
        self.now = now
        for entry in list(self.pool.placed[self.pool.row_of(engine_id)].values()):
            self.finish(entry, now, succeeded=False)
        self.applications.engine_left(engine_id)
        self.pool.leave(engine_id)
        self._without(engine_id)

    def _without(self, engine_id: EngineId) -> None:
        """No new work goes to this engine any more."""
        pool = self.pool
        for entry in list(self._bound.get(engine_id, {}).values()):
            self.reject(entry, "engine_left", f"engine {engine_id} takes no more work")
        if self.reserved is not None and not pool.takes_work(self.reserved[1]):
            self.reserved = None
            pool.reserve(-1)
        if pool.num_accepting == 0:
            self.no_engine_since = self.now
        else:
            for entry in list(self.waiting.values()):
                if entry.state != "ended":
                    self._fits(entry)
        self.has_room = True

    # Applications

    def finish_application(self, application_id: ApplicationId, now: float) -> bool:
        """No task of it will come any more; False: it is not known here."""
        self.now = now
        application = self.applications.get(application_id)
        if application is None:
            return False
        self._keeps.pop(application_id, None)
        if application.kept_tokens:
            self.drop_kept(application)
        application.has_finished = True
        if application.idle_since is not None:
            self.applications.forget(application)
        return True

    def drop_kept(self, application: Application) -> None:
        """What a paused application left on its engine is of no use any more."""
        engine_id = application.last_engine
        self.applications.let_go(application)
        if engine_id is not None:
            self.emit(Forget(application.id, engine_id))
            row = self.pool.row_of(engine_id)
            if row >= 0:
                self.opened |= 1 << row

    def will_keep(self, application: Application, *, keep: bool) -> None:
        """Whether the KV of its task that is being placed should stay once it pauses."""
        if keep:
            self._keeps[application.id] = None
        else:
            self._keeps.pop(application.id, None)
