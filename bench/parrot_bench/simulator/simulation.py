"""The scheduler on a virtual clock: simulated clients on one side, simulated engines on the other.

The scheduler is the very one that the gateway runs. This shell turns what clients and engines do
into its events, and carries out its actions.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from parrot_scheduler.actions import Action, Forget, Place, Reject, WakeAt
from parrot_scheduler.config import SchedulerConfig
from parrot_scheduler.events import (
    ApplicationFinished,
    BlocksEvicted,
    BlocksStored,
    EngineJoined,
    EngineReport,
    Event,
    TaskFinished,
    TaskProgress,
    TaskSubmitted,
    Tick,
)
from parrot_scheduler.scheduler import Scheduler
from parrot_scheduler.task import EngineId, GroupRef, Task, TaskId

from parrot_bench.simulator.clients import Clients, RunningCall
from parrot_bench.simulator.clock import Clock
from parrot_bench.simulator.engines.engine import SimulatedEngine
from parrot_bench.simulator.engines.prompts import PromptMaker
from parrot_bench.simulator.engines.sequences import EngineSequence
from parrot_bench.simulator.metrics import Measures, Results
from parrot_bench.simulator.plan import ApplicationPlan, Segment
from parrot_bench.simulator.profiles import MODEL, EngineProfile

#: Shortest time between two reports of an engine.
REPORT_INTERVAL_S = 1.0

#: Called with the time, the events and the actions of each step of the scheduler.
Observer: TypeAlias = Callable[[float, Sequence[Event], Sequence[Action]], None]


class SimulationStuckError(Exception):
    """Calls are unfinished and nothing is going to happen any more."""


def simulate(
    plans: Iterable[ApplicationPlan],
    profile: EngineProfile,
    *,
    engines: int = 1,
    config: SchedulerConfig | None = None,
    observe: Observer | None = None,
) -> Results:
    """Run applications to their end.

    Args:
        plans: what arrives, in that order.
        profile: the kind of all engines.
        engines: how many.
        config: the scheduler's policies and limits.
        observe: is told every step of the scheduler.

    Raises:
        ValueError: a plan that makes no sense.
        SimulationStuckError: the scheduler forgot a call.
    """
    scheduler = Scheduler(config or SchedulerConfig())
    return _Simulation(plans, profile, engines, scheduler, observe).run()


@dataclass(slots=True)
class _Submitted:
    """A call at the server, and its sequence."""

    call: RunningCall
    sequence: EngineSequence


class _Simulation:
    """One run, see `simulate`: the clients' `Server`, and the engines' `Listener`."""

    def __init__(
        self,
        plans: Iterable[ApplicationPlan],
        profile: EngineProfile,
        engines: int,
        scheduler: Scheduler,
        observe: Observer | None,
    ) -> None:
        self._clock = Clock()
        self._scheduler = scheduler
        self._observe = observe
        #: Events for the scheduler's next step.
        self._events: list[Event] = []
        self._tasks: dict[TaskId, _Submitted] = {}
        self._next_task = 0
        self._wake_time: float | None = None
        self._tick_at: float | None = None
        self._prompts = PromptMaker(profile.block_tokens)
        self._clients = Clients(plans, self._clock, self)
        self._engines: dict[EngineId, SimulatedEngine] = {}
        self._reported_at: dict[EngineId, float] = {}
        for index in range(engines):
            engine = SimulatedEngine(f"engine-{index}", profile, self)
            self._engines[engine.id] = engine
            self._reported_at[engine.id] = float("-inf")
            self._events.append(EngineJoined(profile.description(engine.id)))

    # The loop

    def run(self) -> Results:
        thresholds = gc.get_threshold()
        # Next to nothing here is in cycles, and looking for them costs a sixth of the time.
        gc.set_threshold(2_000_000, 50, 50)
        try:
            self._run()
        finally:
            gc.set_threshold(*thresholds)
        clients = self._clients
        total = Measures()
        for measures in clients.kinds.values():
            total.add(measures)
        uses = {name: engine.counts for name, engine in self._engines.items()}
        failures = dict(clients.failures)
        return Results(total, clients.kinds, uses, self._clock.now, failures)

    def _run(self) -> None:
        clock, clients = self._clock, self._clients
        clients.expect_next()
        if self._events:
            self._step()
        due = clock.next_time()
        while clients.live_runs:
            if due is None:
                raise SimulationStuckError(
                    f"{clients.live_runs} applications are unfinished at {clock.now:.3f} s and "
                    f"nothing is due; the scheduler has {self._scheduler.num_tasks} tasks"
                )
            due = clock.advance()
            if self._events and due != clock.now:
                self._step()
                due = clock.next_time()

    def _step(self) -> None:
        events, self._events = self._events, []
        now = self._clock.now
        actions = self._scheduler.step(now, events)
        if self._observe is not None:
            self._observe(now, events, actions)
        for action in actions:
            if isinstance(action, Place):
                sequence = self._tasks[action.task_id].sequence
                sequence.key = (action.priority, 0)
                sequence.retention = action.retention
                self._engines[action.engine_id].submit(now, sequence)
            elif isinstance(action, WakeAt):
                self._wake_at(action.time)
            elif isinstance(action, Reject):
                self._clients.call_failed(self._tasks.pop(action.task_id).call, action.code)
            elif isinstance(action, Forget):
                self._engines[action.engine_id].forget(action.application)

    def _wake_at(self, time: float) -> None:
        self._wake_time = time
        if self._tick_at is None or time < self._tick_at:
            self._tick_at = time
            self._clock.at(time, self._tick, time)

    def _tick(self, time: float, _: object) -> None:
        if time != self._tick_at:
            return
        self._tick_at = None
        if self._wake_time is None:
            return
        if self._wake_time <= self._clock.now:
            self._wake_time = None
            self._events.append(Tick())
        else:
            self._wake_at(self._wake_time)

    # Events of clients

    def submit(self, call: RunningCall) -> None:
        application, plan = call.run.plan, call.plan
        # Tenants share no cached prefixes.
        prompt = self._prompts.make(application.tenant, plan.prompt)
        task = Task(
            self._next_task,
            MODEL,
            application.tenant,
            application.id,
            prompt.tokens,
            plan.max_tokens,
            prompt.hashes(),
            plan.template,
            plan.prompt[0].tokens,
            plan.objective,
            tuple(
                GroupRef(f"{application.id}/{each.id}", each.size, each.objective)
                for each in plan.groups
            ),
            successors=plan.successors,
        )
        self._next_task += 1
        output = None
        if plan.output_tokens:
            content = ("output", application.id, plan.index)
            output = self._prompts.behind(prompt, Segment(content, plan.output_tokens))
        sequence = EngineSequence(
            task.id, prompt, plan.output_tokens, output_part=output, application=application.id
        )
        self._tasks[task.id] = _Submitted(call, sequence)
        self._events.append(TaskSubmitted(task))

    def forget_application(self, application: str) -> None:
        self._events.append(ApplicationFinished(application))

    # Events of engines

    def wake_engine(self, engine: SimulatedEngine, time: float) -> None:
        self._clock.at(time, self._wake, engine)

    def _wake(self, engine: SimulatedEngine, _: object) -> None:
        engine.wake(self._clock.now)

    def filled(self, sequence: EngineSequence) -> None:
        computed = min(sequence.computed, sequence.prompt.tokens)
        self._events.append(
            TaskProgress(sequence.task_id, computed, sequence.cached, sequence.generated)
        )

    def ended(self, sequence: EngineSequence) -> None:
        call = self._tasks.pop(sequence.task_id).call
        succeeded = not sequence.failed
        self._events.append(
            TaskFinished(sequence.task_id, sequence.cached, sequence.generated, succeeded=succeeded)
        )
        if succeeded:
            self._clients.call_done(call, sequence)
        else:
            self._clients.call_failed(call, "too_large_for_engine")

    def stepped(self, engine: SimulatedEngine) -> None:
        now = self._clock.now
        for is_stored, hashes in engine.cache.take_changes():
            kind = BlocksStored if is_stored else BlocksEvicted
            self._events.append(kind(engine.id, hashes))
        if now - self._reported_at[engine.id] >= REPORT_INTERVAL_S:
            self._reported_at[engine.id] = now
            self._events.append(
                EngineReport(engine.id, engine.running, engine.waiting, engine.used_tokens)
            )
