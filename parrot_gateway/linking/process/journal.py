"""Keeps the linker's results for questions: each tenant's calls and sessions as plain data.

Contains no text of prompts or answers.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from parrot_gateway.linking.linker.conversation import (
    Answer,
    Conversation,
    answer_of,
    conversation_of,
)
from parrot_gateway.linking.linker.linker import Linker, TenantLinker
from parrot_gateway.linking.linker.links import Link, LinkedSession
from parrot_gateway.linking.process.wire import (
    AnswerSeen,
    LinksChanged,
    RequestSeen,
    SessionSummary,
    session_id_of,
)
from parrot_gateway.linking.profiles.profile_store import ProfileStore
from parrot_gateway.linking.profiles.profiles import Profile, TenantProfiles, output_tokens
from parrot_gateway.linking.session_titles import inferred_title
from parrot_gateway.linking.tenants import LinkerLimits, Tenants

#: Maximum sessions in one list, last used first.
MAX_LISTED = 1000
#: Sessions or calls per message while a watch begins.
_TOLD_AT_ONCE = 50
#: Maximum links kept per call, surest first.
_MAX_LINKS = 64
#: Maximum models in a session's summary.
_MAX_MODELS = 8
#: Maximum tool names kept per answer, and characters of each.
_MAX_TOOLS = 16
_MAX_TOOL_NAME = 64
#: Maximum bytes of a request remembered until the next one.
_MAX_LAST = 256 * 1024
#: Maximum bytes of a decompressed answer.
_MAX_UNPACKED = 32 * 1024 * 1024
_GZIP = b"\x1f\x8b"
#: Beginning of an answer in which its id is searched if the whole cannot be read.
_HEAD_BYTES = 4096
_ID = re.compile(rb'"id"\s*:\s*"([^"\\]{1,256})"')
#: End of a stream that failed after it had begun.
_FAILED = re.compile(rb'(?:\A|\n)(?:event: ?(?:error|response\.failed)\b|data: ?\{"error"\s*:)')

_NAMES = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
}


@dataclass(slots=True, eq=False)
class JournalEntry:
    """One call. Times are seconds since the epoch.

    Attributes:
        links: to earlier calls.
        response_id: id of its answer; empty until it is known.
        error: HTTP status of a failed answer; 0 otherwise.
        tools: names of the tools that its answer calls.
        depth: calls on the longest path of links that ends with it.
    """

    id: str
    request_id: str
    path: str
    model: str
    session: LinkedSession
    submitted: float
    links: list[Link]
    response_id: str = ""
    finished: float | None = None
    state: str = "running"
    error: int = 0
    tools: tuple[str, ...] = ()
    depth: int = 1


@dataclass(slots=True, eq=False)
class _Changes:
    """Changes that the watcher has not been told yet."""

    #: Tenants and calls, by call id.
    calls: dict[str, tuple[str, JournalEntry]] = field(default_factory=dict)
    #: Joined calls and merged sessions, by session.
    joined: dict[LinkedSession, list[str]] = field(default_factory=dict)
    merged: dict[LinkedSession, list[str]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Tenant:
    calls: OrderedDict[str, JournalEntry] = field(default_factory=OrderedDict)
    #: Call ids, by ids of requests and responses.
    aliases: dict[str, str] = field(default_factory=dict)
    #: Sessions by every id ever given out; ids of merged sessions lead to the merged one.
    sessions: OrderedDict[str, LinkedSession] = field(default_factory=OrderedDict)
    #: Calls of each current session, in order.
    members: dict[LinkedSession, dict[str, None]] = field(default_factory=dict)


class LinkJournal:
    """Links calls and remembers the outcome.

    Args:
        limits: per tenant; the journal remembers as many calls as can be linked to.
        max_tenants: maximum number; the longest idle one makes room.
        profiles: learn from the links.

    Attributes:
        profiles: profiles of call templates.
    """

    def __init__(self, limits: LinkerLimits, max_tenants: int, profiles: ProfileStore) -> None:
        self.profiles = profiles
        self._limits = limits
        #: The call that is being linked: a new session is named after its first call.
        self._call = ""
        self._linker = Linker(lambda: session_id_of(self._call), limits, max_tenants)
        self._tenants = Tenants(_Tenant, max_tenants)
        #: The tenant of the last message, which usually sends the next one too.
        self._used: tuple[str, _Tenant, TenantLinker, TenantProfiles] | None = None
        #: None while nobody watches.
        self._changes: _Changes | None = None
        #: The last request and its parsed content, because equal requests come in a row.
        self._last: tuple[str, bytes, Conversation | None] = ("", b"", None)
        self._unreadable = 0
        self._linked = 0
        self._edges: Counter[str] = Counter()

    def request(self, seen: RequestSeen) -> None:
        """Link the request of a call; an unreadable one has no links."""
        path, body, conversation = self._last
        if body != seen.body or path != seen.path:
            path, body = seen.path, seen.body
            conversation = conversation_of(path, body)
            if len(body) <= _MAX_LAST:
                self._last = path, body, conversation
        if conversation is None:
            # The gateway counts texts that it left out itself.
            self._unreadable += bool(seen.body)
            conversation = Conversation(())
        _, tenant, linker, profiles = self._use(seen.tenant)
        self._call = seen.call
        linked = linker.request(seen.call, conversation, seen.now, seen.session or None, seen.peer)
        session = linked.session
        record = JournalEntry(
            seen.call,
            seen.request_id,
            seen.path,
            conversation.model,
            session,
            seen.now,
            linked.links,
        )
        profiles.request(
            seen.call, body, linked.links, session, seen.now, is_new=not linked.is_flooded
        )
        self._linked += 1
        if linked.links:
            record.links = sorted(linked.links, key=lambda each: -each.confidence)[:_MAX_LINKS]
            self._edges.update(link.kind for link in record.links)
            sources = (tenant.calls.get(link.source) for link in record.links)
            record.depth += max((each.depth for each in sources if each is not None), default=0)
        tenant.calls[record.id] = record
        tenant.aliases[record.request_id] = record.id
        tenant.sessions[session.id] = session
        tenant.sessions.move_to_end(session.id)
        members = tenant.members.setdefault(session, {})
        for merged in linked.merged:
            members.update(tenant.members.pop(merged, {}))
        members[record.id] = None
        if self._changes is not None:
            self._changes.joined.setdefault(session, []).append(record.id)
            if linked.merged:
                self._changes.merged.setdefault(session, []).extend(e.id for e in linked.merged)
            self._note(seen.tenant, record)
        while len(tenant.calls) > self._limits.calls:
            _forget(tenant, next(iter(tenant.calls)))
        while len(tenant.sessions) > self._limits.calls:
            tenant.sessions.popitem(last=False)

    def answer(self, seen: AnswerSeen) -> None:
        """Apply the end of a call, or the late answer that a later request revealed.

        A broken-off answer is used as far as it came.
        """
        _, tenant, linker, profiles = self._use(seen.tenant)
        record = tenant.calls.get(seen.call)
        if record is None:
            record = tenant.calls.get(tenant.aliases.get(seen.call, ""))
            if record is None or record.finished is not None or seen.status != 200:
                return
        self._note(seen.tenant, record)
        record.finished = seen.now
        record.error = seen.status if seen.status >= 400 else 0
        if record.error:
            record.state = "failed"
            profiles.drop(record.id)
            linker.failed(record.id)
            return
        body = _unpacked(seen.body)
        answer = answer_of(record.path, body)
        if answer is None:
            found = _ID.search(body, 0, _HEAD_BYTES)
            response_id = "" if found is None else found[1].decode("utf-8", "replace")
        else:
            response_id = answer.response_id
        if response_id:
            record.response_id = response_id
            tenant.aliases[response_id] = record.id
        if answer is not None and not answer.is_finished:
            record.finished = None
            return
        if seen.status == 0:
            record.state = "cancelled"
        else:
            # The expression takes ten times as long as these two searches.
            may_have_failed = (answer is None or not answer.is_plain) and (
                b"error" in body or b"response.failed" in body
            )
            record.state = "failed" if may_have_failed and _FAILED.search(body) else "done"
        if answer is None:
            linker.failed(record.id)
        else:
            record.tools = _tools_of(answer)
            linker.answer(record.id, answer, seen.now)
            if record.state == "done":
                profiles.answer(record.id, output_tokens(body, answer), seen.now)
            else:
                profiles.drop(record.id)

    @property
    def has_changed(self) -> bool:
        """Return true if there are changes that the watcher has not been told."""
        return self._changes is not None and bool(self._changes.calls)

    def watch(self, on: bool) -> Iterator[LinksChanged]:
        """Start or stop gathering changes; a start yields all current sessions, newest first."""
        self._changes = _Changes() if on else None
        if not on:
            return
        sessions = [
            (name, session)
            for name, tenant in self._tenants.items()
            for session in dict.fromkeys(each.current for each in tenant.sessions.values())
        ]
        newest = sessions[-MAX_LISTED:]
        for at in range(0, max(1, len(newest)), _TOLD_AT_ONCE):
            summaries = []
            for name, session in newest[at : at + _TOLD_AT_ONCE]:
                known = self._known(name)
                summaries.append(_told(name, known, session, list(known.members.get(session, ()))))
            told = [each for each in summaries if each is not None]
            yield LinksChanged(told, [], at == 0, at + _TOLD_AT_ONCE >= len(newest))

    def told_calls(self, tenant: str, name: str, limit: int) -> Iterator[LinksChanged]:
        """Yield the newest calls of a session for the watcher."""
        known = self._known(tenant)
        session = known.sessions.get(name)
        records = [] if session is None else _records(known, session.current)[-limit:]
        for at in range(0, len(records), _TOLD_AT_ONCE):
            calls = [_describe(record) for record in records[at : at + _TOLD_AT_ONCE]]
            yield LinksChanged([], calls, False, True)

    def changes(self) -> LinksChanged:
        """Return and reset the changes for the watcher."""
        noted, self._changes = self._changes or _Changes(), _Changes()
        sessions: dict[LinkedSession, tuple[str, list[str], list[str]]] = {}
        for name, record in noted.calls.values():
            sessions.setdefault(record.session.current, (name, [], []))
        for session, joined in noted.joined.items():
            sessions[session.current][1].extend(joined)
        for session, merged in noted.merged.items():
            sessions[session.current][2].extend(merged)
        told = (
            _told(name, self._known(name), session, joined, merged)
            for session, (name, joined, merged) in sessions.items()
        )
        calls = [_describe(record) for _, record in noted.calls.values()]
        return LinksChanged([each for each in told if each is not None], calls, False, True)

    def _note(self, tenant: str, record: JournalEntry) -> None:
        if self._changes is not None:
            self._changes.calls[record.id] = tenant, record

    def describe_call(self, tenant: str, name: str) -> dict[str, Any] | None:
        """Describe a call by its id or that of its request or response; None if unknown."""
        known = self._known(tenant)
        record = known.calls.get(name) or known.calls.get(known.aliases.get(name, ""))
        return None if record is None else _describe(record)

    def session_of(self, tenant: str, call: str) -> str | None:
        """Return the id of a call's session; None if the call is unknown."""
        record = self._known(tenant).calls.get(call)
        return None if record is None else record.session.current.id

    def describe_session(self, tenant: str, name: str) -> dict[str, Any] | None:
        """Describe a session by any of its ids; None if unknown."""
        known = self._known(tenant)
        session = known.sessions.get(name)
        return None if session is None else _summarise(known, session.current)

    def describe_sessions(self, tenant: str) -> dict[str, Any]:
        """Describe the sessions that no client named, last used first."""
        known = self._known(tenant)
        listed = (
            _summarise(known, session)
            for session in dict.fromkeys(each.current for each in reversed(known.sessions.values()))
            if not session.is_explicit
        )
        data = [each for each in listed if each is not None]
        return {"data": data[:MAX_LISTED], "has_more": len(data) > MAX_LISTED}

    def describe_graph(self, tenant: str, name: str) -> dict[str, Any] | None:
        """Describe the calls of a session and the links among them."""
        known = self._known(tenant)
        session = known.sessions.get(name)
        if session is None:
            return None
        session = session.current
        return {
            "session": session.id,
            "inferred": not session.is_explicit,
            "calls": [_describe(record) for record in _records(known, session)],
        }

    def describe_profiles(self, tenant: str) -> dict[str, Any]:
        """Describe the templates of a tenant and the behaviour of their calls, last used first."""
        known = self.profiles.known(tenant)
        profiles = [] if known is None else list(known.profiles())
        return {"object": "list", "data": [_describe_profile(each) for each in reversed(profiles)]}

    def statistics(self) -> dict[str, Any]:
        """Return counters since the start, and sizes."""
        return {
            "linked": self._linked,
            "links": self._edges.total(),
            "links_by_kind": dict(self._edges),
            "sessions": sum(len(each.members) for each in self._tenants),
            "unreadable": self._unreadable,
            "tenants": len(self._tenants),
            "calls": sum(len(each.calls) for each in self._tenants),
            "templates": len(self.profiles),
            "bytes": self._linker.size_bytes + self.profiles.size_bytes,
            "largest_tenant_bytes": self._linker.largest_bytes,
        }

    def _use(self, name: str) -> tuple[str, _Tenant, TenantLinker, TenantProfiles]:
        """Return a tenant's name and all its state, created on first use."""
        used = self._used
        if used is None or used[0] != name:
            tenant, linker = self._tenants.use(name), self._linker.tenant(name)
            used = self._used = name, tenant, linker, self.profiles.tenant(name)
        return used

    def _known(self, name: str) -> _Tenant:
        """Return a tenant for a question; an empty one if it is unknown."""
        return self._tenants.known(name) or _Tenant()


def _forget(tenant: _Tenant, call: str) -> None:
    record = tenant.calls.pop(call)
    for alias in (record.request_id, record.response_id):
        # An upstream may have reused the id of a response for a later one.
        if tenant.aliases.get(alias) == call:
            del tenant.aliases[alias]
    members = tenant.members.get(record.session.current)
    if members is not None:
        members.pop(call, None)
        if not members:
            del tenant.members[record.session.current]


def _tools_of(answer: Answer) -> tuple[str, ...]:
    if not any(choice.tool_calls for choice in answer.choices):
        return ()
    names = dict.fromkeys(call.name for choice in answer.choices for call in choice.tool_calls)
    return tuple(name[:_MAX_TOOL_NAME] for name in names)[:_MAX_TOOLS]


def _unpacked(body: bytes) -> bytes:
    """Decompress an answer, as upstreams may compress unasked; empty if it is damaged."""
    if not body.startswith(_GZIP):
        return body
    try:
        return zlib.decompressobj(wbits=31).decompress(body, _MAX_UNPACKED)
    except zlib.error:
        return b""


def _describe(record: JournalEntry) -> dict[str, Any]:
    session = record.session.current
    return {
        "id": record.id,
        "object": "call",
        "request_id": record.request_id,
        "response_id": record.response_id or None,
        "name": _NAMES.get(record.path, record.path),
        "session": session.id,
        "inferred": not session.is_explicit,
        "model": record.model,
        "state": record.state,
        "submitted": record.submitted,
        "finished": record.finished,
        "error": record.error or None,
        "tools": list(record.tools),
        "links": [_describe_link(each) for each in record.links],
    }


def _describe_link(link: Link) -> dict[str, Any]:
    evidence = link.evidence
    return {
        "from": link.source,
        "kind": link.kind,
        "confidence": link.confidence,
        "evidence": None if evidence is None else evidence._asdict(),
    }


def _records(tenant: _Tenant, session: LinkedSession) -> list[JournalEntry]:
    """Return the calls of a session in order of submission, which merging does not keep."""
    records = (tenant.calls[each] for each in tenant.members.get(session, ()))
    return sorted(records, key=lambda record: record.submitted)


def _describe_profile(profile: Profile) -> dict[str, Any]:
    forecast = profile.forecast()
    return {
        "template": forecast.template,
        "object": "profile",
        "prefix_bytes": profile.template.length,
        "calls": forecast.weight,
        "output_tokens": _quantiles(forecast.output_tokens),
        "gap_s": _quantiles(forecast.gap_s),
        "returns": forecast.returns,
        "feeds_fan_in": forecast.feeds_fan_in,
        "fan_in": forecast.fan_in,
        "siblings": forecast.siblings,
        "successors": [
            {"template": key, "probability": probability, "fan_out": fan_out}
            for key, probability, fan_out in forecast.successors
        ],
    }


def _quantiles(values: tuple[float, float]) -> dict[str, float]:
    return {"p50": values[0], "p90": values[1]}


def _told(
    name: str,
    tenant: _Tenant,
    session: LinkedSession,
    joined: list[str],
    merged: list[str] | None = None,
) -> SessionSummary | None:
    """Summarise a session for the watcher; None if its calls are forgotten."""
    records = [tenant.calls[each] for each in tenant.members.get(session, ())]
    if not records:
        return None
    depths = Counter(record.depth for record in records)
    return SessionSummary(
        name,
        session.id,
        not session.is_explicit,
        list(dict.fromkeys(record.model for record in records))[:_MAX_MODELS],
        min(record.submitted for record in records),
        max(record.finished or record.submitted for record in records),
        len(records),
        sum(record.finished is None for record in records),
        sum(record.state == "failed" for record in records),
        max(depths),
        max(depths.values()),
        joined,
        merged or [],
        _title(session, records),
    )


def _title(session: LinkedSession, records: list[JournalEntry]) -> str:
    if session.is_explicit:
        return session.id
    depths = Counter(record.depth for record in records)
    # Only chains use the kinds of links; other calls may have many links.
    is_chain = len(depths) == len(records)
    return inferred_title(
        session.id,
        [record.path for record in records],
        depths,
        {link.kind for record in records for link in record.links} if is_chain else (),
        list(dict.fromkeys(tool for record in records for tool in record.tools)),
    )


def _summarise(tenant: _Tenant, session: LinkedSession) -> dict[str, Any] | None:
    """Summarise a session; None if its calls are forgotten."""
    records = _records(tenant, session)
    if not records:
        return None
    unfinished = sum(record.finished is None for record in records)
    return {
        "id": session.id,
        "object": "session",
        "name": session.id,
        "title": _title(session, records),
        "inferred": not session.is_explicit,
        "models": list(dict.fromkeys(record.model for record in records))[:_MAX_MODELS],
        "created": records[0].submitted,
        "last_used": max(record.finished or record.submitted for record in records),
        "calls": {"unfinished": unfinished, "finished": len(records) - unfinished},
    }
