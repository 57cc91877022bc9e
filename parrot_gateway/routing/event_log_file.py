"""Records the scheduler's events and decisions to a file, for replay."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from parrot_scheduler.actions import Action
from parrot_scheduler.config import SchedulerConfig
from parrot_scheduler.event_log import write_actions, write_config, write_step
from parrot_scheduler.events import Event

logger = logging.getLogger(__name__)

#: Bytes that are collected before they are written: one write, of a millisecond, for many steps.
_BUFFER_BYTES = 1 << 20


class EventLogFile:
    """A log of lines: the configuration, then events and decisions of each step in turn.

    It holds no prompt and no answer: lengths, hashes, ids and times only.

    Args:
        path: written anew.
        config: of the scheduler.
        max_bytes: where the recording stops; what was written until then stays whole.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, config: SchedulerConfig, max_bytes: int) -> None:
        self._path = path
        self._left = max_bytes
        self._file = path.open("w", encoding="utf-8", buffering=_BUFFER_BYTES)
        self._write(write_config(config))

    def record(self, now: float, events: Sequence[Event], actions: Sequence[Action]) -> None:
        """One step. A full disk ends the recording, not the gateway."""
        if self._left > 0:
            self._write(f"{write_step(now, events)}\n{write_actions(actions)}")

    def close(self) -> None:
        """Write what is left. May be called twice."""
        self._left = 0
        try:
            self._file.close()
        except OSError as error:
            logger.warning("the recording %s is incomplete: %s", self._path, error)

    def _write(self, lines: str) -> None:
        size = len(lines) + 1
        if size > self._left:
            logger.warning("the recording %s has reached its limit and ends", self._path)
            self.close()
            return
        try:
            self._file.write(lines + "\n")
        except OSError as error:
            logger.warning("the recording %s ends: %s", self._path, error)
            self.close()
            return
        self._left -= size
