"""All sessions of all tenants: found by id or name, bounded, forgotten when unused.

Each tenant has maps of its own, so unknown and foreign sessions look alike, in text and in time.
Room is made from the tenant's own idle sessions first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from itertools import islice
from typing import NamedTuple

from parrot_gateway.exceptions import OverloadedError, SessionNotFoundError, VariableNotFoundError
from parrot_gateway.semantic.session import Session, check_name
from parrot_gateway.semantic.variable import Variable
from parrot_gateway.settings.model import SessionSettings


class SessionStatistics(NamedTuple):
    """Gauges, then counters since the start."""

    tenants: int
    sessions: int
    variables: int
    unfinished_calls: int
    value_bytes: int
    created: int
    #: Sessions closed by request, to make room, and after their idle time.
    closed: int
    evicted: int
    expired: int


@dataclass(slots=True)
class _Tenant:
    #: By id, least recently used first.
    sessions: OrderedDict[str, Session] = field(default_factory=OrderedDict)
    #: By name and by alias.
    by_name: dict[str, Session] = field(default_factory=dict)
    #: Sessions used only by recorded calls, by id, least recently used first.
    recorded: OrderedDict[str, Session] = field(default_factory=OrderedDict)
    variables: dict[str, Variable] = field(default_factory=dict)


@dataclass(eq=False)
class SessionStore:
    """The sessions of a gateway."""

    limits: SessionSettings
    _: KW_ONLY
    #: Make unguessable, unique ids.
    mint_session_id: Callable[[], str]
    mint_variable_id: Callable[[], str]
    #: Called with each closed session, for any reason.
    on_close: Callable[[Session], None] = lambda session: None

    def __post_init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        #: Every session by id.
        self._owners: dict[str, Session] = {}
        self._bytes = 0
        self._variables = 0
        self._created = 0
        self._closed = 0
        self._evicted = 0
        self._expired = 0

    def __len__(self) -> int:
        return len(self._owners)

    def get_or_create(self, tenant: str, name: str | None, now: float) -> Session:
        """Return the tenant's session of that id or name, created if needed; None creates one.

        Raises:
            InvalidRequestError: the name is not valid.
            OverloadedError: too many sessions, none of them idle.
        """
        if name is not None:
            name = check_name(name, "session")
            found = self._find(tenant, name)
            if found is not None:
                self.touch(found, now)
                self._tenants[tenant].recorded.pop(found.id, None)
                return found
        self._make_room(tenant)
        return self._create(tenant, name, now)

    def get_or_record(self, tenant: str, name: str, now: float) -> Session | None:
        """Return the session of that name for a recorded call, created if needed.

        Only sessions used by recorded calls alone make room for a new one; returns None if there
        are none.

        Args:
            name: a name that `check_name` accepts.
        """
        found = self._find(tenant, name)
        if found is not None:
            self.touch(found, now)
            return found
        held = self._tenants.get(tenant, _Tenant())
        is_full = len(held.sessions) >= self.limits.max_sessions_per_tenant
        if (is_full or len(self) >= self.limits.max_sessions) and not self._evict_recorded(held):
            return None
        session = self._create(tenant, name, now)
        self._tenants[tenant].recorded[session.id] = session
        return session

    def add_alias(self, session: Session, alias: str) -> None:
        """Let a session be found by one more name, unless another session has it.

        A session keeps as many as its graph keeps finished calls; the oldest are dropped first.
        """
        held = self._tenants.get(session.tenant)
        if held is None or session.is_closed or alias in held.by_name:
            return
        held.by_name[alias] = session
        session.aliases.append(alias)
        while len(session.aliases) > max(1, self.limits.max_finished_calls):
            held.by_name.pop(session.aliases.popleft(), None)

    def _create(self, tenant: str, name: str | None, now: float) -> Session:
        session_id = self.mint_session_id()
        held = self._tenants.setdefault(tenant, _Tenant())
        session = Session(
            session_id,
            name if name is not None else session_id,
            tenant,
            now=now,
            limits=self.limits,
            mint_variable_id=self.mint_variable_id,
            index=held.variables,
            account_bytes=self._account,
            account_variables=self._count,
        )
        held.sessions[session_id] = session
        held.by_name[session.name] = session
        self._owners[session_id] = session
        self._created += 1
        return session

    def find(self, tenant: str, id_or_name: str, now: float | None = None) -> Session:
        """Return the tenant's session of that id or name; a given time marks it as used.

        Raises:
            SessionNotFoundError: there is none; it has expired; it is another tenant's.
        """
        found = self._find(tenant, id_or_name.strip())
        if found is None:
            raise SessionNotFoundError(id_or_name)
        if now is not None:
            self.touch(found, now)
        return found

    def variable(
        self, tenant: str, variable_id: str, now: float | None = None, param: str = "variable"
    ) -> Variable:
        """Return the tenant's variable of that id in any session; a given time marks the session as
        used.

        Raises:
            VariableNotFoundError: there is none; it has expired; it is another tenant's.
        """
        held = self._tenants.get(tenant)
        found = held.variables.get(variable_id) if held is not None else None
        if held is None or found is None:
            raise VariableNotFoundError(variable_id, param=param)
        if now is not None:
            self.touch(held.sessions[found.session_id], now)
        return found

    def variables(
        self, tenant: str, variable_ids: Iterable[str], now: float
    ) -> dict[str, Variable]:
        """Return the tenant's variables of those ids in order, and mark their sessions as used.

        Raises:
            VariableNotFoundError: one is unknown, expired or foreign.
        """
        return {each: self.variable(tenant, each, now) for each in variable_ids}

    def owner_of(self, variable: Variable) -> Session | None:
        """Return the session of a variable; None if it was closed."""
        return self._owners.get(variable.session_id)

    def of_tenant(self, tenant: str) -> list[Session]:
        """Return the tenant's sessions, last used first."""
        held = self._tenants.get(tenant)
        return list(reversed(held.sessions.values())) if held is not None else []

    def get(self, session_id: str) -> Session | None:
        """Return a session by id in any tenant (operators only)."""
        return self._owners.get(session_id)

    def newest(self, limit: int) -> Iterator[Session]:
        """Yield at most `limit` sessions of each tenant, last used first (operators only)."""
        for held in self._tenants.values():
            yield from islice(reversed(held.sessions.values()), limit)

    def touch(self, session: Session, now: float) -> None:
        """Mark a session as used now."""
        session.last_used = max(session.last_used, now)
        held = self._tenants.get(session.tenant)
        if held is not None and session.id in held.sessions:
            held.sessions.move_to_end(session.id)
            if session.id in held.recorded:
                held.recorded.move_to_end(session.id)

    def close(self, session: Session) -> None:
        """Close and forget a session whose calls were cancelled before. Safe to call twice."""
        if self._remove(session):
            self._closed += 1

    def sweep(self, now: float) -> list[Session]:
        """Close and return the sessions that were idle for longer than the limit."""
        expired = []
        for held in list(self._tenants.values()):
            for session in list(held.sessions.values()):
                # NOTE: sorted by last use, unless the caller's clock went backwards.
                if now - session.last_used <= self.limits.ttl_s:
                    break
                if session.is_idle:
                    expired.append(session)
        for session in expired:
            if self._remove(session):
                self._expired += 1
        return expired

    def close_all(self) -> None:
        for held in list(self._tenants.values()):
            for session in list(held.sessions.values()):
                self.close(session)

    def statistics(self) -> SessionStatistics:
        """Return gauges and counters; linear in the number of sessions."""
        sessions = [s for held in self._tenants.values() for s in held.sessions.values()]
        return SessionStatistics(
            tenants=len(self._tenants),
            sessions=len(self),
            variables=sum(session.num_variables for session in sessions),
            unfinished_calls=sum(session.graph.num_unfinished for session in sessions),
            value_bytes=self._bytes,
            created=self._created,
            closed=self._closed,
            evicted=self._evicted,
            expired=self._expired,
        )

    def _find(self, tenant: str, id_or_name: str) -> Session | None:
        held = self._tenants.get(tenant)
        if held is None:
            return None
        return held.sessions.get(id_or_name) or held.by_name.get(id_or_name)

    def _make_room(self, tenant: str) -> None:
        held = self._tenants.get(tenant, _Tenant())
        own = len(held.sessions)
        if own >= self.limits.max_sessions_per_tenant and not self._evict_from(held):
            raise OverloadedError(
                f"{own} sessions are in work, which is the limit for one key "
                "(setting sessions.max_sessions_per_tenant)."
            )
        if len(self) >= self.limits.max_sessions and not self._evict_any(held):
            raise OverloadedError(
                "As many sessions are in work as this gateway keeps "
                "(setting sessions.max_sessions)."
            )

    def _evict_any(self, own: _Tenant) -> bool:
        """Close one idle session of the tenant, or else of the tenant with the most sessions."""
        by_size = sorted(self._tenants.values(), key=lambda held: -len(held.sessions))
        return any(self._evict_from(held) for held in (own, *by_size))

    def _evict_from(self, held: _Tenant) -> bool:
        """Close the least recently used idle session, preferring one with only recorded calls;
        return true if there was any.
        """
        return self._evict_recorded(held) or self._evict_first(held.sessions.values())

    def _evict_recorded(self, held: _Tenant) -> bool:
        return self._evict_first(held.recorded.values())

    def _evict_first(self, sessions: Iterable[Session]) -> bool:
        idle = next((session for session in sessions if session.is_idle), None)
        if idle is None:
            return False
        self._remove(idle)
        self._evicted += 1
        return True

    def _account(self, writer: Session, delta: int) -> None:
        while delta > 0 and self._bytes + delta > self.limits.max_total_bytes:
            self._evict_for(writer, lambda session: session.value_bytes, "much text", "bytes")
        self._bytes += delta

    def _count(self, writer: Session, delta: int) -> None:
        while delta > 0 and self._variables + delta > self.limits.max_total_variables:
            self._evict_for(
                writer, lambda session: session.num_variables, "many variables", "variables"
            )
        self._variables += delta

    def _evict_for(
        self, writer: Session, size: Callable[[Session], int], what: str, unit: str
    ) -> None:
        """Close the largest other idle session, of the writer's tenant if possible."""
        idle = [
            session
            for held in self._tenants.values()
            for session in held.sessions.values()
            if session.is_idle and size(session) and session is not writer
        ]
        if not idle:
            raise OverloadedError(
                f"All sessions together hold as {what} as this gateway keeps "
                f"(setting sessions.max_total_{unit})."
            )
        self._remove(max(idle, key=lambda s: (s.tenant == writer.tenant, size(s))))
        self._evicted += 1

    def _remove(self, session: Session) -> bool:
        held = self._tenants.get(session.tenant)
        if held is None or held.sessions.pop(session.id, None) is None:
            return False
        held.recorded.pop(session.id, None)
        for name in (session.name, *session.aliases):
            held.by_name.pop(name, None)
        if not held.sessions:
            del self._tenants[session.tenant]
        del self._owners[session.id]
        try:
            session.close()
        finally:
            self.on_close(session)
        return True
