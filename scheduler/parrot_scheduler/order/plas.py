"""Least attained service: applications that had little so far go first (Agentix, 2502.13965)."""

from __future__ import annotations

from parrot_scheduler.config import SchedulerConfig
from parrot_scheduler.order.aging import Aging
from parrot_scheduler.order.application_order import ByApplication
from parrot_scheduler.policy import Application
from parrot_scheduler.task_state import Entry


class Plas(ByApplication):
    """PLAS: an application's rank is the service that all its ended calls had, in tokens.

    Good when nothing is known of applications and a few of them are very long. Continuous, where
    the paper has a few levels; running calls are never preempted. Long ones do not starve: see
    `Aging`.
    """

    name = "plas"

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(Aging(config.starvation_s))

    def rank(self, application: Application) -> tuple[float, int]:
        """By attained service, ties by arrival."""
        return (application.served_tokens, application.sequence)


class Atlas(Plas):
    """ATLAS: as PLAS, but calls that ran at the same time do not add up.

    An application's rank is the service along its longest chain of calls so far: a call starts
    from its application's rank at its submission, and raises it by its own service when it ends.
    """

    name = "atlas"

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._longest: dict[Application, float] = {}
        self._start: dict[Entry, float] = {}

    def rank(self, application: Application) -> tuple[float, int]:
        """By attained service along the longest chain, ties by arrival."""
        return (self._longest.get(application, 0.0), application.sequence)

    def push(self, entry: Entry, application: Application, now: float) -> None:
        """Into the queue, from where its application stands."""
        self._start[entry] = self._longest.get(application, 0.0)
        super().push(entry, application, now)

    def remove(self, entry: Entry) -> None:
        """Out of the queue, unplaced or placed."""
        if entry.state != "placed":
            self._start.pop(entry, None)
        super().remove(entry)

    def finished(self, entry: Entry, application: Application, now: float) -> None:
        """Its chain is longer now."""
        uncached = max(0, entry.task.prompt_tokens - entry.cached_tokens)
        end = self._start.pop(entry, 0.0) + uncached + entry.generated_tokens
        self._longest[application] = max(self._longest.get(application, 0.0), end)
        super().finished(entry, application, now)

    def application_finished(self, application: Application, now: float) -> None:
        """Forget its chain."""
        self._longest.pop(application, None)
