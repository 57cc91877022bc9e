"""`agentic_mooncake` JSONL: calls that wait for one another, with pauses for tools.

Fields of a row: `request_id`; `input_length`, `output_length`; `hash_ids` of the prompt's blocks;
`wait_for` (ids of rows whose end it waits for) and then `delay` + `tool_wait_ms`, milliseconds;
`timestamp` (ms) for rows that wait for nothing; `session_id`. `branches`, `prefix_reset` and
`tool_events` add nothing to a replay and are ignored, as unknown fields are.

An application is what hangs together by `wait_for` or `session_id`: a sub-agent that its parent
spawned is part of the parent's application.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from math import inf
from pathlib import Path
from typing import Any

from parrot_scheduler.task import LATENCY

from parrot_bench.simulator.plan import ApplicationPlan, CallPlan
from parrot_bench.simulator.traces.lines import (
    Line,
    TraceError,
    list_of,
    number_of,
    objects_of,
    tokens_of,
)
from parrot_bench.simulator.traces.mooncake import MOONCAKE_BLOCK_TOKENS, block_size, segments

#: Rows that are held in memory, in search of more rows of their applications.
WINDOW_ROWS = 100_000


@dataclass(slots=True, eq=False)
class _Application:
    #: In the order of the file: rows wait for earlier rows only, which makes it topological.
    calls: list[CallPlan] = field(default_factory=list)
    #: By call: when it starts if it waits for nothing, in seconds.
    starts: list[float | None] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    sessions: set[str] = field(default_factory=set)
    arrival_s: float = inf


def read_agentic(
    path: Path, block_tokens: int | None = None, window_rows: int = WINDOW_ROWS
) -> Iterator[ApplicationPlan]:
    """Applications in order of arrival; memory holds at most `window_rows` rows.

    Args:
        path: JSONL, `.gz` or not; rows come after the rows that they wait for.
        block_tokens: tokens of a block of `hash_ids`; found from the lengths when it is None.
        window_rows: an application whose first row is that far back is complete.

    Raises:
        TraceError: a row is wrong, doubled, or waits for an unknown or completed one.
    """
    reader = _Reader(path, block_tokens, window_rows)
    for line, row in objects_of(path):
        reader.add(line, row)
        while reader.num_rows > window_rows:
            yield reader.pop(line)
    while reader.num_rows:
        yield reader.pop(None)


class _Reader:
    def __init__(self, path: Path, block_tokens: int | None, window_rows: int) -> None:
        self._path = path
        self._block_tokens = block_tokens
        self._window_rows = window_rows
        self._open: set[_Application] = set()
        self._by_request: dict[str, tuple[_Application, int]] = {}
        self._by_session: dict[str, _Application] = {}
        self._latest = 0.0
        #: (arrival, count, application); an entry that is out of date has a later one.
        self._queue: list[tuple[float, int, _Application]] = []
        self._count = 0
        self.num_rows = 0

    def add(self, line: Line, row: dict[str, Any]) -> None:
        request = row.get("request_id")
        if not isinstance(request, str) or not request:
            raise line.error("request_id must be a text")
        if request in self._by_request:
            raise line.error(f"request_id {request!r} is there twice")
        session = row.get("session_id")
        if session is not None and not isinstance(session, str):
            raise line.error("session_id must be a text")
        producers = list_of(line, row, "wait_for", str)
        for producer in producers:
            if producer not in self._by_request:
                raise line.error(
                    f"waits for {producer!r}, which none of the {self._window_rows} rows "
                    "before it is"
                )
        owners = [self._by_request[producer][0] for producer in producers]
        if session is not None and session in self._by_session:
            owners.append(self._by_session[session])
        application = self._join(owners)
        pause_ms = number_of(line, row, "delay", "delay_ms", default=0.0)
        pause_ms += number_of(line, row, "tool_wait_ms", default=0.0)
        start = None
        if not producers:
            start = number_of(line, row, "timestamp", "created_time") / 1000.0
        prompt_tokens = tokens_of(line, row, "input_length", "input_tokens")
        output = tokens_of(line, row, "output_length", "output_tokens")
        hash_ids = list_of(line, row, "hash_ids", int)
        if self._block_tokens is None:
            self._block_tokens = block_size(prompt_tokens, len(hash_ids))
        index = len(application.calls)
        application.calls.append(
            CallPlan(
                index=index,
                prompt=segments(
                    line,
                    prompt_tokens,
                    hash_ids,
                    self._block_tokens or MOONCAKE_BLOCK_TOKENS,
                    request,
                ),
                output_tokens=output,
                max_tokens=output,
                after=tuple(sorted({self._by_request[p][1] for p in producers})),
                pause_s=pause_ms / 1000.0,
                objective=LATENCY,
            )
        )
        application.starts.append(start)
        if start is not None and start < application.arrival_s:
            self._arrives(application, start)
        application.names.append(request)
        if session is not None:
            application.sessions.add(session)
            self._by_session[session] = application
        self._by_request[request] = (application, index)
        self.num_rows += 1

    def _join(self, owners: list[_Application]) -> _Application:
        """One application out of several, or a new one."""
        distinct = list(dict.fromkeys(owners))
        if not distinct:
            application = _Application()
            self._open.add(application)
            return application
        # Into the largest, so that joining costs little however often it happens.
        target = max(distinct, key=lambda application: len(application.calls))
        for other in distinct:
            if other is target:
                continue
            offset = len(target.calls)
            for call, start, name in zip(other.calls, other.starts, other.names, strict=True):
                index = call.index + offset
                after = tuple(producer + offset for producer in call.after)
                target.calls.append(replace(call, index=index, after=after))
                target.starts.append(start)
                target.names.append(name)
                self._by_request[name] = (target, index)
            if other.arrival_s < target.arrival_s:
                self._arrives(target, other.arrival_s)
            target.sessions |= other.sessions
            for session in other.sessions:
                self._by_session[session] = target
            self._open.remove(other)
        return target

    def _arrives(self, application: _Application, arrival_s: float) -> None:
        application.arrival_s = arrival_s
        self._count += 1
        heappush(self._queue, (arrival_s, self._count, application))

    def pop(self, line: Line | None) -> ApplicationPlan:
        """The open application that arrived first, as a plan.

        `line` is the one being read; None: the file has ended.
        """
        arrival_s, _, application = heappop(self._queue)
        while application not in self._open or arrival_s != application.arrival_s:
            arrival_s, _, application = heappop(self._queue)
        if arrival_s < self._latest:
            message = f"timestamp goes back by more than {self._window_rows} rows"
            raise line.error(message) if line else TraceError(f"{self._path}: {message}")
        self._latest = arrival_s
        self._open.remove(application)
        for name in application.names:
            del self._by_request[name]
        for session in application.sessions:
            del self._by_session[session]
        self.num_rows -= len(application.calls)
        calls = tuple(
            # A call that waits for nothing starts at its own time, not with the application.
            call if start is None else replace(call, pause_s=start - arrival_s)
            for call, start in zip(application.calls, application.starts, strict=True)
        )
        return ApplicationPlan(
            id=application.names[0], arrival_s=arrival_s, calls=calls, kind="session"
        )
