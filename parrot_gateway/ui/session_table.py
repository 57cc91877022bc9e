"""The sessions that the live page lists, kept up to date while somebody watches.

There are three sources: declared sessions, sessions inferred by the linking process, and the
records of calls, which come first. A call that the linking process has not placed yet stands for
the session that it may begin.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from parrot_gateway.linking.process.wire import LinksChanged, SessionSummary, session_id_of
from parrot_gateway.linking.service import LinkingService
from parrot_gateway.linking.session_titles import declared_title, inferred_title
from parrot_gateway.semantic.session import Session
from parrot_gateway.semantic.sessions import SessionStore
from parrot_gateway.telemetry.call_record import CallRecord
from parrot_gateway.ui.history import CallHistory, Tokens

#: Sessions listed, the last used ones; a surplus is dropped together.
MAX_SESSIONS = 1000
_SLACK = 100
#: Views built in one turn of the event loop.
_AT_ONCE = 100
#: Approximate nodes of graphs read in one turn.
_NODES_AT_ONCE = 2000
#: Age from which a call is listed even if the linking process does not know it.
_UNPLACED_S = 0.3
#: Calls of inferred sessions remembered before everything is read again.
_MAX_CALLS = 50_000
#: Longest wait of the first list for the linking process.
_WHOLE_S = 1.0
_MAX_MODELS = 8


@dataclass(slots=True)
class _Live:
    """Unended calls of one inferred session."""

    running: int = 0
    waiting: int = 0
    #: Calls that the linking process has not placed.
    unplaced: list[CallRecord] = field(default_factory=list)

    @property
    def key(self) -> tuple[int, int, int]:
        return self.running, self.waiting, len(self.unplaced)


class SessionTable:
    """Maintains SessionViews by id.

    Args:
        sessions: declared ones.
        linking: infers others.
        calls: their records.
    """

    def __init__(self, sessions: SessionStore, linking: LinkingService, calls: CallHistory) -> None:
        self._sessions = sessions
        self._linking = linking
        self._calls = calls
        self._on_change: Callable[[LinksChanged], None] = lambda changes: None
        #: Set once the linking process has reported everything it had.
        self._whole = asyncio.Event()
        self._clear()

    def _clear(self) -> None:
        #: Views as last sent, with their last activity.
        self._views: dict[str, tuple[bytes, float]] = {}
        self._dirty: dict[str, None] = {}
        #: Versions of declared sessions' graphs when last read.
        self._versions: dict[str, int] = {}
        self._tokens: dict[str, Tokens] = {}
        self._live: dict[str, _Live] = {}
        #: By declared session: submitted calls that wait for no engine.
        self._busy: Counter[str] = Counter()
        self._forget_links()

    def _forget_links(self) -> None:
        self._linked: dict[str, SessionSummary] = {}
        #: Sessions of linked calls, and the targets of merged sessions.
        self._session_of: dict[str, str] = {}
        self._merged: dict[str, str] = {}

    async def open(self, on_change: Callable[[LinksChanged], None]) -> None:
        """Read everything, and keep reading until `close`.

        Args:
            on_change: gets the linking process's findings after this table.
        """
        self._clear()
        self._on_change = on_change
        self._whole.clear()
        ended = self._calls.all_ended()
        self._calls.follow(self._ended)
        for number, record in enumerate(ended):
            if record.session:
                self._tokens.setdefault(record.session, Tokens()).count(record)
            if number % _NODES_AT_ONCE == 0:
                await asyncio.sleep(0)
        self._linking.watch(self._take)
        if self._linking.is_running:
            try:
                async with asyncio.timeout(_WHOLE_S):
                    await self._whole.wait()
            except TimeoutError:
                # The process is busy; its sessions will come as changes.
                pass
        self.changes(self._calls.live())
        while self._dirty:
            await asyncio.sleep(0)
            self._update()

    def close(self) -> None:
        """Stop when nobody watches."""
        self._linking.watch(None)
        self._calls.follow(None)
        self._clear()

    def views(self) -> list[msgspec.Raw]:
        """Return all views."""
        return [msgspec.Raw(view) for view, _ in self._views.values()]

    def tenant_of(self, session_id: str) -> str | None:
        """Return the tenant of a listed inferred session; None for others."""
        linked = self._linked.get(self.current(session_id))
        return None if linked is None else linked.tenant

    def current(self, session_id: str) -> str:
        """Return the session that this one was merged into, or itself."""
        while session_id in self._merged:
            session_id = self._merged[session_id]
        return session_id

    def changes(self, live: Mapping[str, CallRecord]) -> tuple[list[msgspec.Raw], list[str]]:
        """Return the changed views, and the ids of sessions that are no longer listed.

        Args:
            live: the running calls, by id.
        """
        versions = self._versions
        for session in self._sessions.newest(MAX_SESSIONS):
            if versions.get(session.id) != session.graph.version:
                self._dirty[session.id] = None
        for session_id in versions:
            if self._sessions.get(session_id) is None:
                self._dirty[session_id] = None
        self._count(live)
        return self._update()

    def _take(self, changes: LinksChanged) -> None:
        """Apply findings of the linking process."""
        if changes.is_first:
            self._dirty |= dict.fromkeys(self._linked)
            for session_id in self._linked:
                if self._sessions.get(session_id) is None:
                    self._tokens.pop(session_id, None)
            self._forget_links()
        for summary in changes.sessions:
            for merged in summary.merged:
                self._linked.pop(merged, None)
                self._merged[merged] = summary.id
                self._dirty[merged] = None
                moved = self._tokens.pop(merged, None)
                if moved is not None:
                    self._tokens.setdefault(summary.id, Tokens()).add(moved)
            self._linked[summary.id] = summary
            self._dirty[summary.id] = None
            for call in summary.joined:
                # NOTE: before its session is known, so that `_ended` does not count it too.
                record = self._calls.ended(call)
                self._session_of[call] = summary.id
                if record is not None and not record.session:
                    self._tokens.setdefault(summary.id, Tokens()).count(record)
        if len(self._session_of) > _MAX_CALLS:
            self._linking.watch(self._take)
        self._on_change(changes)
        if changes.is_whole:
            self._whole.set()

    def _ended(self, record: CallRecord) -> None:
        session_id = record.session or self._session_of.get(record.call_id)
        if session_id is not None:
            session_id = self.current(session_id)
            self._tokens.setdefault(session_id, Tokens()).count(record)
            self._dirty[session_id] = None

    def _count(self, live: Mapping[str, CallRecord]) -> None:
        """Count the running calls of sessions."""
        now, found, busy = time.perf_counter(), dict[str, _Live](), Counter[str]()
        is_queued = self._calls.is_queued
        for call, record in live.items():
            if record.session:
                busy[record.session] += record.submitted is not None and not is_queued(record)
                continue
            known = self._session_of.get(call)
            if known is None and now - record.started < _UNPLACED_S:
                continue
            session_id = session_id_of(call) if known is None else self.current(known)
            counts = found.setdefault(session_id, _Live())
            if is_queued(record):
                counts.waiting += 1
            else:
                counts.running += 1
            if known is None:
                counts.unplaced.append(record)
        for session_id in found.keys() | self._live.keys():
            before, after = self._live.get(session_id), found.get(session_id)
            if before is None or after is None or before.key != after.key:
                self._dirty[session_id] = None
        for session_id in busy.keys() | self._busy.keys():
            if busy[session_id] != self._busy[session_id]:
                self._dirty[session_id] = None
        self._live, self._busy = found, busy

    def _update(self) -> tuple[list[msgspec.Raw], list[str]]:
        """Rebuild some of the views that may have changed."""
        changed: list[msgspec.Raw] = []
        gone: list[str] = []
        nodes = 0
        for session_id in list(self._dirty)[:_AT_ONCE]:
            del self._dirty[session_id]
            session = self._sessions.get(session_id)
            view = self._view(session_id, session)
            if session is None:
                self._versions.pop(session_id, None)
            else:
                self._versions[session_id] = session.graph.version
                nodes += len(session.graph)
            if view is None:
                self._tokens.pop(session_id, None)
                if self._views.pop(session_id, None) is not None:
                    gone.append(session_id)
                continue
            encoded = msgspec.json.encode(view)
            before = self._views.get(session_id)
            if before is None or before[0] != encoded:
                self._views[session_id] = encoded, view["last_activity"]
                changed.append(msgspec.Raw(encoded))
            if nodes > _NODES_AT_ONCE:
                break
        if len(self._views) > MAX_SESSIONS + _SLACK:
            oldest = sorted(self._views, key=lambda each: self._views[each][1])
            for session_id in oldest[: len(oldest) - MAX_SESSIONS]:
                del self._views[session_id]
                self._tokens.pop(session_id, None)
                gone.append(session_id)
        return changed, gone

    def _view(self, session_id: str, session: Session | None) -> dict[str, Any] | None:
        """Return a session as JSON; None if it does not exist any more."""
        linked, live = self._linked.get(session_id), self._live.get(session_id)
        tokens = self._tokens.get(session_id) or Tokens()
        if session is not None:
            return _declared(session, linked, self._busy[session_id]) | tokens.to_dict()
        if linked is not None and not linked.inferred:
            return None
        if linked is None and not (live and live.unplaced):
            return None
        live = live or _Live()
        return _inferred(session_id, linked, live) | tokens.to_dict()


def _declared(session: Session, linked: SessionSummary | None, busy: int) -> dict[str, Any]:
    graph = session.graph
    states = Counter(node.state for node in graph)
    # An upstream reports the beginning of a call only with its answer.
    running = max(states["running"], busy)
    _, depth, width = graph.shape()
    if linked is not None and linked.depth > depth:
        depth, width = linked.depth, linked.width
    models = dict.fromkeys(getattr(node, "model", "") for node in graph)
    return {
        "id": session.id,
        "name": session.name,
        "title": declared_title(session.name),
        "tenant": session.tenant,
        "inferred": False,
        "state": _state(running, states["waiting"]),
        "calls": len(graph) + graph.num_pruned,
        "running": running,
        "failed": states["failed"],
        "depth": depth,
        "width": width,
        "started": session.created,
        "last_activity": session.last_used,
        "models": [model for model in models if model][:_MAX_MODELS],
    }


def _inferred(session_id: str, linked: SessionSummary | None, live: _Live) -> dict[str, Any]:
    began = [record.started_at for record in live.unplaced]
    unplaced_models = [record.model or "" for record in live.unplaced]
    if linked is not None:
        began.append(linked.created)
    models: Iterable[str] = (*(linked.models if linked else ()), *unplaced_models)
    return {
        "id": session_id,
        "name": session_id,
        "title": linked.title if linked else _unplaced_title(session_id, live),
        "tenant": linked.tenant if linked else live.unplaced[0].tenant,
        "inferred": True,
        "state": _state(live.running, live.waiting),
        "calls": (linked.calls if linked else 0) + len(live.unplaced),
        "running": live.running,
        "failed": linked.failed if linked else 0,
        "depth": linked.depth if linked else 1,
        "width": linked.width if linked else len(live.unplaced),
        "started": min(began),
        "last_activity": max(*began, linked.last_used if linked else 0.0),
        "models": [model for model in dict.fromkeys(models) if model][:_MAX_MODELS],
    }


def _unplaced_title(session_id: str, live: _Live) -> str:
    """Return a title for use until the linking process has reported the calls."""
    paths = [record.path for record in live.unplaced]
    return inferred_title(session_id, paths, {1: len(paths)}, (), ())


def _state(running: int, waiting: int) -> str:
    return "running" if running else "waiting" if waiting else "idle"
