"""Finds places for what waits on one model: bounds, admission, order, placement, in this order."""

from __future__ import annotations

from itertools import islice
from typing import Literal

from parrot_scheduler.actions import Cancel, Place, Reasons
from parrot_scheduler.policy import Choice, Wait
from parrot_scheduler.queue.admission_queue import Held
from parrot_scheduler.queue.blocked_tasks import Aside
from parrot_scheduler.queue.model_queue import ModelQueue
from parrot_scheduler.task_state import Entry

#: Seconds between two looks at what paused applications keep.
KEEP_CHECK_S = 1.0
#: Held applications that enter at once.
_MAX_LET_IN = 64
#: Rounds of admission and placement in one step.
_ROUNDS = 4
#: Members of a group that follow the first one at once.
_MAX_FOLLOWERS = 256
#: Fills that are stopped at once for a task without room.
_MAX_STOPPED_FILLS = 8
#: Once one task found room in a step, so many without room end the search.
_MISSES_AFTER_HIT = 1
#: No more than so many are set aside until there is room.
_MAX_ASIDE = 64
#: What an engine's own queue goes by: smaller runs earlier.
_PRIORITIES = {"latency": 0, "ttft": 0, "tpot": 0, "deadline": 1, "throughput": 2}
_FILL_PRIORITY = 3


def _goes_before(returning: Entry, first: Entry | None) -> bool:
    """Whether a task that was set aside, and may find its place now, goes before the first one.

    Its turn had come already, so it does; but not before a call that somebody waits for if nobody
    waits for it.
    """
    return first is None or returning.objective.is_latency or not first.objective.is_latency


class Dispatcher:
    """Places the tasks of one `ModelQueue`. Called once at the end of every step."""

    def __init__(self, queue: ModelQueue) -> None:
        self.queue = queue
        self.pool = queue.pool
        self.config = queue.config
        # The last search ended before all tasks were looked at.
        self._gave_up = False
        self._aside = Aside(queue.pool)
        self._has_placed = False
        self._kept_checked = 0.0

    def run(self, now: float) -> None:
        """Refuse what waited too long, let applications in, place what can be placed."""
        queue = self.queue
        queue.now = now
        if queue.waiting:
            self._refuse(now)
        if queue.applications.num_kept and now >= self._kept_checked + KEEP_CHECK_S:
            self._kept_checked = now
            paused = queue.applications.kept()
            for application in queue.keep.expired(paused, self.pool, now):
                if application.kept_tokens:
                    queue.drop_kept(application)
        self._has_placed = False
        for _ in range(_ROUNDS):
            if queue.door:
                self._let_in(now)
            if not self.pool.num_accepting:
                break
            if not (queue.has_room or queue.opened or queue.fresh_from is not None):
                break
            # What has been placed may share its prompt with what is held.
            self._has_placed = False
            self._search(now)
            if not (self._has_placed and queue.door):
                break
        if queue.fills and self.pool.num_accepting and not len(queue.order):
            self._start_fills(now)

    def next_bound(self, now: float) -> float | None:
        """When something is due although nothing happens; None: never."""
        queue, config = self.queue, self.config
        times: list[float] = []
        oldest = next(iter(queue.waiting.values()), None)
        if oldest is not None:
            times.append(oldest.submitted_at + config.max_wait_s)
            if queue.no_engine_since is not None:
                since = max(oldest.submitted_at, queue.no_engine_since)
                times.append(since + config.no_engine_wait_s)
            starving = oldest.submitted_at + config.starvation_s
            if starving > now and queue.no_engine_since is None:
                times.append(starving)
        held = queue.door.oldest()
        if held is not None:
            times.append(held.since + config.max_hold_s)
        if queue.applications.num_kept:
            times.append(self._kept_checked + KEEP_CHECK_S)
        return max(now, min(times)) if times else None

    # Bounds

    def _refuse(self, now: float) -> None:
        queue, config = self.queue, self.config
        while queue.waiting:
            entry = next(iter(queue.waiting.values()))
            waited = now - entry.submitted_at
            since = queue.no_engine_since
            if (
                since is not None
                and now >= max(entry.submitted_at, since) + config.no_engine_wait_s
            ):
                text = f"no engine of {self.pool.model} came within {config.no_engine_wait_s:g} s"
                queue.reject(entry, "no_engine", text)
            elif waited >= config.max_wait_s:
                text = f"it waited {waited:.1f} s; at most {config.max_wait_s:g} s are allowed"
                queue.reject(entry, "wait_too_long", text)
            else:
                return

    # Admission

    def _let_in(self, now: float) -> None:
        queue = self.queue
        while (oldest := queue.door.oldest()) is not None:
            if self.pool.num_accepting and now < oldest.since + self.config.max_hold_s:
                break
            self._release(oldest, now)
        if not (queue.has_room or queue.opened or self._has_placed):
            return
        for _ in range(_MAX_LET_IN):
            chosen = queue.admission.next_of(queue.door.shown(), self.pool, now)
            held = queue.door.get(chosen.id) if chosen is not None else None
            if held is None:
                return
            self._release(held, now)

    def _release(self, held: Held, now: float) -> None:
        queue, application = self.queue, held.application
        queue.let_in(held)
        application.admitted = True
        for entry in held.entries.values():
            entry.held_s += now - max(held.since, entry.submitted_at)
            application.num_held -= 1
            queue.enter(entry, application)

    # Placement

    def _search(self, now: float) -> None:
        queue, order, aside = self.queue, self.queue.order, self._aside
        fresh_from, queue.fresh_from = queue.fresh_from, None
        opened, queue.opened = queue.opened, 0
        if queue.has_room and aside:
            order.bring_back(now)
            aside.clear()
        if queue.has_room or opened:
            queue.has_room = self._gave_up = False
            if queue.reserved is not None:
                self._try(queue.reserved[0], now)
        fitting = aside.fitting(opened, now - self.config.starvation_s)
        if fitting:
            order.bring_back(now, fitting)
            for entry in fitting:
                aside.discard(entry)
        awaited = aside.awaited(opened, now)
        returning = next(awaited, None)
        # Those without room have been passed over already.
        misses, vain, allowed = aside.num_without_room, 0, self.config.max_passed_over
        while self._has_hope(now):
            first = order.first(now)
            if returning is not None and _goes_before(returning, first):
                if returning in aside:
                    wait = self._try(returning, now)
                    if wait is True:
                        allowed = _MISSES_AFTER_HIT
                    else:
                        vain += 1
                        aside.add(returning, wait)
                        self._missed(returning, now)
                returning = next(awaited, None) if vain < self.config.max_passed_over else None
                continue
            if first is None:
                return
            if self._gave_up and (fresh_from is None or first.sequence < fresh_from):
                return
            wait = self._try(first, now)
            if wait is True:
                allowed = _MISSES_AFTER_HIT
                continue
            misses += 1
            self._missed(first, now)
            if misses >= allowed or len(aside) >= _MAX_ASIDE:
                self._gave_up = True
                return
            order.set_aside(first)
            aside.add(first, wait)

    def _missed(self, entry: Entry, now: float) -> None:
        """Real work found no place."""
        self._stop_fills()
        if now - entry.submitted_at >= self.config.starvation_s:
            self._reserve(entry)

    def _has_hope(self, now: float) -> bool:
        """False: every engine is full, and nothing comes of it that a task finds no place."""
        queue = self.queue
        if self.pool.has_open_row or queue.placed_fills or not queue.place.late_binding:
            return True
        oldest = next(iter(queue.waiting.values()), None)
        return oldest is not None and now - oldest.submitted_at >= self.config.starvation_s

    def _try(self, entry: Entry, now: float) -> Wait | Literal[True] | None:
        """True: a queued task found its place; otherwise what it waits for."""
        queue, pool = self.queue, self.pool
        if queue.reserved is not None and queue.reserved[0] is entry:
            # Its engine takes it, and nobody else.
            row = queue.reserved[1]
            if not pool.has_room(entry, row):
                return None
            choice: Choice | Wait | None = self._only(entry, row, "starved")
        else:
            choice = self._choose(entry, now)
        if not isinstance(choice, Choice):
            return choice
        self._place(entry, choice, now)
        if self.config.group_tasks:
            self._follow(entry, now)
        return True

    def _choose(self, entry: Entry, now: float) -> Choice | Wait | None:
        queue, pool = self.queue, self.pool
        late = queue.place.late_binding
        if entry.task.bound_to is not None:
            row = pool.row_of(entry.task.bound_to)
            if late and not (pool.table.accepts[row] and pool.has_room(entry, row)):
                return None
            return self._only(entry, row, "bound")
        if late and not pool.may_have_room(entry):
            row = pool.idle_row(entry)
            return self._only(entry, row, "only") if row >= 0 else None
        choice = queue.place.place(entry, queue.application_of(entry), pool, now)
        if not isinstance(choice, Choice):
            # A policy may wait for something to end; where nothing runs, nothing will.
            row = pool.idle_row(entry) if pool.is_idle else -1
            return self._only(entry, row, "only") if row >= 0 else choice
        return choice if pool.accepting >> choice.row & 1 else None

    def _only(self, entry: Entry, row: int, decided_by: str) -> Choice:
        """A place that no policy was asked for."""
        return Choice(row, decided_by, self.pool.cached_on(entry, row), 1, 0.0)

    def _follow(self, leader: Entry, now: float) -> None:
        """The rest of its groups is placed at once, the longest first, as far as there is room."""
        queue = self.queue
        for group in leader.groups:
            for _ in range(_MAX_FOLLOWERS):
                members = queue.groups.get(group.id)
                member = members.first() if members is not None else None
                choice = self._choose(member, now) if member is not None else None
                if member is None or not isinstance(choice, Choice):
                    break
                self._place(member, choice, now)

    def _place(self, entry: Entry, choice: Choice, now: float) -> None:
        queue, pool, task = self.queue, self.pool, entry.task
        application = queue.application_of(entry)
        queue.leave_waiting(entry)
        if entry.is_fill:
            del queue.fills[task.id]
            queue.placed_fills[task.id] = entry
        else:
            queue.order.pop(entry, application, now)
            self._aside.discard(entry)
            queue.leave_groups(entry)
            queue.applications.let_go(application)
        application.num_queued -= 1
        application.num_placed += 1
        self._has_placed = True
        pool.place(entry, choice.row, choice.expected_cached_tokens, now)
        if not entry.is_fill:
            queue.admission.placed(entry, application, pool)
        queue.place.placed(entry, choice, pool, now)
        retention = queue.keep.retention(entry, application, pool, now)
        queue.will_keep(application, keep=retention == "keep")
        application.last_engine = entry.engine_id
        queue.emit(
            Place(
                task.id,
                pool.table.ids[choice.row],
                _FILL_PRIORITY if entry.is_fill else _PRIORITIES[entry.objective.kind],
                retention,
                Reasons(
                    policy=queue.place.name,
                    decided_by=choice.decided_by,
                    waited_s=now - entry.submitted_at,
                    held_s=entry.held_s,
                    expected_cached_tokens=entry.expected_cached,
                    expected_output_tokens=entry.expected_output,
                    candidates=choice.candidates,
                    cost=choice.cost,
                    details=choice.details,
                ),
            )
        )

    def _reserve(self, entry: Entry) -> None:
        """Drain an engine for a task that waited too long; one at a time."""
        queue, pool = self.queue, self.pool
        if queue.reserved is not None or not queue.place.late_binding:
            return
        row = pool.row_of(entry.task.bound_to)
        if row < 0:
            row = pool.emptiest_row(entry)
        if row >= 0:
            queue.reserved = (entry, row)
            pool.reserve(row)

    # Fills done ahead

    def _start_fills(self, now: float) -> None:
        """One for each engine that nothing else keeps from it, oldest first."""
        queue, pool = self.queue, self.pool
        for entry in list(islice(queue.fills.values(), self.config.max_passed_over)):
            choice = self._choose(entry, now)
            if not isinstance(choice, Choice):
                return
            row = choice.row
            half_full = 2 * pool.table.batch[row] >= pool.table.max_batch[row]
            if not half_full and pool.table.pending_prefill[row] == 0:
                self._place(entry, choice, now)

    def _stop_fills(self) -> None:
        """Real work has no room: Fills make room, oldest first."""
        queue = self.queue
        if not queue.placed_fills:
            return
        running = (fill for fill in queue.placed_fills.values() if not fill.is_cancelled)
        for fill in list(islice(running, _MAX_STOPPED_FILLS)):
            fill.is_cancelled = True
            queue.emit(Cancel(fill.task.id, "calls wait for its engine"))
