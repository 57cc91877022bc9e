"""Sends changes to the watchers of the live page.

Nothing is read while nobody watches. Otherwise one task looks for changes several times a second,
by comparing version numbers, and gives every watcher the same bytes. A watcher that reads too
slowly gets a fresh overview instead.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from parrot_gateway.exceptions import OverloadedError, SessionNotFoundError
from parrot_gateway.linking.process.wire import LinksChanged, session_id_of
from parrot_gateway.linking.service import LinkingService
from parrot_gateway.routing.explanations import Explanations
from parrot_gateway.semantic.service import SemanticService
from parrot_gateway.telemetry.call_record import CallRecord
from parrot_gateway.ui.engine_table import EngineTable
from parrot_gateway.ui.history import CallHistory
from parrot_gateway.ui.session_graph import SessionGraph
from parrot_gateway.ui.session_table import SessionTable

logger = logging.getLogger(__name__)

#: Interval of searches for changes, and every how many turns the sessions, and the engines,
#: scheduler and tenants, are searched.
_TURN_S = 0.05
_SESSIONS_EVERY = 2
_SYSTEM_EVERY = 20
#: Bytes of events that may wait for a watcher before it gets a fresh overview.
MAX_WAITING_BYTES = 1024 * 1024


def event(name: str, data: Any) -> bytes:
    """Encode one server-sent event."""
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(data) + b"\n\n"


class Watcher:
    """One reader of a stream: the events that wait for it.

    Attributes:
        is_stale: true if it has missed events and needs a fresh overview.
        is_closed: true once no further events come.
    """

    __slots__ = ("_events", "_size", "_wake", "is_closed", "is_stale")

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._size = 0
        self._wake = asyncio.Event()
        self.is_stale = True
        self.is_closed = False

    def begin(self, everything: Callable[[], bytes]) -> bytes:
        """Return the first event, which has everything; the others follow."""
        self.is_stale = False
        return everything()

    def push(self, data: bytes) -> None:
        """Queue an event."""
        if self.is_stale or self.is_closed:
            return
        if self._size + len(data) > MAX_WAITING_BYTES:
            self.renew()
            return
        self._events.append(data)
        self._size += len(data)
        self._wake.set()

    def renew(self) -> None:
        """Drop the waiting events; the watcher will get everything afresh."""
        self._events.clear()
        self._size = 0
        self.is_stale = True
        self._wake.set()

    def close(self) -> None:
        """Let it read the waiting events and then end."""
        self.is_closed = True
        self._wake.set()

    async def read(self, timeout_s: float) -> bytes:
        """Return the waiting events or the next one.

        Returns b"" after a silence of `timeout_s`, and if the watcher is closed or stale.
        """
        if not (self._events or self.is_stale or self.is_closed):
            self._wake.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._wake.wait()
            except TimeoutError:
                return b""
        data, self._size = b"".join(self._events), 0
        self._events.clear()
        return data


@dataclass(eq=False)
class _WatchedGraph:
    graph: SessionGraph
    #: Ends once everything has been read.
    loading: asyncio.Task[None]
    #: True if the content read differs from what watchers were told.
    is_reloaded: bool = False
    watchers: set[Watcher] = field(default_factory=set)


class LiveFeed:
    """Follows sessions, engines and calls for the live page.

    Args:
        service: declared sessions.
        linking: inferred ones.
        calls: records of calls.
        engines: engines and the scheduler.
        explanations: reasons for calls' placements, if they are kept.
        describe: further fields of the overview.
        max_watchers: maximum concurrent streams.
    """

    def __init__(
        self,
        service: SemanticService,
        linking: LinkingService,
        calls: CallHistory,
        engines: EngineTable,
        explanations: Explanations | None,
        describe: Callable[[], dict[str, Any]],
        max_watchers: int,
    ) -> None:
        self._service = service
        self._linking = linking
        self.calls = calls
        self._engines = engines
        self._explanations = explanations
        self._describe = describe
        self._max_watchers = max_watchers
        self._sessions = SessionTable(service.sessions, linking, calls)
        self._watchers: set[Watcher] = set()
        self._graphs: list[_WatchedGraph] = []
        #: Open streams, including those being opened.
        self.num_watchers = 0
        self._opening = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._system: dict[str, bytes] = {}
        self._closed = False

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[Watcher]:
        """Watch everything except single graphs; the stream begins with `overview`.

        Raises:
            OverloadedError: there are `max_watchers` streams, or the gateway is shutting down.
        """
        async with self._joined() as watcher:
            self._watchers.add(watcher)
            try:
                yield watcher
            finally:
                self._watchers.discard(watcher)

    @asynccontextmanager
    async def watch_session(
        self, session_id: str
    ) -> AsyncIterator[tuple[Watcher, Callable[[], bytes]]]:
        """Watch one session's graph; yields the watcher, and a function that returns the first
        event.

        Raises:
            SessionNotFoundError: there is no such session.
            OverloadedError: as `watch`.
        """
        async with self._joined() as watcher:
            watched = self._graph(session_id)
            watched.watchers.add(watcher)
            try:
                await asyncio.shield(watched.loading)
                yield watcher, lambda: event("graph", watched.graph.to_json())
            finally:
                watched.watchers.discard(watcher)
                if not watched.watchers:
                    self._graphs.remove(watched)
                    watched.loading.cancel()

    def overview(self) -> bytes:
        """Return everything except single graphs as JSON; only while there is a watcher."""
        return msgspec.json.encode(
            {
                "at": time.time(),
                **self._describe(),
                "engines": self._engines.engines,
                "scheduler": self._scheduler(),
                "tenants": self.calls.tenants(),
                "sessions": self._sessions.views(),
            }
        )

    def close(self) -> None:
        """End all streams and accept no new ones. May be called twice."""
        self._closed = True
        self._end_streams()

    def _end_streams(self) -> None:
        for watcher in self._watchers:
            watcher.close()
        for watched in self._graphs:
            for watcher in watched.watchers:
                watcher.close()

    @asynccontextmanager
    async def _joined(self) -> AsyncIterator[Watcher]:
        if self._closed:
            raise OverloadedError("The gateway is shutting down.", code="shutting_down")
        if self.num_watchers >= self._max_watchers:
            raise OverloadedError(
                f"{self.num_watchers} streams of the live page are open, which is this gateway's "
                "limit (setting ui.max_streams).",
                code="too_many_streams",
            )
        self.num_watchers += 1
        try:
            async with self._opening:
                if self._task is None or self._task.done():
                    await self._engines.refresh()
                    await self._sessions.open(self._links_changed)
                    self._task = asyncio.create_task(self._run(), name="live-feed")
            yield Watcher()
        finally:
            self.num_watchers -= 1
            if self.num_watchers == 0:
                self._rest()

    def _rest(self) -> None:
        """Stop working when nobody watches."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self._sessions.close()
        self._engines.close()
        self._system.clear()

    def _graph(self, session_id: str) -> _WatchedGraph:
        current = self._sessions.current(session_id)
        for watched in self._graphs:
            if watched.graph.id == current:
                return watched
        graph = SessionGraph(
            current, self._tenant_of(current), self._service, self._linking, self.calls,
            self._explanations,
        )  # fmt: skip
        watched = _WatchedGraph(graph, asyncio.create_task(graph.load(), name="live-graph"))
        self._graphs.append(watched)
        return watched

    def _tenant_of(self, session_id: str) -> str:
        session = self._service.sessions.get(session_id)
        if session is not None:
            return session.tenant
        tenant = self._sessions.tenant_of(session_id)
        if tenant is not None:
            return tenant
        for record in self.calls.live().values():
            if session_id_of(record.call_id) == session_id:
                return record.tenant
        raise SessionNotFoundError(session_id)

    def _links_changed(self, changes: LinksChanged) -> None:
        for watched in self._graphs:
            watched.graph.take(changes)

    async def _run(self) -> None:
        turn = 0
        try:
            while True:
                await asyncio.sleep(_TURN_S)
                turn += 1
                live = self.calls.live()
                for watched in list(self._graphs):
                    self._follow(watched, live)
                    # Yield to calls before the next search.
                    await asyncio.sleep(0)
                if self._watchers and turn % _SESSIONS_EVERY == 0:
                    self._tell(live)
                    await asyncio.sleep(0)
                if self._watchers and turn % _SYSTEM_EVERY == 0:
                    await self._engines.refresh()
                    self._tell_system()
        except Exception:
            logger.exception("the live page's feed failed; its streams end")
            self._end_streams()

    def _follow(self, watched: _WatchedGraph, live: dict[str, CallRecord]) -> None:
        graph = watched.graph
        if not watched.loading.done():
            return
        if graph.is_closed:
            for watcher in watched.watchers:
                watcher.close()
            return
        if graph.is_outdated:
            watched.loading = asyncio.create_task(graph.load(), name="live-graph")
            watched.is_reloaded = True
            return
        if watched.is_reloaded:
            watched.is_reloaded = False
            for watcher in watched.watchers:
                watcher.renew()
        changes = graph.changes(live)
        if changes is not None:
            data = event("change", changes)
            for watcher in watched.watchers:
                watcher.push(data)

    def _tell(self, live: dict[str, CallRecord]) -> None:
        changed, gone = self._sessions.changes(live)
        data = event("sessions", changed) if changed else b""
        if gone:
            data += event("sessions", {"gone": gone})
        if data:
            for watcher in self._watchers:
                watcher.push(data)

    def _tell_system(self) -> None:
        for name, view in (
            ("engines", self._engines.engines),
            ("scheduler", self._scheduler()),
            ("tenants", self.calls.tenants()),
        ):
            data = event(name, view)
            if self._system.get(name) != data:
                self._system[name] = data
                for watcher in self._watchers:
                    watcher.push(data)

    def _scheduler(self) -> dict[str, Any]:
        return self._engines.scheduler() | {"placements": self.calls.placements()}
