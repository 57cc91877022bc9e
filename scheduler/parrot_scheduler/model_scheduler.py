"""All tasks of one model from submission to end, and the engines they run on.

`Scheduler` routes events to the methods below, and calls `dispatch` once at the end of each step:
limits, retention, admission, order and placement, in this order.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Callable
from itertools import islice

from parrot_scheduler.actions import (
    Action,
    Cancel,
    Forget,
    Hold,
    Place,
    Reasons,
    Reject,
    RejectCode,
    Release,
)
from parrot_scheduler.alternatives import alternatives
from parrot_scheduler.config import SchedulerConfig
from parrot_scheduler.engines.pool import EnginePool
from parrot_scheduler.events import TaskUpdated
from parrot_scheduler.lengths import LengthPredictor
from parrot_scheduler.placement.cached import cached_on
from parrot_scheduler.policy import EngineChoice, Policies
from parrot_scheduler.queue.admission_queue import AdmissionQueue, HeldApplication
from parrot_scheduler.queue.application_registry import ApplicationRegistry
from parrot_scheduler.queue.waiting_tasks import WaitingTasks
from parrot_scheduler.task import ApplicationId, EngineDescription, EngineId, TaskId
from parrot_scheduler.task_state import Application, TaskState

#: Seconds between two checks of the KV retained for paused applications.
_RETENTION_CHECK_S = 1.0
#: Held applications admitted in one go.
_MAX_ADMITTED = 64
#: Rounds of admission and placement in one step.
_ROUNDS = 4
#: Members of a task group placed right after the first one.
_MAX_FOLLOWERS = 256
#: Fills ahead cancelled at once for a task without room.
_MAX_CANCELLED_FILLS = 8
#: After a placement in the same step, this many tasks without room end the search.
_MISSES_AFTER_HIT = 1
#: `Place.priority` by objective: the engine's own queue runs smaller ones earlier.
_PRIORITIES = {"latency": 0, "ttft": 0, "tpot": 0, "deadline": 1, "throughput": 2}
_FILL_PRIORITY = 3


class ModelScheduler:
    """One model's engines, its tasks, and the policies that decide about them.

    Args:
        model: its name.
        config: limits, and the policies' parameters.
        policies: factories of the policies.
        now: the time, in seconds on the scheduler's clock.
        emit: called with every action.
        on_ended: called with every task that has ended, for any reason.
    """

    def __init__(
        self,
        model: str,
        config: SchedulerConfig,
        policies: Policies,
        *,
        now: float,
        emit: Callable[[Action], None],
        on_ended: Callable[[TaskState], None],
    ) -> None:
        self.config = config
        self.pool = EnginePool(model, config.max_blocks)
        rng = random.Random(f"{config.seed}:{model}")  # noqa: S311 - choices, not secrets
        self.admission = policies.admission(config, rng)
        self.order = policies.order(config, rng)
        self.placement = policies.placement(config, rng)
        self.retention = policies.retention(config, rng)
        self.applications = ApplicationRegistry(
            self.pool,
            config.max_applications,
            lambda application: self.order.application_finished(application, self._now),
        )
        self.lengths = LengthPredictor(config.max_templates)
        #: Every task that is not placed.
        self.waiting = WaitingTasks()
        self.admission_queue = AdmissionQueue(self.order)
        #: Waiting Fills ahead; they are neither held nor in `order`.
        self.fills: OrderedDict[TaskId, TaskState] = OrderedDict()
        #: The task for which an engine is being drained, and the engine's row.
        self.reserved: tuple[TaskState, int] | None = None
        self._now = now
        self._emit = emit
        self._on_ended = on_ended
        self._no_engine_since: float | None = now
        self._placed_fills: dict[TaskId, TaskState] = {}
        self._retention_checked_at = 0.0
        # Scope of the next search: all tasks if there may be more room or an engine has less to do;
        # otherwise tasks from this sequence number on.
        self._search_all = True
        self._first_new: int | None = None
        # Tasks passed over since the last full search.
        self._num_blocked = 0
        # True if the last search ended before it reached every task; true if it placed any.
        self._search_was_cut = False
        self._has_placed = False

    @property
    def is_empty(self) -> bool:
        return not (len(self.pool.table) or self.waiting)

    def search_all(self) -> None:
        """Try every task again at the next dispatch, blocked ones included."""
        self._search_all = True

    def submit(self, state: TaskState, now: float) -> None:
        self._now = now
        task, pool = state.task, self.pool
        self.waiting.add(state)
        application = self.applications.register(task, now)
        if task.bound_to is not None and not pool.takes_work(pool.row_of(task.bound_to)):
            self._reject(state, "engine_left", f"engine {task.bound_to} is not here")
            return
        if not self._check_size(state):
            return
        if task.max_tokens == 0:
            state.status = "queued"
            application.num_queued += 1
            self.fills[task.id] = state
            return
        held = self.admission_queue.held.get(application.id)
        if held is None:
            if (
                (application.admitted and application.num_queued + application.num_placed > 0)
                or not pool.num_accepting
                or self.admission.may_enter(application, state, pool, now)
            ):
                application.admitted = True
                self._enter(state, application)
                return
            held = self.admission_queue.hold(application, state, "working set", now)
            self._emit(Hold(application.id, pool.model, held.reason))
        state.status = "held"
        application.num_held += 1
        held.tasks[task.id] = state

    def _enter(self, state: TaskState, application: Application) -> None:
        """Queue a task that may be placed from now on."""
        state.status = "queued"
        application.num_queued += 1
        if state.groups:
            self.waiting.join_groups(state)
        self.admission.entered(state, application, self.pool)
        self.order.push(state, application, self._now)
        if self._first_new is None or state.sequence < self._first_new:
            self._first_new = state.sequence

    def update(self, state: TaskState, event: TaskUpdated, now: float) -> None:
        self._now = now
        if event.groups is not None:
            if state.status == "queued":
                self.waiting.leave_groups(state)
            state.groups = event.groups
            if state.status == "queued" and not state.is_fill:
                self.waiting.join_groups(state)
        if event.objective is not None:
            state.objective = event.objective
            seconds = event.objective.seconds
            timed = event.objective.kind == "deadline" and seconds is not None
            state.deadline = state.submitted_at + seconds if timed and seconds else None
            if state.status == "placed":
                self.pool.set_objective(state, event.objective)
        if event.priority is not None:
            state.priority = event.priority
        if event.successors is not None:
            state.successors = max(0, event.successors)
        if state.status == "queued" and not state.is_fill:
            self.order.update(state, self._application_of(state), now)
            self._search_all = True

    def progress(
        self, state: TaskState, filled: int, cached: int, generated: int, now: float
    ) -> None:
        """Apply a placed task's progress; the counts are valid totals in tokens."""
        pending, row = self.pool.table.scalars.pending_prefill, state.engine_row
        was_pending = pending[row] > 0
        self.pool.progress(state, filled, cached, generated)
        if was_pending and pending[row] <= 0:
            self._search_all = True

    def finish(self, state: TaskState, now: float, *, succeeded: bool) -> None:
        self._now = now
        task, pool = state.task, self.pool
        if succeeded:
            pool.computed(state)
            if self.config.predict_lengths:
                length = state.generated_tokens / max(1, task.num_sequences)
                self.lengths.observe(task.tenant, task.template, length, task.max_tokens)
        application = self.applications.by_id[task.application]
        own_tokens = pool.release(state)
        application.num_placed -= 1
        self.applications.add_service(state, application, own_tokens)
        if task.max_tokens:
            self.order.finished(state, application, now)
            self.admission.ended(state, application, pool)
        else:
            self._placed_fills.pop(task.id, None)
        self.placement.ended(state, pool, now)
        self._search_all = True
        self._end(state, application)

    def cancel(self, state: TaskState, now: float) -> None:
        self._now = now
        if state.status == "placed":
            self.finish(state, now, succeeded=False)
        else:
            self._withdraw(state)

    def _reject(self, state: TaskState, code: RejectCode, message: str) -> None:
        self._withdraw(state)
        self._emit(Reject(state.task.id, code, message))

    def _withdraw(self, state: TaskState) -> None:
        """Remove a waiting task that has ended."""
        application = self._application_of(state)
        held = self.admission_queue.held.get(application.id)
        if state.status == "held" and held is not None:
            application.num_held -= 1
            held.withdraw(state)
            if not held.tasks:
                self._release(held)
        elif state.status == "queued":
            application.num_queued -= 1
            if state.is_fill:
                del self.fills[state.task.id]
            else:
                self.order.remove(state)
                self.admission.ended(state, application, self.pool)
                self.waiting.leave_groups(state)
            self.placement.ended(state, self.pool, self._now)
            self._search_all = True
        self._leave_waiting(state)
        self._end(state, application)

    def _leave_waiting(self, state: TaskState) -> None:
        self.waiting.remove(state)
        if self.reserved is not None and self.reserved[0] is state:
            self._end_reservation()
            self._search_all = True

    def _end(self, state: TaskState, application: Application) -> None:
        state.status = "ended"
        self._on_ended(state)
        if application.num_unfinished == 0:
            if application.has_finished:
                self.applications.forget(application)
                return
            self.applications.pause(application, self._now)

    def _application_of(self, state: TaskState) -> Application:
        return self.applications.by_id[state.task.application]

    def _check_size(self, state: TaskState) -> bool:
        """Return true if an engine can hold the task, cutting its output if needed; otherwise
        refuse it.

        Returns true while there are no engines, because the limit is unknown.
        """
        pool, task = self.pool, state.task
        row = pool.row_of(task.bound_to)
        if row < 0 and not pool.num_accepting:
            return True
        capacity = int(pool.table.scalars.capacity[row] if row >= 0 else pool.largest_capacity)
        if task.prompt_tokens + min(1, task.max_tokens) > capacity:
            self._reject(
                state,
                "too_large",
                f"{task.prompt_tokens} prompt tokens; engines of {pool.model} hold {capacity}",
            )
            return False
        state.expected_output = min(state.expected_output, capacity - task.prompt_tokens)
        return True

    def join(self, engine: EngineDescription, now: float) -> None:
        """Add an engine that is not here; it accepts work from now on."""
        self._now = now
        largest = self.pool.largest_capacity
        self.pool.join(engine)
        self._start_placing(largest)

    def _start_placing(self, largest_before: float) -> None:
        """React to an additional accepting engine; `largest_before` is the largest KV until now, in
        tokens.
        """
        self._no_engine_since = None
        self._search_all = True
        if largest_before == 0:
            self._check_sizes()

    def drain(self, engine_id: EngineId, now: float) -> bool:
        """Stop new work on an engine; return false if it was draining already."""
        self._now = now
        if not self.pool.drain(self.pool.row_of(engine_id)):
            return False
        self._stop_placing_on(engine_id)
        return True

    def resume(self, engine_id: EngineId, now: float) -> bool:
        """Let a draining engine accept work again; return false if it was not draining."""
        self._now = now
        largest = self.pool.largest_capacity
        if not self.pool.resume(self.pool.row_of(engine_id)):
            return False
        self._start_placing(largest)
        return True

    def leave(self, engine_id: EngineId, now: float) -> None:
        """Remove an engine that has left, and end its tasks."""
        self._now = now
        for state in list(self.pool.placed[self.pool.row_of(engine_id)].values()):
            self.finish(state, now, succeeded=False)
        self.applications.engine_left(engine_id)
        self.pool.leave(engine_id)
        self._stop_placing_on(engine_id)

    def _stop_placing_on(self, engine_id: EngineId) -> None:
        pool = self.pool
        for state in self.waiting.bound_to(engine_id):
            self._reject(state, "engine_left", f"engine {engine_id} takes no more work")
        if self.reserved is not None and not pool.takes_work(self.reserved[1]):
            self._end_reservation()
        if pool.num_accepting == 0:
            self._no_engine_since = self._now
        else:
            self._check_sizes()
        self._search_all = True

    def _check_sizes(self) -> None:
        for state in self.waiting.all():
            if state.status != "ended":
                self._check_size(state)

    def finish_application(self, application_id: ApplicationId, now: float) -> bool:
        """Note that an application submits no more tasks; return false if it is unknown here."""
        self._now = now
        application = self.applications.by_id.get(application_id)
        if application is None:
            return False
        application.retain_on_pause = False
        if application.retained_tokens:
            self._drop_retained(application)
        application.has_finished = True
        if application.idle_since is not None:
            self.applications.forget(application)
        return True

    def _drop_retained(self, application: Application) -> None:
        """Drop the KV that a paused application left on its engine."""
        engine_id = application.last_engine
        self.applications.release_retained(application)
        if engine_id is not None:
            self._emit(Forget(application.id, engine_id))
            self._search_all = True

    def _expire_retained(self, now: float) -> None:
        self._retention_checked_at = now
        for application in self.retention.expired(self.applications.retained(), self.pool, now):
            if application.retained_tokens:
                self._drop_retained(application)

    def dispatch(self, now: float) -> None:
        """Refuse tasks that waited too long, admit applications, place tasks."""
        self._now = now
        if self.waiting:
            self._refuse_overdue(now)
        if (
            self.applications.num_retained
            and now >= self._retention_checked_at + _RETENTION_CHECK_S
        ):
            self._expire_retained(now)
        self._has_placed = False
        for _ in range(_ROUNDS):
            if self.admission_queue:
                self._admit(now)
            if not self.pool.num_accepting:
                break
            if not (self._search_all or self._first_new is not None):
                break
            # Another round runs only after placements, because held applications may share their
            # prompts.
            self._has_placed = False
            self._search(now)
            if not (self._has_placed and self.admission_queue):
                break
        if self.fills and self.pool.num_accepting and not len(self.order):
            self._start_fills(now)

    def next_due(self, now: float) -> float | None:
        """Return the next time at which a limit comes due without an event; None if never."""
        if not (len(self.waiting) or self.applications.num_retained):
            return None
        config, due = self.config, math.inf
        oldest = self.waiting.oldest()
        if oldest is not None:
            submitted_at, without_engine = oldest.submitted_at, self._no_engine_since
            due = submitted_at + config.max_wait_s
            if without_engine is not None:
                due = min(due, max(submitted_at, without_engine) + config.no_engine_wait_s)
            elif now < submitted_at + config.starvation_s < due:
                due = submitted_at + config.starvation_s
        held = self.admission_queue.oldest()
        if held is not None:
            due = min(due, held.since + config.max_hold_s)
        if self.applications.num_retained:
            due = min(due, self._retention_checked_at + _RETENTION_CHECK_S)
        return max(now, due) if due < math.inf else None

    def _refuse_overdue(self, now: float) -> None:
        config, since = self.config, self._no_engine_since
        while (state := self.waiting.oldest()) is not None:
            waited = now - state.submitted_at
            if (
                since is not None
                and now >= max(state.submitted_at, since) + config.no_engine_wait_s
            ):
                what = "came" if not self.pool.placed else "took work again after its drain"
                text = f"no engine of {self.pool.model} {what} within {config.no_engine_wait_s:g} s"
                self._reject(state, "no_engine", text)
            elif waited >= config.max_wait_s:
                text = f"it waited {waited:.1f} s; at most {config.max_wait_s:g} s are allowed"
                self._reject(state, "wait_too_long", text)
            else:
                return

    def _admit(self, now: float) -> None:
        while (oldest := self.admission_queue.oldest()) is not None:
            if self.pool.num_accepting and now < oldest.since + self.config.max_hold_s:
                break
            self._admit_one(oldest, now)
        if not (self._search_all or self._has_placed):
            return
        for _ in range(_MAX_ADMITTED):
            chosen = self.admission.choose(self.admission_queue.candidates(), self.pool, now)
            held = self.admission_queue.held.get(chosen.id) if chosen is not None else None
            if held is None:
                return
            self._admit_one(held, now)

    def _admit_one(self, held: HeldApplication, now: float) -> None:
        application = held.application
        self._release(held)
        application.admitted = True
        for state in held.tasks.values():
            state.held_s += now - max(held.since, state.submitted_at)
            application.num_held -= 1
            self._enter(state, application)

    def _release(self, held: HeldApplication) -> None:
        self.admission_queue.remove(held)
        self._emit(Release(held.application.id, self.pool.model))

    def _search(self, now: float) -> None:
        """Try to place queued tasks in order until too many have found no room."""
        order = self.order
        first_new, self._first_new = self._first_new, None
        if self._search_all:
            self._search_all = self._search_was_cut = False
            if self._num_blocked:
                order.unblock(now)
                self._num_blocked = 0
            if self.reserved is not None:
                self._try(self.reserved[0], now)
        # Tasks without room count as passed over already.
        misses, allowed = self._num_blocked, self.config.max_passed_over
        while len(order) and self._may_place(now):
            first = order.first(now)
            if first is None:
                return
            if self._search_was_cut and (first_new is None or first.sequence < first_new):
                return
            if self._try(first, now):
                allowed = _MISSES_AFTER_HIT
                continue
            misses += 1
            self._make_room(first, now)
            if misses >= allowed:
                self._search_was_cut = True
                return
            order.block(first)
            self._num_blocked += 1

    def _may_place(self, now: float) -> bool:
        """Return false if every engine is full and further misses would change nothing."""
        if self.pool.has_open_row or self._placed_fills or not self.placement.late_binding:
            return True
        oldest = self.waiting.oldest()
        return oldest is not None and now - oldest.submitted_at >= self.config.starvation_s

    def _try(self, state: TaskState, now: float) -> bool:
        """Try to place a queued task; return true on success."""
        pool = self.pool
        if self.reserved is not None and self.reserved[0] is state:
            # A reserved task goes only to the engine drained for it.
            row = self.reserved[1]
            if not pool.has_room(state, row):
                return False
            choice: EngineChoice | None = self._only(state, row, "starved")
        else:
            choice = self._choose(state, now)
        if choice is None:
            return False
        self._place(state, choice, now)
        if self.config.group_tasks:
            self._place_groups_of(state, now)
        return True

    def _choose(self, state: TaskState, now: float) -> EngineChoice | None:
        pool = self.pool
        late = self.placement.late_binding
        if state.task.bound_to is not None:
            row = pool.row_of(state.task.bound_to)
            if late and not (pool.table.accepts[row] and pool.has_room(state, row)):
                return None
            return self._only(state, row, "bound")
        choice = self.placement.place(state, self._application_of(state), pool, now)
        if choice is None:
            # A policy may wait for running tasks to end; if nothing runs, take an idle engine.
            row = pool.idle_row(state) if pool.is_idle else -1
            return self._only(state, row, "only") if row >= 0 else None
        return choice if pool.accepting >> choice.row & 1 else None

    def _only(self, state: TaskState, row: int, decided_by: str) -> EngineChoice:
        """Make a choice without the placement policy."""
        cached = cached_on(state, self._application_of(state), self.pool, row)
        return EngineChoice(row, decided_by, cached, 1, 0.0)

    def _place_groups_of(self, leader: TaskState, now: float) -> None:
        """Place the other members of a task's groups, largest first, while there is room."""
        for group in leader.groups:
            for _ in range(_MAX_FOLLOWERS):
                member = self.waiting.largest_of(group.id)
                choice = self._choose(member, now) if member is not None else None
                if member is None or choice is None:
                    break
                self._place(member, choice, now)

    def _place(self, state: TaskState, choice: EngineChoice, now: float) -> None:
        pool, task, is_fill = self.pool, state.task, state.task.max_tokens == 0
        application = self.applications.by_id[task.application]
        self._leave_waiting(state)
        if is_fill:
            del self.fills[task.id]
            self._placed_fills[task.id] = state
        else:
            self.order.pop(state, application, now)
            if state.groups:
                self.waiting.leave_groups(state)
            if application.retained_tokens:
                self.applications.release_retained(application)
        application.num_queued -= 1
        application.num_placed += 1
        self._has_placed = True
        explains = self.config.explain and not is_fill
        compared = alternatives(state, application, pool, choice) if explains else ()
        pool.place(state, choice.row, choice.expected_cached_tokens, now)
        if not is_fill:
            self.admission.placed(state, application, pool)
        self.placement.placed(state, choice, pool, now)
        retention = self.retention.retention_of(state, application, pool, now)
        application.retain_on_pause = retention == "keep"
        engine_id = pool.table.ids[choice.row]
        application.last_engine = engine_id
        # Positional arguments are faster, and every decision makes one.
        reasons = Reasons(
            self.placement.name,
            choice.decided_by,
            now - state.submitted_at,
            state.held_s,
            state.expected_cached,
            state.expected_output,
            choice.candidates,
            choice.cost,
            choice.details,
            compared,
        )
        priority = _FILL_PRIORITY if is_fill else _PRIORITIES[state.objective.kind]
        self._emit(Place(task.id, engine_id, priority, retention, reasons))

    def _make_room(self, state: TaskState, now: float) -> None:
        if self._placed_fills:
            running = (fill for fill in self._placed_fills.values() if not fill.is_cancelled)
            for fill in list(islice(running, _MAX_CANCELLED_FILLS)):
                fill.is_cancelled = True
                self._emit(Cancel(fill.task.id, "calls wait for its engine"))
        if now - state.submitted_at >= self.config.starvation_s:
            self._reserve(state)

    def _reserve(self, state: TaskState) -> None:
        """Drain an engine for a task that has waited too long; only one at a time."""
        if self.reserved is not None or not self.placement.late_binding:
            return
        row = self.pool.row_of(state.task.bound_to)
        if row < 0:
            row = self.pool.emptiest_row(state)
        if row >= 0:
            self.reserved = (state, row)
            self.pool.reserve(row)

    def _end_reservation(self) -> None:
        self.reserved = None
        self.pool.reserve(-1)

    def _start_fills(self, now: float) -> None:
        """Place Fills ahead on engines without queued prompt tokens, oldest first."""
        pool = self.pool
        for state in list(islice(self.fills.values(), self.config.max_passed_over)):
            choice = self._choose(state, now)
            if choice is None:
                return
            row = choice.row
            half_full = 2 * pool.table.batch[row] >= pool.table.max_batch[row]
            if not half_full and pool.table.pending_prefill[row] == 0:
                self._place(state, choice, now)
