"""Sessions are bounded, forgotten when unused, and walls between tenants."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from parrot_gateway.exceptions import (
    ConflictError,
    GatewayError,
    InvalidRequestError,
    OverloadedError,
    SessionFullError,
    SessionNotFoundError,
    ValueTooLargeError,
    VariableNotFoundError,
)
from parrot_gateway.semantic.graph.node import CallNode
from parrot_gateway.semantic.session import Session
from parrot_gateway.semantic.sessions import SessionStore
from parrot_gateway.semantic.variable import Variable
from parrot_gateway.settings.model import SessionSettings


def counter(prefix: str) -> Callable[[], str]:
    numbers = itertools.count()
    return lambda: f"{prefix}{next(numbers):08d}"


def store_of(closed: list[Session] | None = None, **limits: float) -> SessionStore:
    held = closed if closed is not None else []
    return SessionStore(
        SessionSettings(**limits),  # type: ignore[arg-type]
        mint_session_id=counter("sess"),
        mint_variable_id=counter("v"),
        on_close=held.append,
    )


def session_of(**limits: int) -> Session:
    return Session(
        "s1",
        "demo",
        "alice",
        now=0.0,
        limits=SessionSettings(**limits),  # type: ignore[arg-type]
        mint_variable_id=counter("v"),
    )


def call(session: Session, id: str, reads: str = "", writes: str | None = None) -> CallNode:
    """A call in the session's graph that reads and writes variables by name."""
    node = CallNode(
        id=id,
        session_id=session.id,
        inputs=tuple(session.variable(name).id for name in reads.split()),
        output=session.variable(writes).id if writes else None,
    )
    session.graph.add(node)
    return node


def test_a_name_is_one_variable() -> None:
    session = session_of()
    one = session.variable("story")
    assert session.variable(" story ") is one
    assert session.find("story") is one
    assert session.lookup(one.id) is one
    assert session.get(one.id) is one
    assert session.get("other") is None
    assert session.find("other") is None
    assert len({session.anonymous_variable().name for _ in range(50)}) == 50
    assert session.num_variables == 51


@pytest.mark.parametrize("name", ["", "  ", "a" * 257, "a\nb", "a\x1b[31m", "a\u202eb"])
def test_names_that_break_things_are_refused(name: str) -> None:
    for attempt in (
        lambda: session_of().variable(name),
        lambda: session_of().keep_context(name, object()),
        lambda: store_of().get_or_create("alice", name, 0.0),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            attempt()
        assert caught.value.param in ("variable", "context", "session")


def test_variables_that_nothing_needs_make_room_oldest_first() -> None:
    session = session_of(max_variables=4)
    call(session, "c1", reads="live", writes="out")
    session.variable("old").set("text")
    session.variable("new").set("text")
    session.variable("more")
    assert session.find("old") is None
    for name in ("live", "out", "new", "more"):
        assert session.find(name) is not None
    session.variable("and more")
    assert session.find("new") is None
    with pytest.raises(SessionFullError) as caught:
        session.variable("too many")
    assert "sessions.max_variables" in caught.value.message


def test_eviction_lets_finished_calls_go_with_their_variables() -> None:
    session = session_of(max_variables=2)
    node = call(session, "c1", reads="a", writes="b")
    session.variable("a").set("x")
    session.variable("b").set("y")
    with pytest.raises(SessionFullError):
        session.variable("c")
    session.graph.finish(node.id, "done", 1.0)
    session.variable("c")
    assert len(session.graph) == 0
    session.graph.check_integrity()


def test_bytes_of_a_session_are_bounded() -> None:
    session = session_of(max_session_bytes=100, max_value_bytes=60)
    with pytest.raises(ValueTooLargeError):
        session.variable("a").set("x" * 61)
    session.variable("a").set("x" * 60)
    writing = session.variable("b")
    writing.begin()
    writing.append("y" * 40)
    assert session.value_bytes == 100
    writing.append("y")
    assert session.find("a") is None
    assert session.value_bytes == 41
    other = session.variable("c")
    other.begin()
    with pytest.raises(SessionFullError) as caught:
        other.append("z" * 60)
    assert "sessions.max_session_bytes" in caught.value.message
    assert session.value_bytes == 41
    session.close()
    assert session.value_bytes == 0


def test_an_evicted_value_is_still_there_for_who_was_told() -> None:
    session = session_of(max_session_bytes=10)
    told: list[Variable] = []
    first = session.variable("a")
    first.subscribe(told.append)
    first.set("12345678")
    session.variable("b").set("12345678")
    assert session.find("a") is None
    assert told[0].value == "12345678"


def test_variables_without_text_stay_when_bytes_are_needed() -> None:
    session = session_of(max_session_bytes=10)
    session.variable("blank").set("")
    session.variable("a").set("12345678")
    session.variable("b").set("12345678")
    assert session.find("a") is None
    assert session.find("blank") is not None


def test_contexts_are_bounded() -> None:
    session = session_of(max_contexts=1)
    session.keep_context("chat", 1)
    session.keep_context("chat", 2)
    with pytest.raises(SessionFullError):
        session.keep_context("other", 3)
    assert session.drop_context("chat") == 2
    assert session.drop_context("chat") is None
    session.keep_context("other", 3)


def test_delete_refuses_what_is_in_use_and_tells_readers() -> None:
    session = session_of()
    call(session, "c1", reads="in", writes="out")
    with pytest.raises(ConflictError) as caught:
        session.delete(session.variable("in").id)
    assert caught.value.code == "variable_in_use"
    lonely, told = session.variable("lonely"), []
    lonely.subscribe(lambda v: told.append(v.state))
    session.delete(lonely.id)
    assert told == ["cancelled"]
    with pytest.raises(VariableNotFoundError):
        session.delete(lonely.id)


def test_close_frees_everything_and_tells_everybody() -> None:
    session = session_of()
    call(session, "c1", reads="in", writes="out")
    ready = session.variable("ready")
    ready.set("text")
    told: list[tuple[str, str]] = []

    def broken(variable: Variable) -> None:
        raise RuntimeError("broken listener")

    session.variable("in").subscribe(broken)
    for variable in session:
        variable.subscribe(lambda v: told.append((v.name, v.state)))
    with pytest.raises(RuntimeError):
        session.close()
    assert sorted(told) == [("in", "cancelled"), ("out", "cancelled")]
    assert (session.num_variables, len(session.graph), session.value_bytes) == (0, 0, 0)
    session.close()
    for attempt in (lambda: session.variable("x"), lambda: session.keep_context("x", 1)):
        with pytest.raises(SessionNotFoundError):
            attempt()


def test_a_session_is_found_by_id_and_by_name() -> None:
    store = store_of()
    session = store.get_or_create("alice", "run 1", 0.0)
    assert store.get_or_create("alice", "run 1", 1.0) is session
    assert store.get_or_create("alice", session.id, 2.0) is session
    assert store.find("alice", "run 1") is session
    assert session.last_used == 2.0
    nameless = store.get_or_create("alice", None, 0.0)
    assert nameless is not store.get_or_create("alice", None, 0.0)
    store.touch(session, 3.0)
    assert store.of_tenant("alice")[0] is session
    assert len(store.of_tenant("alice")) == 3


def error_of(attempt: Callable[[], object]) -> tuple[type, int, dict[str, str | None]]:
    with pytest.raises(GatewayError) as caught:
        attempt()
    return type(caught.value), caught.value.status, caught.value.to_dict()


def test_foreign_and_unknown_cannot_be_told_apart() -> None:
    """The same question to a store in which it is another's, and to an empty one."""
    store, empty = store_of(), store_of()
    session = store.get_or_create("alice", "secret", 0.0)
    variable = session.variable("story")
    variable.set("text")
    store.get_or_create("mallory", "own", 0.0)
    for ask in (
        lambda s: s.variable("mallory", variable.id),
        lambda s: s.find("mallory", session.id),
        lambda s: s.find("mallory", "secret"),
    ):
        assert error_of(lambda ask=ask: ask(store)) == error_of(lambda ask=ask: ask(empty))
    assert store.variable("alice", variable.id) is variable  # it is there, for its owner
    assert store.owner_of(variable) is session
    assert empty.owner_of(variable) is None


def test_anothers_session_name_or_id_makes_an_own_session() -> None:
    store = store_of()
    hers = store.get_or_create("alice", "run", 0.0)
    for name in ("run", hers.id):
        his = store.get_or_create("mallory", name, 0.0)
        assert his is not hers
        assert his.tenant == "mallory"
        assert his.id != hers.id
    hers.variable("story").set("text")
    assert [v.name for s in store.of_tenant("mallory") for v in s] == []


def test_idle_sessions_expire_busy_ones_stay() -> None:
    closed: list[Session] = []
    store = store_of(closed, ttl_s=10)
    idle, busy, pinned, used = (store.get_or_create("a", n, 0.0) for n in "ibpu")
    node = call(busy, "c1")
    pinned.pin()
    variable = used.variable("x")
    assert store.variable("a", variable.id, 5.0) is variable
    assert store.sweep(10.0) == []
    assert store.sweep(10.5) == [idle] == closed
    busy.graph.finish(node.id, "done", 11.0)
    pinned.unpin()
    with pytest.raises(ValueError):
        pinned.unpin()
    assert store.sweep(11.0) == [busy, pinned]
    assert store.sweep(16.0) == [used]
    assert store.statistics()[:5] == (0, 0, 0, 0, 0)
    with pytest.raises(VariableNotFoundError):
        store.variable("a", variable.id)


def test_a_full_store_makes_room_at_the_tenants_own_expense() -> None:
    store = store_of(max_sessions=4, max_sessions_per_tenant=3)
    alice = store.get_or_create("alice", "only", 0.0)
    first, second, _ = (store.get_or_create("bob", f"{n}", 1.0) for n in range(3))
    store.touch(first, 2.0)
    store.get_or_create("bob", "another", 3.0)
    assert (second.is_closed, first.is_closed, alice.is_closed) == (True, False, False)
    store.get_or_create("carol", "new", 4.0)  # full: the tenant with most sessions pays
    assert not alice.is_closed
    assert len(store.of_tenant("bob")) == 2


def test_a_store_of_busy_sessions_refuses() -> None:
    store = store_of(max_sessions=2, max_sessions_per_tenant=1)
    for tenant in ("alice", "bob"):
        call(store.get_or_create(tenant, "run", 0.0), "c1")
    for tenant, setting in (("alice", "max_sessions_per_tenant"), ("carol", "max_sessions")):
        with pytest.raises(OverloadedError) as caught:
            store.get_or_create(tenant, "more", 0.0)
        assert f"sessions.{setting})" in caught.value.message
        assert caught.value.status == 503
    assert len(store) == 2


def test_bytes_of_all_sessions_are_bounded() -> None:
    store = store_of(max_total_bytes=100)
    hers = store.get_or_create("alice", "run", 0.0)
    hers.variable("a").set("x" * 30)
    old, new = (store.get_or_create("bob", n, 0.0) for n in ("old", "new"))
    old.variable("a").set("x" * 20)
    new.variable("a").set("x" * 60)
    assert (hers.is_closed, old.is_closed) == (False, True)
    new.variable("b").set("x" * 40)  # nothing of bob's own is left to give up but what is written
    assert (hers.is_closed, new.is_closed) == (True, False)
    with pytest.raises(OverloadedError) as caught:
        new.variable("c").set("x")
    assert "sessions.max_total_bytes" in caught.value.message
    assert store.statistics().value_bytes == new.value_bytes == 100
    store.close_all()
    assert store.statistics().value_bytes == 0


class StoreMachine(RuleBasedStateMachine):
    """Tenants come, write, go idle and return; nothing leaks between or after them."""

    LIMITS = {"ttl_s": 5, "max_sessions": 5, "max_sessions_per_tenant": 3, "max_variables": 4}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.closed: list[Session] = []
        self.store = store_of(self.closed, max_total_bytes=60, **self.LIMITS)
        self.now = 0.0
        self.made: list[Session] = []
        self.variables: list[tuple[str, Session, Variable]] = []
        self.numbers = itertools.count()

    @rule(tenant=st.sampled_from("ab"), name=st.sampled_from(["x", "y", "z", "u", None]))
    def use(self, tenant: str, name: str | None) -> None:
        try:
            session = self.store.get_or_create(tenant, name, self.now)
        except OverloadedError:
            assert len(self.store) >= 3
            assert not all(s.is_idle for s in self.made if not s.is_closed)
            return
        assert session.tenant == tenant
        if session not in self.made:
            self.made.append(session)

    @rule(pick=st.integers(0, 50), name=st.sampled_from("abcdef"), text=st.text(max_size=12))
    def write(self, pick: int, name: str, text: str) -> None:
        alive = [s for s in self.made if not s.is_closed]
        if not alive:
            return
        session = alive[pick % len(alive)]
        try:
            variable = session.variable(name)
            if variable.state == "empty" and variable.producer is None:
                variable.set(text)
        except (SessionFullError, OverloadedError):
            return
        self.variables.append((session.tenant, session, variable))

    @rule(pick=st.integers(0, 50), name=st.sampled_from("abcdef"))
    def submit(self, pick: int, name: str) -> None:
        alive = [s for s in self.made if not s.is_closed]
        if alive:
            session = alive[pick % len(alive)]
            try:
                call(session, f"c{next(self.numbers)}", reads=name)
            except SessionFullError:
                return

    @rule(pick=st.integers(0, 50))
    def finish(self, pick: int) -> None:
        for session in self.made:
            for node in session.graph.unfinished[: pick % 3]:
                session.graph.finish(node.id, "done", self.now)

    @rule(pick=st.integers(0, 50))
    def close(self, pick: int) -> None:
        if self.made:
            self.store.close(self.made[pick % len(self.made)])

    @rule(by=st.floats(0, 4))
    def time_passes(self, by: float) -> None:
        self.now += by
        for session in self.store.sweep(self.now):
            assert session.is_closed
            assert self.now - session.last_used > 5

    @invariant()
    def counts_agree(self) -> None:
        alive = [s for s in self.made if not s.is_closed]
        gauges = self.store.statistics()
        assert len(self.store) == gauges.sessions == len(alive) <= 5
        assert gauges.tenants == len({s.tenant for s in alive})
        assert gauges.variables == sum(len(list(s)) for s in alive)
        assert gauges.unfinished_calls == sum(len(s.graph.unfinished) for s in alive)
        held = sum(len((v.value or "").encode()) for s in alive for v in s)
        assert gauges.value_bytes == held == sum(s.value_bytes for s in alive) <= 60
        assert gauges.created == len(self.made)
        assert gauges.closed + gauges.evicted + gauges.expired == len(self.closed)
        assert sorted(map(id, self.closed)) == sorted(id(s) for s in self.made if s.is_closed)
        assert all(s.num_variables <= 4 for s in alive)

    @invariant()
    def tenants_see_their_own_only(self) -> None:
        for tenant, session, variable in self.variables[-20:]:
            there = not session.is_closed and variable in list(session)
            if there:
                assert self.store.variable(tenant, variable.id) is variable
            for who in "ab":
                if who != tenant or not there:
                    with pytest.raises(VariableNotFoundError):
                        self.store.variable(who, variable.id)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=50, stateful_step_count=25, deadline=None)
