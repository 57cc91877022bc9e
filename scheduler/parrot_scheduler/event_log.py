"""Events and actions as lines of JSON, and the replay of a log to the same decisions.

A log has one line with the configuration and then one line per step. Floats are written so that
they read back exactly. The log holds every input of a decision: replaying it on any machine gives
the same actions, byte for byte.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple, get_args

from parrot_scheduler.actions import Action
from parrot_scheduler.config import SchedulerConfig
from parrot_scheduler.events import (
    BlocksEvicted,
    BlocksStored,
    EngineJoined,
    EngineReport,
    Event,
    TaskSubmitted,
    TaskUpdated,
)
from parrot_scheduler.policies import paths_in
from parrot_scheduler.scheduler import Scheduler
from parrot_scheduler.task import EngineDescription, GroupRef, Objective, StepModel, Task

Json = dict[str, Any]

#: Prefix of the lines that `write_actions` writes.
DECISIONS = '{"actions":'


class LoggedStep(NamedTuple):
    now: float
    events: tuple[Event, ...]


def write_config(config: SchedulerConfig) -> str:
    return _dump({"config": asdict(config)})


def write_step(now: float, events: Iterable[Event]) -> str:
    return _dump({"now": now, "events": [_with_kind(event) for event in events]})


def write_actions(actions: Iterable[Action]) -> str:
    return _dump({"actions": [_with_kind(action) for action in actions]})


def read_config(line: str) -> SchedulerConfig:
    """Parse the configuration in a log's first line.

    Raises:
        ValueError: The line is no configuration, or names unknown settings.
    """
    data = json.loads(line)
    if not isinstance(data, dict) or not isinstance(data.get("config"), dict):
        raise ValueError("the first line of an event log holds the configuration")
    unknown = data["config"].keys() - {field.name for field in fields(SchedulerConfig)}
    if unknown:
        raise ValueError(f"unknown settings: {', '.join(sorted(unknown))}")
    return SchedulerConfig(**data["config"])


def read_step(line: str) -> LoggedStep:
    """Parse one step.

    Raises:
        ValueError: The line is no step.
    """
    data = json.loads(line)
    if not isinstance(data, dict) or "now" not in data or "events" not in data:
        raise ValueError("a line of an event log has `now` and `events`")
    return LoggedStep(float(data["now"]), tuple(event_from_json(event) for event in data["events"]))


def replay(lines: Iterable[str], policies: Collection[str] = ()) -> Iterator[str]:
    """Repeat the decisions of each step of a log, as lines; recorded decisions are skipped.

    Args:
        lines: of the log.
        policies: import paths that may be loaded. A log alone never causes code to run.

    Raises:
        ValueError: A line does not belong in an event log; names its number.
    """
    scheduler: Scheduler | None = None
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith(DECISIONS):
            continue
        try:
            if scheduler is None:
                config = read_config(line)
                for path in paths_in(config):
                    if path not in policies:
                        raise ValueError(
                            f"it was decided by {path}; name that with --policy to run its code"
                        )
                scheduler = Scheduler(config)
                continue
            step = read_step(line)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"line {number}: {error}") from error
        yield write_actions(scheduler.step(step.now, step.events))


def event_from_json(data: Json) -> Event:
    """Rebuild an event from its JSON.

    Raises:
        ValueError: There is no event of this kind.
        TypeError: It lacks a field, or has one too many.
    """
    rest = dict(data)
    kind = rest.pop("kind", None)
    if kind not in _KINDS:
        raise ValueError(f"there is no event of kind {kind!r}")
    read = _READERS.get(kind)
    if read is not None:
        read(rest)
    event: Event = _KINDS[kind](**rest)
    return event


@dataclass(frozen=True, slots=True)
class ReplayComparison:
    """Result of comparing a log with its replay."""

    steps: int
    #: Steps whose recorded decisions were compared.
    compared: int
    #: The first step that differs, counted from 1, with both lines; None if all agree.
    differs_at: int | None = None
    recorded: str = ""
    replayed: str = ""


def compare(lines: Iterable[str], policies: Collection[str] = ()) -> ReplayComparison:
    """Replay an event log and compare the decisions with the recorded ones, in constant memory.

    `policies` are import paths that may be loaded.

    Raises:
        ValueError: A line does not belong in an event log; the message names its number.
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

    decisions = replay(watched(), policies)
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
        # A log without recorded decisions leaves nothing to compare.
        if len(replayed) > 1:
            replayed.popleft()
        if decided is None:
            break
    if recorded:
        raise ValueError(f"the log has {len(recorded)} lines of decisions without their steps")
    if differs is None:
        return ReplayComparison(steps, compared)
    return ReplayComparison(steps, compared, *differs)


def _with_kind(value: Any) -> Json:
    return {"kind": type(value).__name__, **asdict(value)}


def _dump(data: Json) -> str:
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False)


_KINDS: dict[str, Any] = {kind.__name__: kind for kind in get_args(Event)}


def _objective(data: Any) -> Objective | None:
    return None if data is None else Objective(*data)


def _groups(data: Any) -> tuple[GroupRef, ...] | None:
    if data is None:
        return None
    return tuple(GroupRef(name, size, Objective(*objective)) for name, size, objective in data)


def _read_task(rest: Json) -> None:
    task = dict(rest["task"])
    task["prefix"] = tuple(task["prefix"])
    task["objective"] = _objective(task["objective"])
    task["groups"] = _groups(task["groups"])
    rest["task"] = Task(**task)


def _read_update(rest: Json) -> None:
    rest["objective"] = _objective(rest["objective"])
    rest["groups"] = _groups(rest["groups"])


def _read_engine(rest: Json) -> None:
    engine = dict(rest["engine"])
    engine["step_model"] = StepModel(**engine["step_model"])
    rest["engine"] = EngineDescription(**engine)


def _read_report(rest: Json) -> None:
    if rest["step_model"] is not None:
        rest["step_model"] = StepModel(**rest["step_model"])


def _read_hashes(rest: Json) -> None:
    if rest["hashes"] is not None:
        rest["hashes"] = tuple(rest["hashes"])


_READERS: dict[str, Callable[[Json], None]] = {
    TaskSubmitted.__name__: _read_task,
    TaskUpdated.__name__: _read_update,
    EngineJoined.__name__: _read_engine,
    EngineReport.__name__: _read_report,
    BlocksStored.__name__: _read_hashes,
    BlocksEvicted.__name__: _read_hashes,
}
