"""What the linker has found, kept for questions: calls and sessions of each tenant, as plain data.

Holds no text of prompts or answers.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from parrot_gateway.linking.conversation import answer_of, conversation_of, model_of
from parrot_gateway.linking.linker import Linker, LinkerLimits
from parrot_gateway.linking.links import Link, LinkedSession
from parrot_gateway.linking.wire import AnswerSeen, RequestSeen

#: Sessions that one list holds, last used first.
MAX_LISTED = 1000
#: Links of a call that are kept, surest first.
_MAX_LINKS = 64

_NAMES = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
}


@dataclass(slots=True, eq=False)
class CallRecord:
    """One call. Times are seconds since the epoch.

    Attributes:
        response_id: of its answer; empty until that is there.
        links: to earlier calls.
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


@dataclass(slots=True, eq=False)
class _Tenant:
    calls: OrderedDict[str, CallRecord] = field(default_factory=OrderedDict)
    #: Ids of calls by ids of requests and responses.
    aliases: dict[str, str] = field(default_factory=dict)
    #: By every id that was ever given out; those that were merged lead to where they went.
    sessions: OrderedDict[str, LinkedSession] = field(default_factory=OrderedDict)
    #: Calls of each current session, in order.
    members: dict[LinkedSession, dict[str, None]] = field(default_factory=dict)


class LinkJournal:
    """Links calls and remembers the outcome.

    Args:
        limits: for one tenant; as many calls are remembered as can be linked to.
        max_tenants: kept; the one that was quiet longest makes room.
    """

    def __init__(self, limits: LinkerLimits, max_tenants: int) -> None:
        self._limits = limits
        self._max_tenants = max_tenants
        self._linker = Linker(lambda: "sess_" + secrets.token_hex(12), limits, max_tenants)
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        self._unreadable = 0
        self._linked = 0
        self._edges = 0

    def request(self, seen: RequestSeen) -> None:
        """Take the request of a call."""
        conversation = conversation_of(seen.path, seen.body)
        if conversation is None:
            self._unreadable += 1
            return
        tenant = self._tenant(seen.tenant)
        linker = self._linker.tenant(seen.tenant)
        linked = linker.request(seen.call, conversation, seen.now, seen.session or None)
        session = linked.session
        record = CallRecord(
            seen.call,
            seen.request_id,
            seen.path,
            model_of(seen.body),
            session,
            seen.now,
            sorted(linked.links, key=lambda each: -each.confidence)[:_MAX_LINKS],
        )
        self._linked += 1
        self._edges += len(record.links)
        tenant.calls[record.id] = record
        tenant.aliases[record.request_id] = record.id
        tenant.sessions[session.id] = session
        tenant.sessions.move_to_end(session.id)
        members = tenant.members.setdefault(session, {})
        for merged in linked.merged:
            members.update(tenant.members.pop(merged, {}))
        members[record.id] = None
        while len(tenant.calls) > self._limits.calls:
            self._forget(tenant, next(iter(tenant.calls)))

    def answer(self, seen: AnswerSeen) -> None:
        """Take the end of a call."""
        tenant = self._tenant(seen.tenant)
        record = tenant.calls.get(seen.call)
        if record is None:
            return
        record.finished = seen.now
        if seen.status == 0 or seen.status >= 400:
            record.state = "failed" if seen.status else "cancelled"
            record.error = seen.status
            return
        record.state = "done"
        answer = answer_of(record.path, seen.body) if seen.body else None
        if answer is not None:
            self._linker.tenant(seen.tenant).answer(seen.call, answer, seen.now)
            if answer.response_id:
                record.response_id = answer.response_id
                tenant.aliases[answer.response_id] = record.id

    def describe_call(self, tenant: str, name: str) -> dict[str, Any] | None:
        """A call by its id, or that of its request or response; None for one that is not known."""
        known = self._tenant(tenant)
        record = known.calls.get(known.aliases.get(name, name))
        return None if record is None else _describe(record)

    def describe_session(self, tenant: str, name: str) -> dict[str, Any] | None:
        """A session by any id that it had; None for one that is not known."""
        known = self._tenant(tenant)
        session = known.sessions.get(name)
        return None if session is None else _summarise(known, session.current)

    def describe_sessions(self, tenant: str) -> dict[str, Any]:
        """The sessions that no client has named, last used first."""
        known = self._tenant(tenant)
        listed = (
            _summarise(known, session)
            for session in dict.fromkeys(each.current for each in reversed(known.sessions.values()))
            if not session.is_explicit
        )
        data = [each for each in listed if each is not None]
        return {"data": data[:MAX_LISTED], "has_more": len(data) > MAX_LISTED}

    def describe_graph(self, tenant: str, name: str) -> dict[str, Any] | None:
        """The calls of a session and the links among them."""
        known = self._tenant(tenant)
        session = known.sessions.get(name)
        if session is None:
            return None
        session = session.current
        records = [known.calls[each] for each in known.members.get(session, ())]
        return {
            "session": session.id,
            "inferred": not session.is_explicit,
            "calls": [_describe(record) for record in records],
        }

    def statistics(self) -> dict[str, Any]:
        """Counters since the start, and sizes."""
        return {
            "linked": self._linked,
            "links": self._edges,
            "unreadable": self._unreadable,
            "tenants": len(self._tenants),
            "calls": sum(len(each.calls) for each in self._tenants.values()),
            "bytes": self._linker.size_bytes,
        }

    def _tenant(self, name: str) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant()
            if len(self._tenants) > self._max_tenants:
                self._tenants.popitem(last=False)
        else:
            self._tenants.move_to_end(name)
        return tenant

    def _forget(self, tenant: _Tenant, call: str) -> None:
        record = tenant.calls.pop(call)
        for alias in (record.request_id, record.response_id):
            tenant.aliases.pop(alias, None)
        members = tenant.members.get(record.session.current)
        if members is not None:
            members.pop(call, None)
            if not members:
                del tenant.members[record.session.current]
        while len(tenant.sessions) > self._limits.calls:
            tenant.sessions.popitem(last=False)


def _describe(record: CallRecord) -> dict[str, Any]:
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


def _summarise(tenant: _Tenant, session: LinkedSession) -> dict[str, Any] | None:
    """A session; None when its calls are forgotten."""
    records = [tenant.calls[each] for each in tenant.members.get(session, ())]
    if not records:
        return None
    unfinished = sum(record.finished is None for record in records)
    return {
        "id": session.id,
        "object": "session",
        "name": session.id,
        "inferred": not session.is_explicit,
        "created": records[0].submitted,
        "last_used": max(record.finished or record.submitted for record in records),
        "calls": {"unfinished": unfinished, "finished": len(records) - unfinished},
    }
