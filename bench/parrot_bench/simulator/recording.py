"""An event log of a simulation: what the scheduler is told, and what it decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from parrot_scheduler.actions import Action
from parrot_scheduler.config import SchedulerConfig
from parrot_scheduler.event_log import write_actions, write_config, write_step
from parrot_scheduler.events import Event


class LogFile:
    """Writes every step of a scheduler, and what it decided, to a text file."""

    def __init__(self, file: TextIO, config: SchedulerConfig) -> None:
        self._file = file
        file.write(write_config(config) + "\n")

    def record(self, now: float, events: Sequence[Event], actions: Sequence[Action]) -> None:
        self._file.write(write_step(now, events) + "\n")
        self._file.write(write_actions(actions) + "\n")
