"""The scheduler on a virtual clock: simulated clients on one side, simulated engines on the other.

The scheduler is the very one that the gateway runs. This shell turns what clients and engines do
into its events, and does what its actions say.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, Protocol

from parrot_scheduler.actions import Action, Cancel, Forget, Place, Reject, WakeAt
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
    TaskFinished,
    TaskProgress,
    TaskSubmitted,
    Tick,
)
from parrot_scheduler.scheduler import Scheduler
from parrot_scheduler.simulator import sequence as sequences
from parrot_scheduler.simulator.client import Call, Clients, Network, Run, check
from parrot_scheduler.simulator.clock import Clock
from parrot_scheduler.simulator.engine import SimulatedEngine
from parrot_scheduler.simulator.ledger import Ledger, use_of
from parrot_scheduler.simulator.metrics import Course, EngineUse, Results
from parrot_scheduler.simulator.plan import ApplicationPlan, ClientMode, Segment, Workload
from parrot_scheduler.simulator.profiles import EngineProfile
from parrot_scheduler.simulator.prompt import PromptMaker
from parrot_scheduler.task import EngineId, TaskId

# What is due on the clock.
_APPLICATION, _CALL, _WAKE, _LOADED, _ANSWER, _TELL, _TICK, _CHANGE = range(8)


class SimulationStuckError(Exception):
    """Calls are unfinished and nothing is going to happen any more."""


@dataclass(frozen=True, slots=True)
class Staleness:
    """How late the scheduler learns of things, in seconds. The end of a task is never late."""

    blocks_s: float = 0.0
    progress_s: float = 0.0
    report_s: float = 0.0
    #: Shortest time between two reports of an engine.
    report_interval_s: float = 1.0


class EngineChange(NamedTuple):
    """Something that befalls an engine, by its place among `engines`."""

    at_s: float
    engine: int
    what: Literal["leave", "drain", "join"]


class StepLog(Protocol):
    """Where steps of the scheduler are recorded."""

    def record(self, now: float, events: Sequence[Event], actions: Sequence[Action]) -> None:
        """One step."""
        ...


def simulate(
    workload: Workload,
    *,
    engines: Sequence[EngineProfile],
    config: SchedulerConfig | None = None,
    mode: ClientMode = "graph",
    network: Network | None = None,
    seed: int = 0,
    warm_up: float = 0.0,
    max_applications: int | None = None,
    staleness: Staleness | None = None,
    changes: Sequence[EngineChange] = (),
    share_tenants: bool = False,
    courses: bool = False,
    log: StepLog | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> Results:
    """Run a workload to its end.

    Args:
        workload: What arrives.
        engines: One profile an engine; all with prefix caching must have blocks of one size.
        config: The scheduler's policies and limits.
        mode: How much the server knows of applications.
        network: Round trips of calls; none without.
        seed: Of the network's draws; the workload has its own, the scheduler `config.seed`.
        warm_up: Share of the applications, by order of arrival, that do not count.
        max_applications: Stop taking in applications after so many.
        staleness: How late the scheduler learns of what engines do.
        changes: Engines that leave (their tasks are submitted anew), drain or join again.
        share_tenants: Whether tenants share cached prefixes.
        courses: Record each engine's course over time.
        log: Told of every step of the scheduler.
        progress: Called now and then with applications ended so far and the virtual time.

    Raises:
        ValueError: engines that do not go together, or a plan that makes no sense.
        SimulationStuckError: the scheduler forgot a call.
    """
    return Simulation(
        workload,
        engines=engines,
        config=config or SchedulerConfig(),
        mode=mode,
        network=network or Network(),
        seed=seed,
        warm_up=warm_up,
        max_applications=max_applications,
        staleness=staleness or Staleness(),
        changes=changes,
        share_tenants=share_tenants,
        courses=courses,
        log=log,
        progress=progress,
    ).run()


class Simulation:
    """One run; see `simulate`."""

    def __init__(
        self,
        workload: Workload,
        *,
        engines: Sequence[EngineProfile],
        config: SchedulerConfig,
        mode: ClientMode,
        network: Network,
        seed: int,
        warm_up: float,
        max_applications: int | None,
        staleness: Staleness,
        changes: Sequence[EngineChange],
        share_tenants: bool,
        courses: bool,
        log: StepLog | None,
        progress: Callable[[int, float], None] | None,
    ) -> None:
        if not 0 <= warm_up < 1:
            raise ValueError(f"warm_up must be a share from 0 to below 1, not {warm_up}")
        sizes = {profile.block_tokens for profile in engines if profile.prefix_caching}
        if len(sizes) > 1:
            raise ValueError(f"engines' blocks must be of one size, not {sorted(sizes)}")
        for change in changes:
            if not 0 <= change.engine < len(engines):
                raise ValueError(f"changes: there is no engine {change.engine}")
        self.clock = Clock()
        self.scheduler = Scheduler(config)
        self._workload = workload
        self._network = network
        self._seed = seed
        self._staleness = staleness
        self._log = log
        self._progress = progress
        self._max_applications = max_applications
        self._hashed = bool(sizes)
        self._maker = PromptMaker(sizes.pop() if sizes else 16)
        self._clients = Clients(mode, self._maker, share_tenants=share_tenants)
        self._profiles = list(engines)
        self._with_courses = courses
        self._courses: dict[str, Course] = {}
        self._engines: dict[EngineId, SimulatedEngine] = {}
        self._reported_at: dict[EngineId, float] = {}
        self._used: list[EngineUse] = []
        self._events: list[Event] = []
        self._tasks: dict[TaskId, tuple[Call, sequences.Sequence, SimulatedEngine | None]] = {}
        self._next_task = 0
        self._wish: float | None = None
        self._tick_at: float | None = None
        self._arrivals: Iterator[ApplicationPlan] = iter(workload.arrivals())
        self._expected = 0
        self._started = 0
        #: Applications that run or are due.
        self._live_runs = 0
        self._ended_runs = 0
        self._ledger = Ledger()
        self._steps = 0
        self._happened = 0
        self._measured_from: float | None = None
        self._settings: dict[str, Any] = {
            "workload": workload.name,
            "mode": mode,
            "engines": len(engines),
            "profiles": sorted({profile.name for profile in engines}),
            "seed": seed,
            "warm_up": warm_up,
            "network_s": [network.low_s, network.high_s, len(network.samples_s)],
            "config": asdict(config),
        }
        self._first_counted = self._count_warm_up(warm_up)
        for index in range(len(engines)):
            self._join(index)
        for change in changes:
            self.clock.at(change.at_s, _CHANGE, change)

    def _count_warm_up(self, warm_up: float) -> int:
        """How many applications come before those that count."""
        if not warm_up:
            return 0
        count = 0
        for _ in self._workload.arrivals():
            count += 1
            if count == self._max_applications:
                break
        return int(count * warm_up)

    # The loop

    def run(self) -> Results:
        """Run to the end."""
        thresholds = gc.get_threshold()
        # Next to nothing here is in cycles, and looking for them costs a sixth of the time.
        gc.set_threshold(200_000, 50, 50)
        try:
            return self._run()
        finally:
            gc.set_threshold(*thresholds)

    def _run(self) -> Results:
        clock = self.clock
        # In the order of their kinds.
        handlers: Sequence[Callable[[Any, Any], None]] = (
            self._application_arrives,
            self._call_arrives,
            self._engine_wakes,
            self._engine_loaded,
            self._answer_arrives,
            self._scheduler_hears,
            self._tick,
            self._engine_changes,
        )
        self._next_arrival()
        if self._events:
            self._step()
        while self._live_runs:
            next_time = clock.next_time()
            if next_time is None:
                raise SimulationStuckError(
                    f"{self._live_runs} applications are unfinished at {clock.now:.3f} s and "
                    f"nothing is due; the scheduler has {self.scheduler.num_tasks} tasks"
                )
            _, _, kind, subject, argument = clock.advance()
            handlers[kind](subject, argument)
            self._happened += 1
            if self._events and clock.next_time() != clock.now:
                self._step()
            if self._progress is not None and self._happened % 20_000 == 0:
                self._progress(self._ended_runs, clock.now)
        return self._results()

    def _step(self) -> None:
        events, self._events = self._events, []
        now = self.clock.now
        actions = self.scheduler.step(now, events)
        self._steps += 1
        if self._log is not None:
            self._log.record(now, events, actions)
        for action in actions:
            if isinstance(action, Place):
                self._place(action)
            elif isinstance(action, WakeAt):
                self._wake_at(action.time)
            elif isinstance(action, Reject):
                call, _, _ = self._tasks.pop(action.task_id)
                self._call_failed(call, action.code)
            elif isinstance(action, Forget):
                engine = self._engines.get(action.engine_id)
                if engine is not None:
                    engine.forget(action.application)
            elif isinstance(action, Cancel):
                self._cancel(action.task_id)

    def _place(self, action: Place) -> None:
        engine = self._engines[action.engine_id]
        call, sequence, _ = self._tasks[action.task_id]
        sequence.key = (action.priority, 0)
        sequence.retention = action.retention
        self._tasks[action.task_id] = (call, sequence, engine)
        engine.submit(self.clock.now, sequence)

    def _cancel(self, task_id: TaskId) -> None:
        call, sequence, engine = self._tasks.pop(task_id)
        if engine is not None:
            engine.cancel(self.clock.now, sequence)
        self._events.append(TaskFinished(task_id, sequence.cached, 0, succeeded=False))
        self._call_failed(call, "cancelled")

    def _wake_at(self, time: float) -> None:
        self._wish = time
        if self._tick_at is None or time < self._tick_at:
            self._tick_at = time
            self.clock.at(time, _TICK, time)

    def _tick(self, time: float, _: object) -> None:
        if time != self._tick_at:
            return
        self._tick_at = None
        if self._wish is None:
            return
        if self._wish <= self.clock.now:
            self._wish = None
            self._events.append(Tick())
        else:
            self._wake_at(self._wish)

    def _tell(self, event: Event, delay_s: float) -> None:
        if delay_s > 0:
            self.clock.at(self.clock.now + delay_s, _TELL, event)
        else:
            self._events.append(event)

    def _scheduler_hears(self, event: Event, _: object) -> None:
        self._events.append(event)

    # Clients

    def _next_arrival(self) -> None:
        """Look at the next application of the open loop."""
        if self._may_expect():
            plan = next(self._arrivals, None)
            if plan is not None:
                self._expect(plan, plan.arrival_s, is_open_loop=True)

    def _may_expect(self) -> bool:
        return self._max_applications is None or self._expected < self._max_applications

    def _expect(self, plan: ApplicationPlan, time: float, *, is_open_loop: bool) -> None:
        self._expected += 1
        self._live_runs += 1
        self.clock.at(time, _APPLICATION, plan, is_open_loop)

    def _application_arrives(self, plan: ApplicationPlan, is_open_loop: bool) -> None:
        check(plan)
        ordinal = self._started
        self._started += 1
        counted = ordinal >= self._first_counted
        if counted and self._measured_from is None:
            self._measured_from = self.clock.now
        run = Run(plan, ordinal, self._network, self._seed, counted=counted)
        run.arrived_s = self.clock.now
        for call in run.calls:
            if not call.plan.after:
                call.inputs_at = run.arrived_s
                self._send(call)
        if is_open_loop:
            self._next_arrival()

    def _send(self, call: Call) -> None:
        """The client sends a call, once its pause is over."""
        call.run.live += 1
        call.start_s = call.inputs_at + call.plan.pause_s
        self.clock.at(call.start_s + call.round_trip_s / 2, _CALL, call)

    def _call_arrives(self, call: Call, _: object) -> None:
        """A call is at the server, with all that it needs."""
        if call.run.failed:
            self._call_ended(call)
            return
        task_id = call.task_id = self._next_task
        self._next_task += 1
        call.submitted_s = self.clock.now
        plan = call.plan
        prompt = self._clients.prompt_of(call)
        application = call.run.plan
        output = None
        if plan.output_tokens and self._hashed:
            content = ("output", application.id, plan.index)
            output = self._maker.behind(prompt, Segment(content, plan.output_tokens))
        task = self._clients.task_of(task_id, call, prompt, hashed=self._hashed)
        sequence = sequences.Sequence(
            task_id,
            prompt,
            plan.output_tokens,
            max_tokens=plan.max_tokens,
            output_part=output,
            application=task.application,
        )
        self._tasks[task_id] = (call, sequence, None)
        self._events.append(TaskSubmitted(task))

    def _answer_arrives(self, call: Call, _: object) -> None:
        """A call's output is at its client: what waits for it there goes on."""
        for index in call.run.consumers[call.plan.index]:
            consumer = call.run.calls[index]
            if not self._clients.stays_inside(consumer.plan):
                self._input(consumer)
        call.run.ended_s = max(call.run.ended_s, self.clock.now)
        self._call_ended(call)

    def _input(self, consumer: Call) -> None:
        consumer.missing -= 1
        consumer.inputs_at = self.clock.now
        if consumer.missing or consumer.run.failed:
            return
        if self._clients.stays_inside(consumer.plan):
            consumer.run.live += 1
            consumer.start_s = self.clock.now
            self._call_arrives(consumer, None)
        else:
            self._send(consumer)

    def _call_done(self, call: Call, sequence: sequences.Sequence, engine: SimulatedEngine) -> None:
        """The server has all of a call's output."""
        now = self.clock.now
        run = call.run
        run.unfinished -= 1
        consumers = [run.calls[index] for index in run.consumers[call.plan.index]]
        inside = [c for c in consumers if self._clients.stays_inside(c.plan)]
        back_s = 0.0
        if len(inside) < len(consumers) or not consumers:
            back_s = call.round_trip_s / 2
        self._ledger.add_call(call, sequence, now, back_s)
        for consumer in inside:
            self._input(consumer)
        if back_s or len(inside) < len(consumers) or not consumers:
            self.clock.at(now + back_s, _ANSWER, call)
        else:
            self._call_ended(call)

    def _call_failed(self, call: Call, code: str) -> None:
        """A call will have no output: its application is given up."""
        run = call.run
        if not run.failed:
            run.failed = code
            self._ledger.add_failure(code)
        self._call_ended(call)

    def _call_ended(self, call: Call) -> None:
        run = call.run
        run.live -= 1
        if run.live or (run.unfinished and not run.failed):
            return
        now = self.clock.now
        plan = run.plan
        if self._clients.mode == "graph":
            self._events.append(ApplicationFinished(plan.id))
        self._ledger.add_application(run)
        self._live_runs -= 1
        self._ended_runs += 1
        # Each call refers to its run: without this only the garbage collector would free them.
        run.calls = []
        if self._may_expect():
            successor = self._workload.successor(plan, now)
            if successor is not None:
                self._expect(successor, max(now, successor.arrival_s), is_open_loop=False)

    # Engines

    def _join(self, index: int) -> None:
        profile = self._profiles[index]
        engine_id = f"engine-{index}"
        engine = SimulatedEngine(engine_id, profile, self)
        if self._with_courses:
            engine.timeline = self._courses.setdefault(engine_id, Course())
        self._engines[engine_id] = engine
        self._reported_at[engine_id] = float("-inf")
        self._events.append(EngineJoined(profile.description(engine_id)))

    def _engine_changes(self, change: EngineChange, _: object) -> None:
        engine_id = f"engine-{change.engine}"
        engine = self._engines.get(engine_id)
        if change.what == "join":
            if engine is None:
                self._join(change.engine)
        elif engine is None:
            return
        elif change.what == "drain":
            self._events.append(EngineDraining(engine_id))
        else:
            lost = engine.stop(self.clock.now)
            self._used.append(use_of(engine))
            del self._engines[engine_id]
            self._events.append(EngineLeft(engine_id))
            for sequence in lost:
                call, _, _ = self._tasks.pop(sequence.task_id)
                # Begun anew, as a new task.
                self._call_arrives(call, None)

    def _engine_wakes(self, engine: SimulatedEngine, version: int) -> None:
        engine.wake(self.clock.now, version)

    def _engine_loaded(self, engine: SimulatedEngine, sequence: sequences.Sequence) -> None:
        engine.finish_loading(self.clock.now, sequence)

    def wake_engine(self, engine: SimulatedEngine, time: float, version: int) -> None:
        """See `engine.Listener`."""
        self.clock.at(time, _WAKE, engine, version)

    def loaded(self, engine: SimulatedEngine, sequence: sequences.Sequence, time: float) -> None:
        """See `engine.Listener`."""
        self.clock.at(time, _LOADED, engine, sequence)

    def filled(self, engine: SimulatedEngine, sequence: sequences.Sequence, now: float) -> None:
        """See `engine.Listener`."""
        event = TaskProgress(
            sequence.task_id,
            min(sequence.computed, sequence.prompt.tokens),
            sequence.cached,
            sequence.generated,
        )
        self._tell(event, self._staleness.progress_s)

    def ended(self, engine: SimulatedEngine, sequence: sequences.Sequence, now: float) -> None:
        """See `engine.Listener`."""
        call, _, _ = self._tasks.pop(sequence.task_id)
        succeeded = not sequence.failed
        self._events.append(
            TaskFinished(sequence.task_id, sequence.cached, sequence.generated, succeeded=succeeded)
        )
        if succeeded:
            self._call_done(call, sequence, engine)
        else:
            self._call_failed(call, "too_large_for_engine")

    def stepped(self, engine: SimulatedEngine, now: float) -> None:
        """See `engine.Listener`."""
        staleness = self._staleness
        changes = engine.cache.changes
        if changes:
            engine.cache.changes = []
            for stored, hashes in changes:
                kind = BlocksStored if stored else BlocksEvicted
                self._tell(kind(engine.id, hashes), staleness.blocks_s)
        if now - self._reported_at[engine.id] >= staleness.report_interval_s:
            self._reported_at[engine.id] = now
            report = EngineReport(engine.id, engine.running, engine.waiting, engine.used_tokens)
            self._tell(report, staleness.report_s)

    # The end

    def _results(self) -> Results:
        now = self.clock.now
        self._used += [use_of(engine) for engine in self._engines.values()]
        measured_from = self._measured_from if self._measured_from is not None else now
        return Results(
            settings=self._settings,
            total=self._ledger.total(),
            kinds=self._ledger.kinds,
            tenants=self._ledger.tenants,
            engines=self._used,
            duration_s=now,
            measured_s=now - measured_from,
            failures=self._ledger.failures,
            actions=dict(self.scheduler.counts),
            ignored=dict(self.scheduler.ignored),
            events=self._happened,
            scheduler_steps=self._steps,
            courses=self._courses,
        )
