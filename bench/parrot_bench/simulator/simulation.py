"""The scheduler on a virtual clock: simulated clients on one side, simulated engines on the other.

The scheduler is the very one that the gateway runs. This shell turns what clients and engines do
into its events, and carries out its actions.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Protocol

from parrot_scheduler.actions import Action, Cancel, Forget, Place, Reject, WakeAt
from parrot_scheduler.events import ApplicationFinished, Event, TaskFinished, TaskSubmitted, Tick
from parrot_scheduler.scheduler import Scheduler
from parrot_scheduler.task import TaskId

from parrot_bench.simulator.clients import Clients, RunningCall
from parrot_bench.simulator.clock import Clock
from parrot_bench.simulator.engines.engine import SimulatedEngine
from parrot_bench.simulator.engines.fleet import Fleet
from parrot_bench.simulator.engines.sequences import EngineSequence
from parrot_bench.simulator.metrics import Results
from parrot_bench.simulator.options import SimulationOptions
from parrot_bench.simulator.plan import Workload
from parrot_bench.simulator.tasks import TaskMaker


class SimulationStuckError(Exception):
    """Calls are unfinished and nothing is going to happen any more."""


class Decider(Protocol):
    """What decides about tasks: the scheduler, or something in its place."""

    #: Actions so far, and ignored events, by kind.
    counts: dict[str, int]
    ignored: dict[str, int]

    @property
    def num_tasks(self) -> int: ...

    def step(self, now: float, events: Iterable[Event]) -> list[Action]:
        """See `Scheduler.step`."""
        ...


def simulate(
    workload: Workload, options: SimulationOptions, decider: Decider | None = None
) -> Results:
    """Run a workload to its end.

    Args:
        workload: what arrives.
        options: engines, clients and policies.
        decider: in place of a scheduler of the policies.

    Raises:
        ValueError: a plan that makes no sense.
        SimulationStuckError: the scheduler forgot a call.
    """
    return _Simulation(workload, options, decider or Scheduler(options.config)).run()


@dataclass(slots=True)
class _Submitted:
    """A call at the server, its sequence, and the engine that it was placed on."""

    call: RunningCall
    sequence: EngineSequence
    engine: SimulatedEngine | None = None


class _Simulation:
    """One run, see `simulate`: the clients' `Server`, and the `Gateway` of the fleet."""

    def __init__(self, workload: Workload, options: SimulationOptions, scheduler: Decider) -> None:
        self._workload = workload
        self._options = options
        self._clock = Clock()
        self._scheduler = scheduler
        #: Events for the scheduler's next step.
        self._events: list[Event] = []
        self._tasks: dict[TaskId, _Submitted] = {}
        self._next_task = 0
        self._wake_time: float | None = None
        self._tick_at: float | None = None
        self._steps = 0
        self._happened = 0
        self._maker = TaskMaker(options)
        self._clients = Clients(workload, options, self._clock, self)
        self._fleet = Fleet(options, self._clock, self)

    # The loop

    def run(self) -> Results:
        thresholds = gc.get_threshold()
        # Next to nothing here is in cycles, and looking for them costs a sixth of the time.
        gc.set_threshold(2_000_000, 50, 50)
        try:
            self._run()
        finally:
            gc.set_threshold(*thresholds)
        return self._results()

    def _run(self) -> None:
        clock, clients, progress = self._clock, self._clients, self._options.progress
        clients.begin()
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
            self._happened += 1
            if self._events and due != clock.now:
                self._step()
                due = clock.next_time()
            if progress is not None and self._happened % 20_000 == 0:
                progress(clients.ended_runs, clock.now)

    def _step(self) -> None:
        events, self._events = self._events, []
        now = self._clock.now
        actions = self._scheduler.step(now, events)
        self._steps += 1
        if self._options.log is not None:
            self._options.log.record(now, events, actions)
        for action in actions:
            if isinstance(action, Place):
                self._place(action)
            elif isinstance(action, WakeAt):
                self._wake_at(action.time)
            elif isinstance(action, Reject):
                self._clients.call_failed(self._tasks.pop(action.task_id).call, action.code)
            elif isinstance(action, Forget):
                engine = self._fleet.engines.get(action.engine_id)
                if engine is not None:
                    engine.forget(action.application)
            elif isinstance(action, Cancel):
                self._cancel(action.task_id)

    def _place(self, action: Place) -> None:
        task = self._tasks[action.task_id]
        task.engine = self._fleet.engines[action.engine_id]
        task.sequence.key = (action.priority, 0)
        task.sequence.retention = action.retention
        task.engine.submit(self._clock.now, task.sequence)

    def _cancel(self, task_id: TaskId) -> None:
        task = self._tasks.pop(task_id)
        if task.engine is not None:
            task.engine.cancel(self._clock.now, task.sequence)
        self.notify(TaskFinished(task_id, task.sequence.cached, 0, succeeded=False))
        self._clients.call_failed(task.call, "cancelled")

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
            self.notify(Tick())
        else:
            self._wake_at(self._wake_time)

    # Events of clients and engines

    def submit(self, call: RunningCall) -> None:
        task_id = self._next_task
        self._next_task += 1
        call.submitted_s = self._clock.now
        task, sequence = self._maker.make(task_id, call)
        self._tasks[task_id] = _Submitted(call, sequence)
        self.notify(TaskSubmitted(task))

    def forget_application(self, application: str) -> None:
        self.notify(ApplicationFinished(application))

    def notify(self, event: Event, _: object = None) -> None:
        self._events.append(event)

    def ended(self, sequence: EngineSequence) -> None:
        call = self._tasks.pop(sequence.task_id).call
        succeeded = not sequence.failed
        self.notify(
            TaskFinished(sequence.task_id, sequence.cached, sequence.generated, succeeded=succeeded)
        )
        if succeeded:
            self._maker.ended(call, self._clock.now)
            self._clients.call_done(call, sequence)
        else:
            self._clients.call_failed(call, "too_large_for_engine")

    def lost(self, sequence: EngineSequence) -> None:
        """See `fleet.Gateway`: it is begun anew, as a new task."""
        self._clients.reach_server(self._tasks.pop(sequence.task_id).call)

    def _results(self) -> Results:
        now, options = self._clock.now, self._options
        clients, recorder = self._clients, self._clients.recorder
        measured_from = clients.measured_from if clients.measured_from is not None else now
        return Results(
            settings={
                "workload": self._workload.name,
                "mode": options.mode,
                "engines": len(options.engines),
                "profiles": sorted({profile.name for profile in options.engines}),
                "seed": options.seed,
                "warm_up": options.warm_up,
                "network_s": [
                    options.network.low_s,
                    options.network.high_s,
                    len(options.network.samples_s),
                ],
                "config": asdict(options.config),
            },
            total=recorder.total(),
            kinds=recorder.kinds,
            tenants=recorder.tenants,
            engines=self._fleet.uses(),
            duration_s=now,
            measured_s=now - measured_from,
            failures=recorder.failures,
            actions=dict(self._scheduler.counts),
            ignored=dict(self._scheduler.ignored),
            events=self._happened,
            scheduler_steps=self._steps,
            timelines=self._fleet.timelines,
        )
