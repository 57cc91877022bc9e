"""Orders for comparison: by arrival, and by least attained service (Agentix, arXiv 2502.13965)."""

from __future__ import annotations

import random
from typing import Self

from parrot_scheduler.config import SchedulerConfig
from parrot_scheduler.order.ranked import Aging, ApplicationOrder, TaskOrder
from parrot_scheduler.task_state import Application, TaskState


class Fcfs(TaskOrder):
    """First come, first served, regardless of tenants, applications and priorities."""

    name = "fcfs"

    def rank(self, state: TaskState) -> tuple[float, ...]:
        return (state.sequence,)


class ApplicationFifo(ApplicationOrder):
    """The Parrot paper's order: all ready tasks of the earliest application go first.

    Tasks of one application go in order of submission, which is topological, as published (arXiv
    2405.19888, sections 5.2 and 5.4).
    """

    name = "application-fifo"

    def rank(self, application: Application) -> tuple[float, ...]:
        return (application.arrived_at, application.sequence)


class Plas(ApplicationOrder):
    """PLAS: an application's rank is the total service of its ended tasks, in tokens.

    It works well when applications are unknown and a few of them are very long. The rank is
    continuous, where the paper has a few levels; running tasks are never preempted. `Aging` keeps
    long ones from starving.
    """

    name = "plas"

    @classmethod
    def make(cls, config: SchedulerConfig, rng: random.Random) -> Self:
        """Return a new one for one model."""
        return cls(config)

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(Aging(config.starvation_s))

    def rank(self, application: Application) -> tuple[float, ...]:
        return (application.served_tokens, application.sequence)


class Atlas(Plas):
    """ATLAS: like PLAS, but concurrent tasks do not add up.

    An application's rank is the service along its longest chain of tasks so far, in tokens. A task
    starts from the application's rank at submission, and raises it by its own service at its end.
    """

    name = "atlas"

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._longest: dict[Application, float] = {}
        self._start: dict[TaskState, float] = {}

    def rank(self, application: Application) -> tuple[float, ...]:
        """Rank by attained service along the longest chain; ties by arrival."""
        return (self._longest.get(application, 0.0), application.sequence)

    def push(self, state: TaskState, application: Application, now: float) -> None:
        self._start[state] = self._longest.get(application, 0.0)
        super().push(state, application, now)

    def remove(self, state: TaskState) -> None:
        self._start.pop(state, None)
        super().remove(state)

    def finished(self, state: TaskState, application: Application, now: float) -> None:
        uncached = max(0, state.task.prompt_tokens - state.cached_tokens)
        end = self._start.pop(state, 0.0) + uncached + state.generated_tokens
        self._longest[application] = max(self._longest.get(application, 0.0), end)
        super().finished(state, application, now)

    def application_finished(self, application: Application, now: float) -> None:
        self._longest.pop(application, None)
