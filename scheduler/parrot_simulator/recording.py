"""Event logs: written while the scheduler runs, and replayed to see that it decides the same."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TextIO

from parrot_scheduler.actions import Action
from parrot_scheduler.config import SchedulerConfig
from parrot_scheduler.event_log import DECISIONS, replay, write_actions, write_config, write_step
from parrot_scheduler.events import Event


class LogFile:
    """Writes every step of a scheduler, and what it decided, to a text file."""

    def __init__(self, file: TextIO, config: SchedulerConfig) -> None:
        self._file = file
        file.write(write_config(config) + "\n")

    def record(self, now: float, events: Sequence[Event], actions: Sequence[Action]) -> None:
        self._file.write(write_step(now, events) + "\n")
        self._file.write(write_actions(actions) + "\n")


@dataclass(frozen=True, slots=True)
class ReplayComparison:
    """What a log's replay showed."""

    steps: int
    #: Steps whose decisions were in the log, and compared.
    compared: int
    #: The first step that was decided otherwise, counted from 1, with both lines; None: all agree.
    differs_at: int | None = None
    recorded: str = ""
    replayed: str = ""


def compare(lines: Iterable[str]) -> ReplayComparison:
    """Replay an event log, and compare what is decided with the decisions in it.

    Memory does not grow with the log.

    Raises:
        ValueError: A line does not belong in an event log; names its number.
    """
    recorded: deque[str] = deque()
    replayed: deque[str] = deque()
    steps = compared = 0
    differs: tuple[int, str, str] | None = None

    def watched() -> Iterator[str]:
        for line in lines:
            if line.startswith(DECISIONS):
                recorded.append(line.rstrip("\r\n"))
            yield line

    decisions = replay(watched())
    while True:
        decided = next(decisions, None)
        if decided is not None:
            steps += 1
            replayed.append(decided)
        while recorded and replayed:
            compared += 1
            ours, theirs = replayed.popleft(), recorded.popleft()
            if ours != theirs and differs is None:
                differs = (compared, theirs, ours)
        # A log without decisions has nothing to wait for.
        if len(replayed) > 1:
            replayed.popleft()
        if decided is None:
            break
    if recorded:
        raise ValueError(f"the log has {len(recorded)} lines of decisions without their steps")
    if differs is None:
        return ReplayComparison(steps, compared)
    return ReplayComparison(steps, compared, *differs)
