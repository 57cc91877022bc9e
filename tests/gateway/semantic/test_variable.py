"""A variable is written once, tells everybody, and holds no more than it may."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from parrot_gateway.exceptions import (
    GatewayError,
    OverloadedError,
    ValueTooLargeError,
    VariableStateError,
)
from parrot_gateway.semantic.variable import TRANSITIONS, Failure, State, Variable

LIMIT = 40
FAILURE = Failure("engine_lost", "the engine went away", "x", "call-1")
TEXTS = st.text(alphabet="ab€😀\n", max_size=6)


def variable(limit: int = LIMIT, account: Callable[[int], None] | None = None) -> Variable:
    if account is None:
        return Variable("v1", "x", "s1", max_value_bytes=limit)
    return Variable("v1", "x", "s1", max_value_bytes=limit, account=account)


#: The same rules as a table of what is allowed, written down by hand.
ALLOWED = {
    ("empty", "begin"): "running",
    ("empty", "set"): "ready",
    ("empty", "fail"): "failed",
    ("empty", "cancel"): "cancelled",
    ("running", "append"): "running",
    ("running", "set"): "ready",
    ("running", "fail"): "failed",
    ("running", "cancel"): "cancelled",
}


class VariableMachine(RuleBasedStateMachine):
    """Any sequence of operations against a model that is a string and a word."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.variable = variable(account=self.account)
        self.state = "empty"
        self.text = ""
        self.told: list[State] = []
        self.changes = 0
        self.variable.subscribe(lambda v: self.told.append(v.state))
        self.told_last: list[State] = []
        self.variable.subscribe(lambda v: self.told_last.append(v.state), last_only=True)

    def account(self, delta: int) -> None:
        self.bytes += delta

    def attempt(self, operation: str, act: Callable[[], None], text: str | None) -> None:
        to = ALLOWED.get((self.state, operation))
        if operation == "set" and to and not (text or "").startswith(self.text):
            to = None
        if to is None:
            with pytest.raises(VariableStateError) as caught:
                act()
            assert caught.value.story == self.variable.story
            assert caught.value.status == 409
            return
        grown = {"append": self.text + (text or ""), "set": text or ""}.get(operation, "")
        if len(grown.encode()) > LIMIT:
            with pytest.raises(ValueTooLargeError):
                act()
            return
        act()
        self.changes += not (operation == "append" and not text)
        self.text = grown
        self.state = to

    @rule()
    def begin(self) -> None:
        self.attempt("begin", lambda: self.variable.begin("call-1"), None)

    @rule(text=TEXTS)
    def append(self, text: str) -> None:
        self.attempt("append", lambda: self.variable.append(text), text)

    @rule(text=TEXTS)
    def set(self, text: str) -> None:
        self.attempt("set", lambda: self.variable.set(text), text)

    @precondition(lambda self: self.state == "running")
    @rule(rest=TEXTS)
    def finish(self, rest: str) -> None:
        value = self.text + rest
        self.attempt("set", lambda: self.variable.set(value), value)

    @rule()
    def fail(self) -> None:
        self.attempt("fail", lambda: self.variable.fail(FAILURE), None)

    @rule()
    def cancel(self) -> None:
        self.attempt("cancel", self.variable.cancel, None)

    @rule(offset=st.integers(0, 50))
    def read_on(self, offset: int) -> None:
        assert self.variable.text_after(offset) == self.text[offset:]

    @invariant()
    def agrees_with_the_model(self) -> None:
        subject = self.variable
        assert subject.state == self.state
        assert subject.text == self.text
        assert subject.size_bytes == self.bytes == len(self.text.encode()) <= LIMIT
        assert (subject.value is not None) == (self.state == "ready")
        assert (subject.failure is not None) == (self.state in ("failed", "cancelled"))
        assert subject.is_final == (self.state in ("ready", "failed", "cancelled"))
        assert len(self.told) == self.changes
        assert self.told[-1:] in ([], [self.state])
        assert self.told_last == ([self.state] if subject.is_final else [])
        assert subject.num_listeners == (0 if subject.is_final else 2)
        assert "".join(subject.parts) == (self.text if self.state == "running" else "")


TestVariableMachine = VariableMachine.TestCase
TestVariableMachine.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)


def test_the_table_of_transitions_has_no_way_back() -> None:
    assert set(TRANSITIONS) == {"empty", "running", "ready", "failed", "cancelled"}
    for ends in (s for s, after in TRANSITIONS.items() if not after):
        assert ends in ("ready", "failed", "cancelled")
    assert all("empty" not in after for after in TRANSITIONS.values())


@given(st.lists(st.text(alphabet="xyz€", max_size=3), max_size=700), st.integers(0, 2_000))
@settings(max_examples=30, deadline=None)
def test_many_small_parts_read_like_one_text(pieces: list[str], offset: int) -> None:
    subject = variable(limit=1_000_000)
    subject.begin()
    for piece in pieces:
        subject.append(piece)
    text = "".join(pieces)
    assert subject.text == text
    assert subject.text_after(offset) == text[offset:]
    assert len(subject.parts) < 256 + len(pieces) / 256 + 1


def test_a_story_tells_who_did_what() -> None:
    subject = variable()
    subject.begin("call-7")
    subject.set("done", "call-7")
    with pytest.raises(VariableStateError) as caught:
        subject.set("again")
    message = caught.value.message
    assert "'x'" in message
    assert "empty -> running (by call-7) -> ready (by call-7)" in message
    assert "done" not in message.replace("call-7", "")


def test_what_was_read_cannot_be_taken_back() -> None:
    subject = variable()
    subject.begin()
    subject.append("The sea")
    with pytest.raises(VariableStateError):
        subject.set("A lake")
    assert subject.state == "running"
    subject.set("The sea was calm")
    assert subject.value == "The sea was calm"


def test_a_value_that_does_not_fit_changes_nothing() -> None:
    seen: list[State] = []
    subject = variable(limit=4)
    subject.subscribe(lambda v: seen.append(v.state))
    subject.begin()
    subject.append("€")
    for attempt in (lambda: subject.append("ab"), lambda: subject.set("€ab")):
        with pytest.raises(ValueTooLargeError) as caught:
            attempt()
        assert caught.value.status == 413
        assert "4 bytes" in caught.value.message
    assert (subject.text, subject.size_bytes) == ("€", 3)
    assert seen == ["running", "running"]
    subject.set("€a")


def test_an_account_that_refuses_keeps_the_text_out() -> None:
    def refuse(delta: int) -> None:
        if delta > 3:
            raise ValueTooLargeError("x", 3, "sessions.max_session_bytes")

    subject = variable(account=refuse)
    with pytest.raises(ValueTooLargeError):
        subject.set("four")
    assert (subject.state, subject.size_bytes) == ("empty", 0)
    subject.set("abc")


def test_lone_surrogates_are_counted_not_refused() -> None:
    subject = variable()
    subject.set("a\ud800")
    assert subject.size_bytes == 4


def test_listeners_come_and_go() -> None:
    told: list[str] = []
    subject = variable()
    ends: list[Callable[[], None]] = []

    def first(_: Variable) -> None:
        told.append("first")
        ends[1]()

    ends.append(subject.subscribe(first))
    ends.append(subject.subscribe(lambda _: told.append("second")))
    subject.begin()
    assert told == ["first"]
    ends[0]()
    ends[0]()
    subject.set("value")
    assert told == ["first"]
    assert subject.num_listeners == 0
    subject.subscribe(lambda _: told.append("late"))()
    assert subject.num_listeners == 0


def test_listeners_of_the_last_change_are_told_in_turn_with_the_others() -> None:
    told: list[str] = []
    subject = variable()
    end = subject.subscribe(lambda _: told.append("gone"), last_only=True)
    subject.subscribe(lambda _: told.append("first"), last_only=True)
    subject.subscribe(lambda _: told.append("second"))
    subject.subscribe(lambda _: told.append("third"), last_only=True)
    end()
    end()
    subject.begin()
    subject.append("va")
    assert told == ["second", "second"]
    told.clear()
    subject.set("value")
    assert told == ["first", "second", "third"]


def test_a_listener_may_write_on() -> None:
    told: list[tuple[str, State]] = []
    subject = variable()

    def writes(v: Variable) -> None:
        told.append(("writer", v.state))
        if v.state == "running":
            v.set("value")

    subject.subscribe(writes)
    subject.subscribe(lambda v: told.append(("reader", v.state)))
    subject.begin()
    assert told == [("writer", "running"), ("writer", "ready"), ("reader", "ready")]


def test_a_listener_that_raises_keeps_nobody_from_hearing() -> None:
    told: list[State] = []
    subject = variable()

    def broken(_: Variable) -> None:
        raise RuntimeError("broken listener")

    subject.subscribe(broken)
    subject.subscribe(lambda v: told.append(v.state))
    with pytest.raises(RuntimeError):
        subject.set("value")
    assert told == ["ready"]
    assert subject.state == "ready"
    assert subject.num_listeners == 0


def test_listeners_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parrot_gateway.semantic.variable.MAX_LISTENERS", 2)
    subject = variable()
    for _ in range(2):
        subject.subscribe(lambda _: None)
    with pytest.raises(OverloadedError):
        subject.subscribe(lambda _: None)


def test_a_failure_travels_and_stays_small() -> None:
    failure = FAILURE
    for step in range(5_000):
        failure = failure.passed_on(f"v{step}", f"call-{step}")
    assert failure.code == "dependency_failed"
    assert failure.origin == FAILURE
    assert len(failure.message) < 200
    assert (failure.variable_name, failure.call_id) == ("v4999", "call-4999")
    error: GatewayError = failure.to_error("v4999")
    assert error.status == 424
    assert (b"x-should-retry", b"false") in error.headers()
    for told in ("v4999", "call-4999", "'x'", "the engine went away"):
        assert told in error.message
    plain = failure.to_dict()
    assert plain["cause"] == FAILURE.to_dict()
    with pytest.raises(ValueError):
        Failure("x", "y", cause=failure)


def test_long_messages_are_cut() -> None:
    subject = variable()
    subject.fail(Failure("engine_error", "x" * 10_000, "x", "call-1"))
    assert subject.failure is not None
    assert len(subject.failure.message) == 2_000


def test_a_cancelled_variable_says_so() -> None:
    subject = variable()
    subject.producer = "call-3"
    subject.cancel()
    assert subject.failure is not None
    assert (subject.failure.code, subject.failure.call_id) == ("cancelled", "call-3")


def test_a_released_variable_counts_no_more_but_can_be_read() -> None:
    held = [0]

    def account(delta: int) -> None:
        held[0] += delta

    subject = variable(account=account)
    subject.set("value")
    assert held == [5]
    subject.release()
    subject.release()
    assert held == [0]
    assert (subject.state, subject.value) == ("ready", "value")
