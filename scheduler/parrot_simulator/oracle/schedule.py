"""Fixed schedules: where and when each call of a workload runs, followed by the simulation.

A schedule takes the scheduler's place in the simulation; clients and engines are the usual ones.
So a schedule costs what it would cost, and a recorded one costs what its policy did.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import NamedTuple, TypeAlias

from parrot_scheduler.actions import Action, Forget, Place, Reasons, Retention, WakeAt
from parrot_scheduler.events import ApplicationFinished, Event, TaskFinished, TaskSubmitted
from parrot_scheduler.task import ApplicationId, EngineId, Task, TaskId

from parrot_simulator.metrics import Results
from parrot_simulator.options import SimulationOptions
from parrot_simulator.plan import ApplicationPlan, Workload
from parrot_simulator.simulation import simulate

#: Between two priorities of the scheduler's own, for those of a schedule.
PRIORITY_STEP = 4


class CallKey(NamedTuple):
    """A call, whenever it is submitted."""

    application: ApplicationId
    #: Its index in the application's plan.
    call: int


@dataclass(frozen=True, slots=True)
class Placement:
    """What is decided about a call."""

    #: By its place among the simulation's engines.
    engine: int
    #: For the engine's own queue: smaller runs earlier. `PRIORITY_STEP` times a scheduler's.
    priority: int = 0
    #: Seconds between its submission and its placement.
    delay_s: float = 0.0
    #: Of those that are placed at one moment, smaller goes first.
    order: int = 0
    retention: Retention = "normal"


Schedule: TypeAlias = Mapping[CallKey, Placement]


class FixedWorkload:
    """Plans that are known ahead, each call named by its place so that a schedule finds it.

    Raises:
        ValueError: a plan makes no sense.
    """

    def __init__(self, name: str, plans: Iterable[ApplicationPlan]) -> None:
        self.name = name
        self.plans = tuple(
            replace(plan, calls=tuple(replace(c, template=str(c.index)) for c in plan.calls))
            for plan in plans
        )
        for plan in self.plans:
            plan.check()

    def arrivals(self) -> Iterator[ApplicationPlan]:
        return iter(self.plans)

    def successor(self, finished: ApplicationPlan, now: float) -> ApplicationPlan | None:
        return None


def keys_of(workload: FixedWorkload) -> list[CallKey]:
    return [CallKey(plan.id, call.index) for plan in workload.plans for call in plan.calls]


class ScheduleFollower:
    """Places calls as a schedule says, in the scheduler's place.

    Raises:
        KeyError: at its submission, a call that is not in the schedule.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        #: Due calls, by time and order.
        self._waiting: list[tuple[float, int, TaskId]] = []
        self._placements: dict[TaskId, Placement] = {}
        self._live = 0
        #: Where each application's calls were.
        self._engines: dict[ApplicationId, set[EngineId]] = {}
        self.counts: dict[str, int] = {}
        self.ignored: dict[str, int] = {}

    @property
    def num_tasks(self) -> int:
        return self._live

    def step(self, now: float, events: Iterable[Event]) -> list[Action]:
        actions: list[Action] = []
        for event in events:
            match event:
                case TaskSubmitted():
                    self._submit(event.task, now)
                case TaskFinished():
                    self._live -= 1
                case ApplicationFinished():
                    engines = self._engines.pop(event.application, ())
                    actions += [Forget(event.application, engine) for engine in sorted(engines)]
        while self._waiting and self._waiting[0][0] <= now:
            _, _, task_id = heappop(self._waiting)
            placement = self._placements.pop(task_id)
            actions.append(
                Place(
                    task_id,
                    f"engine-{placement.engine}",
                    placement.priority,
                    placement.retention,
                    REASONS,
                )
            )
        if self._waiting:
            actions.append(WakeAt(self._waiting[0][0]))
        return actions

    def _submit(self, task: Task, now: float) -> None:
        placement = self._schedule[key_of(task)]
        self._live += 1
        self._placements[task.id] = placement
        self._engines.setdefault(task.application, set()).add(f"engine-{placement.engine}")
        heappush(self._waiting, (now + placement.delay_s, placement.order, task.id))


#: Of every placement of a schedule.
REASONS = Reasons(
    policy="schedule",
    decided_by="schedule",
    waited_s=0.0,
    held_s=0.0,
    expected_cached_tokens=0,
    expected_output_tokens=0,
    candidates=1,
    cost=0.0,
)


def key_of(task: Task) -> CallKey:
    """The call of a `FixedWorkload` that a task is of."""
    return CallKey(task.application, int(task.template))


class ScheduleRecorder:
    """Records what a scheduler decides, as a schedule (a `StepLog` of the simulation)."""

    def __init__(self) -> None:
        self.schedule: dict[CallKey, Placement] = {}
        self._tasks: dict[TaskId, tuple[CallKey, float]] = {}

    def record(self, now: float, events: Sequence[Event], actions: Sequence[Action]) -> None:
        for event in events:
            if isinstance(event, TaskSubmitted):
                self._tasks[event.task.id] = (key_of(event.task), now)
        for action in actions:
            if isinstance(action, Place):
                key, submitted = self._tasks.pop(action.task_id)
                self.schedule[key] = Placement(
                    engine=int(action.engine_id.rpartition("-")[2]),
                    priority=PRIORITY_STEP * action.priority,
                    delay_s=now - submitted,
                    order=len(self.schedule),
                    retention=action.retention,
                )


def follow(workload: Workload, options: SimulationOptions, schedule: Schedule) -> Results:
    """Run a workload as a schedule says."""
    return simulate(workload, options, ScheduleFollower(schedule))


def record(
    workload: FixedWorkload, options: SimulationOptions
) -> tuple[Results, dict[CallKey, Placement]]:
    """Run a workload under the policies of `options.config`, and record what they decide."""
    recorder = ScheduleRecorder()
    results = simulate(workload, replace(options, log=recorder))
    return results, recorder.schedule
