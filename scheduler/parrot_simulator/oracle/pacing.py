"""Schedules whose engines get one prompt after the other, so that steps stay short.

A step takes as long as what it fills, and every sequence that decodes in it waits so long for its
next token. An engine takes what it has as soon as it has room in a step; so the way to shorter
steps is to hold calls back until prompts placed before them are filled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from heapq import heappop, heappush

from parrot_scheduler.actions import Action, Place
from parrot_scheduler.events import Event, TaskFinished, TaskProgress, TaskSubmitted
from parrot_scheduler.task import Task, TaskId

from parrot_simulator.options import SimulationOptions
from parrot_simulator.oracle.schedule import (
    PRIORITY_STEP,
    REASONS,
    CallKey,
    FixedWorkload,
    Placement,
    Schedule,
    ScheduleRecorder,
    key_of,
)
from parrot_simulator.simulation import simulate

#: Smaller is placed earlier.
Rank = Callable[[CallKey, Task], float]


class PacedFollower:
    """Places calls as engines have filled what they got before, in the scheduler's place.

    Args:
        schedule: the engine and priority of each call; None: where the product of tokens to fill
            and of sequences is smallest, by objective.
        engines: in number.
        limit: tokens that an engine has to fill at most, unless it is one prompt alone.
        rank: of the calls that wait, ties by submission.
    """

    def __init__(self, schedule: Schedule | None, engines: int, limit: int, rank: Rank) -> None:
        self._schedule = schedule
        self._limit = limit
        self._rank = rank
        self._waiting: list[tuple[float, TaskId, Task]] = []
        #: By engine: tokens to fill, by task; and tasks.
        self._unfilled: list[dict[TaskId, int]] = [{} for _ in range(engines)]
        self._live: list[set[TaskId]] = [set() for _ in range(engines)]
        self._engine_of: dict[TaskId, int] = {}
        self._prompts: dict[TaskId, int] = {}
        self.counts: dict[str, int] = {}
        self.ignored: dict[str, int] = {}

    @property
    def num_tasks(self) -> int:
        return len(self._waiting) + len(self._engine_of)

    def step(self, now: float, events: Iterable[Event]) -> list[Action]:
        for event in events:
            match event:
                case TaskSubmitted():
                    task = event.task
                    heappush(self._waiting, (self._rank(key_of(task), task), task.id, task))
                    self._prompts[task.id] = task.prompt_tokens
                case TaskProgress():
                    self._filled(event.task_id, event.filled_tokens)
                case TaskFinished():
                    engine = self._engine_of.pop(event.task_id)
                    self._unfilled[engine].pop(event.task_id, None)
                    self._live[engine].discard(event.task_id)
                    del self._prompts[event.task_id]
        return self._place()

    def _filled(self, task_id: TaskId, tokens: int) -> None:
        unfilled = self._unfilled[self._engine_of[task_id]]
        if task_id in unfilled:
            left = self._prompts[task_id] - tokens
            if left > 0:
                unfilled[task_id] = left
            else:
                del unfilled[task_id]

    def _place(self) -> list[Action]:
        actions: list[Action] = []
        passed: list[tuple[float, TaskId, Task]] = []
        full = 0
        while self._waiting and full < len(self._live):
            entry = heappop(self._waiting)
            task = entry[2]
            engine = self._choose(task)
            if engine is None:
                passed.append(entry)
                full = sum(1 for unfilled in self._unfilled if unfilled)
                continue
            self._engine_of[task.id] = engine
            self._unfilled[engine][task.id] = task.prompt_tokens
            self._live[engine].add(task.id)
            priority = 0 if task.objective.is_latency else 2 * PRIORITY_STEP
            retention = Placement(engine).retention
            if self._schedule is not None:
                planned = self._schedule[key_of(task)]
                priority, retention = planned.priority, planned.retention
            actions.append(Place(task.id, f"engine-{engine}", priority, retention, REASONS))
        for entry in passed:
            heappush(self._waiting, entry)
        return actions

    def _choose(self, task: Task) -> int | None:
        """An engine with room in its steps; None: it has to wait."""
        rows: Iterable[int] = range(len(self._live))
        if self._schedule is not None:
            rows = (self._schedule[key_of(task)].engine,)
        pending = {row: sum(self._unfilled[row].values()) for row in rows}
        new = task.prompt_tokens
        open_rows = [
            row for row, tokens in pending.items() if not tokens or tokens + new <= self._limit
        ]
        if not open_rows:
            return None
        return min(open_rows, key=lambda row: (pending[row] + new) * (len(self._live[row]) + 1))


def paced(
    workload: FixedWorkload,
    options: SimulationOptions,
    schedule: Schedule | None,
    limit: int,
    rank: Rank,
) -> dict[CallKey, Placement]:
    """The schedule, or one with engines of its own choice, with its calls held back so."""
    recorder = ScheduleRecorder()
    follower = PacedFollower(schedule, len(options.engines), limit, rank)
    simulate(workload, replace(options, log=recorder), follower)
    step = PRIORITY_STEP
    return {
        key: replace(placement, priority=placement.priority // step)
        for key, placement in recorder.schedule.items()
    }


def latency_first(key: CallKey, task: Task) -> float:
    return 0.0 if task.objective.is_latency else 1.0
