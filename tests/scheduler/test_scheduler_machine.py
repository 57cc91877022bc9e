"""In any order of events the scheduler loses nothing and its books are right."""

from __future__ import annotations

import math
from collections.abc import Hashable

import pytest
from harness.own_policies import TURNS
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from parrot_scheduler.actions import Action, Cancel, Forget, Hold, Place, Reject, Release, WakeAt
from parrot_scheduler.admission import POLICIES as ADMISSIONS
from parrot_scheduler.config import SchedulerConfig
from parrot_scheduler.engines.pool import EnginePool, block_keys
from parrot_scheduler.engines.table import rows_of
from parrot_scheduler.event_log import replay, write_actions, write_config, write_step
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
from parrot_scheduler.order import POLICIES as ORDERS
from parrot_scheduler.scheduler import Scheduler
from parrot_scheduler.task import EngineDescription, GroupRef, Objective, StepModel, Task

ENGINES = ["e0", "e1", "e2"]
MODELS = ["m0", "m1"]
BLOCK = 16
OBJECTIVES = st.sampled_from(
    [
        Objective(),
        Objective("latency"),
        Objective("deadline", 5.0),
        Objective("tpot", 0.05),
        Objective("ttft", 1.0),
        Objective("tpot", -1.0),
        Objective("deadline"),
    ]
)
GROUPS = st.lists(
    st.builds(GroupRef, st.sampled_from(["g0", "g1", "g2"]), st.integers(1, 6)), max_size=2
).map(tuple)


def chain(family: int, own: int, shared: int, blocks: int) -> tuple[int, ...]:
    """Hashes of a prompt that agrees with others of its family in the first blocks."""
    return tuple(
        hash((family, i)) if i < shared else hash((family, shared, own, i)) for i in range(blocks)
    )


def check_rows(pool: EnginePool) -> None:
    """Each engine's columns are what the tasks placed there come to."""
    scalars = pool.table.scalars
    for row, here in pool.placed.items():
        block = int(scalars.block_tokens[row])
        latency, pending, private, keys, limits = 0, 0.0, 0.0, set[Hashable](), [math.inf]
        for state in here.values():
            task, own = state.task, block_keys(state.task, block)
            latency += task.num_sequences if state.objective.is_latency else 0
            pending += task.prompt_tokens - max(state.filled_tokens, state.expected_cached)
            private += task.prompt_tokens + state.expected_output - len(own) * block
            keys.update(own)
            kind, seconds = state.objective
            if kind == "tpot" and seconds is not None and seconds > 0:
                limits.append(seconds)
        assert scalars.latency_batch[row] == latency
        assert scalars.pending_prefill[row] == pending
        assert scalars.working_set[row] == private + len(keys) * block
        assert scalars.step_limit_s[row] == min(limits)


def check_sums(pool: EnginePool, reserved: int) -> None:
    """Check that sums over all engines agree with their rows."""
    table, rows = pool.table, sorted(pool.placed)
    accepting = [row for row in rows if pool.takes_work(row)]
    open_rows = [row for row in accepting if row != reserved]
    capacity = [table.capacity[row] for row in accepting]
    assert pool.num_idle == sum(not pool.placed[row] for row in rows)
    assert pool.is_idle == (not any(pool.placed.values()))
    assert pool.num_accepting == len(accepting)
    assert (pool.capacity, pool.largest_capacity) == (sum(capacity), max(capacity, default=0))
    assert pool.largest_block == max((table.block_tokens[row] for row in accepting), default=0)
    assert list(rows_of(pool.accepting)) == open_rows
    assert [row for row in range(len(table.accepts)) if table.accepts[row]] == open_rows
    room = [table.capacity[row] for row in open_rows]
    assert pool.largest_accepting == max(room, default=0)
    assert not room or pool.smallest_accepting == min(room)
    blocks = {int(table.block_tokens[row]) for row in open_rows}
    assert pool.common_block == (blocks.pop() if len(blocks) == 1 else -1)
    batch_full = {row for row in rows if table.batch[row] >= table.max_batch[row]}
    no_memory = {row for row in rows if table.working_set[row] >= table.capacity[row]}
    busy = {row for row in rows if table.batch[row]}
    assert set(rows_of(pool.batch_full)) == batch_full
    assert set(rows_of(pool.full)) == batch_full | no_memory
    assert set(rows_of(pool.busy)) == busy
    assert pool.has_open_row == any(row not in busy & (batch_full | no_memory) for row in open_rows)
    loads = {row: table.batch[row] + (0.5 if table.pending_prefill[row] else 0) for row in rows}
    assert {row: load for load, of in pool.rows_by_load.items() for row in rows_of(of)} == loads
    assert pool.total_working_set == pytest.approx(table.working_set.sum())
    assert pool.total_retained == pytest.approx(table.retained.sum())
    needed = pool.total_working_set + pool.total_retained
    assert pool.memory_needed == pytest.approx(needed / pool.capacity if accepting else 0.0)
    fill_s, sequence_s = (
        sum(column[row] for row in open_rows)
        for column in (table.prefill_token_s, table.sequence_s)
    )
    assert pool.decode_work == pytest.approx(2 * sequence_s / fill_s if fill_s else 0.0)


class Machine(RuleBasedStateMachine):
    """A shell that does what it is told, on engines where anything may go wrong."""

    @initialize(
        admission=st.sampled_from(sorted(ADMISSIONS)),
        order=st.sampled_from(sorted(ORDERS)),
        place=st.sampled_from(["parrot", TURNS]),
        keep=st.sampled_from(["none", "hazard"]),
        group_tasks=st.booleans(),
        predict_lengths=st.booleans(),
    )
    def start(
        self,
        admission: str,
        order: str,
        place: str,
        keep: str,
        group_tasks: bool,
        predict_lengths: bool,
    ) -> None:
        self.config = SchedulerConfig(
            admission=admission,
            order=order,
            place=place,
            keep=keep,
            group_tasks=group_tasks,
            predict_lengths=predict_lengths,
            max_queued=40,
            max_wait_s=12.0,
            max_hold_s=6.0,
            starvation_s=3.0,
            no_engine_wait_s=2.0,
            max_applications=3,
            max_tenants=2,
            max_templates=2,
        )
        self.scheduler = Scheduler(self.config)
        self.late = place == "parrot"
        # Whether an output has outgrown what was expected of it: books may overflow from then on.
        self.grown = False
        self.now = 0.0
        self.next_id = 1
        self.tasks: dict[int, Task] = {}
        self.waiting: dict[int, float] = {}
        self.placed: dict[int, str] = {}
        self.ended: list[int] = []
        self.engines: dict[str, EngineDescription] = {}
        self.held: set[tuple[str, str]] = set()
        self.wake_at: float | None = None
        self.log = [write_config(self.config)]
        self.decisions: list[str] = []

    def step(self, *events: Event, now: float | None = None) -> None:
        now = self.now if now is None else now
        self.log.append(write_step(now, events))
        actions = self.scheduler.step(now, events)
        self.decisions.append(write_actions(actions))
        for action in actions:
            self.obey(action)

    def obey(self, action: Action) -> None:
        match action:
            case Place():
                assert action.task_id in self.waiting, "placed twice, or after its end"
                since = self.waiting.pop(action.task_id)
                assert action.reasons.waited_s == self.scheduler.now - since
                task = self.tasks[action.task_id]
                assert self.engines[action.engine_id].model == task.model
                assert task.bound_to in (None, action.engine_id)
                assert 0 <= action.reasons.held_s <= action.reasons.waited_s + 1e-9
                self.placed[action.task_id] = action.engine_id
                self.check_room(action.engine_id, task)
            case Reject():
                if action.code != "duplicate":
                    del self.waiting[action.task_id]
                    self.ended.append(action.task_id)
            case Hold():
                assert (action.model, action.application) not in self.held
                self.held.add((action.model, action.application))
            case Release():
                self.held.remove((action.model, action.application))
            case Cancel():
                assert self.tasks[action.task_id].max_tokens == 0
                assert action.task_id in self.placed
            case WakeAt():
                assert action.time >= self.now
                self.wake_at = action.time
            case Forget():
                assert action.engine_id in self.engines

    def check_room(self, engine_id: str, task: Task) -> None:
        """Check that a placed task can run at once by the scheduler's books, or is alone there."""
        pool = self.scheduler.models[task.model].pool
        row = pool.row_of(engine_id)
        if self.late and len(pool.placed[row]) > 1 and not self.grown:
            assert pool.table.batch[row] <= pool.table.max_batch[row]

    # What callers do

    @rule(
        model=st.sampled_from(MODELS),
        application=st.sampled_from(["a0", "a1", "a2", "a3", "a4"]),
        tenant=st.sampled_from(["t0", "t1", "t2"]),
        family=st.integers(0, 2),
        shared=st.integers(0, 8),
        prompt=st.integers(0, 400),
        max_tokens=st.integers(0, 120),
        template=st.sampled_from(["", "x", "y", "z"]),
        objective=OBJECTIVES,
        groups=GROUPS,
        priority=st.integers(-3, 3),
        successors=st.integers(-1, 4),
        num_sequences=st.integers(1, 5),
        bound_to=st.sampled_from([None, None, None, *ENGINES]),
        copies=st.integers(1, 3),
    )
    def submit(
        self, application: str, family: int, shared: int, prompt: int, copies: int, **rest: object
    ) -> None:
        events: list[Event] = []
        for _ in range(copies):
            prefix = chain(family, self.next_id, shared, prompt // BLOCK)
            task = Task(
                id=self.next_id,
                application=f"{rest['tenant']}/{application}",
                prompt_tokens=prompt,
                prefix=prefix,
                **rest,  # type: ignore[arg-type]
            )
            self.next_id += 1
            self.tasks[task.id] = task
            self.waiting[task.id] = self.now
            events.append(TaskSubmitted(task))
        self.step(*events)

    @precondition(lambda self: self.tasks)
    @rule(data=st.data(), again=st.booleans())
    def submit_twice(self, data: st.DataObject, again: bool) -> None:
        task_id = data.draw(st.sampled_from(sorted(self.tasks)))
        if task_id in self.waiting or task_id in self.placed:
            self.step(TaskSubmitted(self.tasks[task_id]))

    @precondition(lambda self: self.tasks)
    @rule(
        data=st.data(),
        objective=st.none() | OBJECTIVES,
        groups=st.none() | GROUPS,
        priority=st.none() | st.integers(-200, 200),
        successors=st.none() | st.integers(-2, 9),
    )
    def update(self, data: st.DataObject, **changes: object) -> None:
        task_id = data.draw(st.sampled_from(sorted(self.tasks)))
        self.step(TaskUpdated(task_id, **changes))  # type: ignore[arg-type]

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        task_id = data.draw(st.sampled_from(sorted(self.tasks)))
        if self.waiting.pop(task_id, None) is not None or self.placed.pop(task_id, None):
            self.ended.append(task_id)
        self.step(TaskCancelled(task_id))

    @rule(application=st.sampled_from(["t0/a0", "t1/a1", "t2/a2", "nobody"]))
    def finish_application(self, application: str) -> None:
        self.step(ApplicationFinished(application))

    # What engines do

    @precondition(lambda self: self.placed)
    @rule(data=st.data(), counts=st.tuples(*[st.integers(-5, 700)] * 3))
    def progress(self, data: st.DataObject, counts: tuple[int, int, int]) -> None:
        task_id = data.draw(st.sampled_from(sorted(self.placed)))
        placed = self.scheduler.models[self.tasks[task_id].model].pool.placed
        state = next(row[task_id] for row in placed.values() if task_id in row)
        self.grown = self.grown or counts[2] > state.expected_output
        self.step(TaskProgress(task_id, *counts))

    @precondition(lambda self: self.placed)
    @rule(
        data=st.data(),
        cached=st.integers(-5, 500),
        generated=st.integers(-5, 700),
        succeeded=st.booleans(),
        twice=st.booleans(),
    )
    def finish(
        self, data: st.DataObject, cached: int, generated: int, succeeded: bool, twice: bool
    ) -> None:
        task_id = data.draw(st.sampled_from(sorted(self.placed)))
        del self.placed[task_id]
        self.ended.append(task_id)
        event = TaskFinished(task_id, cached, generated, succeeded)
        self.step(event, *[event] * twice)

    @rule(task_id=st.integers(-1, 60))
    def late_news(self, task_id: int) -> None:
        if task_id not in self.placed:
            self.step(TaskFinished(task_id, 0, 1), TaskProgress(task_id, 1, 1, 1))

    @rule(
        engine_id=st.sampled_from(ENGINES),
        model=st.sampled_from(MODELS),
        capacity=st.integers(100, 1500),
        max_batch=st.integers(1, 6),
        block_tokens=st.sampled_from([BLOCK, BLOCK, 0, 32]),
        reports_blocks=st.booleans(),
    )
    def join(
        self,
        engine_id: str,
        model: str,
        capacity: int,
        max_batch: int,
        block_tokens: int,
        reports_blocks: bool,
    ) -> None:
        engine = EngineDescription(
            engine_id, model, capacity, max_batch, 512, block_tokens, reports_blocks=reports_blocks
        )
        self.end_on(engine_id)
        self.engines[engine_id] = engine
        self.step(EngineJoined(engine))

    @rule(engine_id=st.sampled_from(ENGINES))
    def drain(self, engine_id: str) -> None:
        self.step(EngineDraining(engine_id))

    @rule(engine_id=st.sampled_from(ENGINES))
    def resume(self, engine_id: str) -> None:
        self.step(EngineResumed(engine_id))

    @rule(engine_id=st.sampled_from(ENGINES))
    def leave(self, engine_id: str) -> None:
        self.end_on(engine_id)
        self.step(EngineLeft(engine_id))
        self.engines.pop(engine_id, None)

    def end_on(self, engine_id: str) -> None:
        for task_id in [t for t, e in self.placed.items() if e == engine_id]:
            del self.placed[task_id]
            self.ended.append(task_id)

    @rule(
        engine_id=st.sampled_from([*ENGINES, "nobody"]),
        count=st.sampled_from([0, 3, -1, math.nan, math.inf, 10**30]),
        seconds=st.sampled_from([0.0, 1e-3, -1.0, math.nan, math.inf]),
    )
    def report(self, engine_id: str, count: float, seconds: float) -> None:
        model = StepModel(seconds, seconds, seconds, seconds)
        self.step(EngineReport(engine_id, count, 1, 5, model))  # type: ignore[arg-type]

    @rule(
        engine_id=st.sampled_from([*ENGINES, "nobody"]),
        family=st.integers(0, 2),
        shared=st.integers(0, 8),
        evict=st.sampled_from(["stored", "evicted", "all"]),
    )
    def blocks(self, engine_id: str, family: int, shared: int, evict: str) -> None:
        hashes = chain(family, 0, shared, shared)
        if evict == "stored":
            self.step(BlocksStored(engine_id, hashes))
        else:
            self.step(BlocksEvicted(engine_id, None if evict == "all" else hashes))

    # Time

    @rule(seconds=st.floats(0.001, 4.0))
    def wait(self, seconds: float) -> None:
        """Time passes, with a tick whenever the scheduler asked for one."""
        until = self.now + seconds
        while self.wake_at is not None and self.wake_at <= until:
            self.now = max(self.now, self.wake_at)
            self.wake_at = None
            self.step(Tick())
        self.now = until

    @rule(seconds=st.sampled_from([-5.0, math.nan, -math.inf, math.inf]))
    def clock_jumps(self, seconds: float) -> None:
        self.step(Tick(), now=self.now + seconds)

    # What always holds

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        assert self.scheduler.num_tasks == len(self.waiting) + len(self.placed)
        queues = self.scheduler.models
        assert sum(len(queue.waiting) for queue in queues.values()) == len(self.waiting)
        for queue in queues.values():
            held = sum(len(held.tasks) for held in queue.admission_queue.held.values())
            assert len(queue.waiting) == len(queue.order) + len(queue.fills) + held

    @invariant()
    def nobody_waits_too_long(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for since in self.waiting.values():
            assert self.now - since <= self.config.max_wait_s + 4.0

    @invariant()
    def books_are_right(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for model, queue in self.scheduler.models.items():
            pool = queue.pool
            for engine_id, engine in self.engines.items():
                row = pool.row_of(engine_id)
                if engine.model != model or row < 0:
                    continue
                here = [self.tasks[t] for t, e in self.placed.items() if e == engine_id]
                assert pool.table.batch[row] == sum(task.num_sequences for task in here)
                assert 0 <= pool.table.pending_prefill[row] <= sum(t.prompt_tokens for t in here)
                if not here:
                    assert pool.table.working_set[row] == 0
                    assert pool.table.latency_batch[row] == 0
                    assert pool.table.step_limit_s[row] == math.inf
                retained = [a for a in queue.applications.retained() if a.last_engine == engine_id]
                tokens = sum(application.retained_tokens for application in retained)
                assert pool.table.retained[row] == pytest.approx(tokens)
            assert len(queue.applications) <= 3 + len(self.waiting) + len(self.placed)
            check_rows(pool)
            check_sums(pool, -1 if queue.reserved is None else queue.reserved[1])

    def teardown(self) -> None:
        """Once all ends nothing is left, and the log of it all replays to the same decisions."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(400):
            if not (self.waiting or self.placed):
                break
            for task_id in list(self.placed):
                del self.placed[task_id]
                self.step(TaskFinished(task_id, 0, 0))
            self.wait(0.5)
        assert not self.waiting
        assert not self.held
        for queue in self.scheduler.models.values():
            assert queue.waiting.num_groups == 0
            assert queue.reserved is None
            assert queue.pool.num_step_limits == 0
            for application in queue.applications.retained():
                self.step(ApplicationFinished(application.id))
            table = queue.pool.table
            for name in ("batch", "latency_batch", "pending_prefill", "working_set", "retained"):
                assert not getattr(table, name).any(), name
        assert list(replay(self.log, [TURNS])) == self.decisions


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestMachine = Machine.TestCase
