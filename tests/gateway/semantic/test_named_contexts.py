"""Named contexts of a session: the pure core."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from parrot_gateway.calls.fifo_lock import MAX_WAITING
from parrot_gateway.calls.requests.call import CallKind, CallRequest
from parrot_gateway.exceptions import (
    ConflictError,
    ContextNotFoundError,
    ContextTooLargeError,
    GatewayError,
    InvalidRequestError,
    OverloadedError,
    SessionFullError,
    UnsupportedError,
)
from parrot_gateway.semantic.contexts import (
    Contents,
    ContextName,
    ContextUse,
    enter,
    find_context,
    free_all_contexts,
    free_context,
    parse_context,
)
from parrot_gateway.semantic.session import Session
from parrot_gateway.settings.model import SessionSettings

CHAT: CallKind = "chat"
TEXT: CallKind = "completions"


def session_of(**limits: Any) -> Session:
    ids = (f"v{number}" for number in range(1000))
    return Session(
        "s1", "app", "t", now=0, limits=SessionSettings(**limits),
        mint_variable_id=lambda: next(ids),
    )  # fmt: skip


def chat(text: str, **fields: Any) -> bytes:
    messages = [{"role": "user", "content": text}]
    return json.dumps({"model": "m", "messages": messages, **fields}).encode()


def use(
    session: Session, name: str, body: bytes | None = None, kind: CallKind = CHAT
) -> ContextUse:
    request = CallRequest(kind, chat("?") if body is None else body)
    return enter(session, parse_context(name), request)


def composed(taken: ContextUse, body: bytes, kind: CallKind = CHAT) -> bytes:
    """The body of a call behind what its context holds."""
    return taken.compose(CallRequest(kind, body)).body


def say(session: Session, name: str, prompt: str, answer: str) -> list[str]:
    """A whole call; the texts that the model was given."""
    taken = use(session, name)
    shown = json.loads(composed(taken, chat(prompt)))
    taken.append(answer)
    taken.commit()
    taken.leave()
    return [message["content"] for message in shown["messages"]]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("chat", ContextName("chat")),
        (" chat ", ContextName("chat")),
        ("chat<main", ContextName("chat", "main")),
        (" a b < c ", ContextName("a b", "c")),
    ],
)
def test_names(text: str, found: ContextName) -> None:
    assert parse_context(text) == found


@pytest.mark.parametrize("text", ["", "<", "a<", "<a", "a<a", "a<b<c", "a\x00", "x" * 257])
def test_what_is_no_name(text: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_context(text)
    assert caught.value.param == "context"


async def test_messages_accumulate() -> None:
    session = session_of()
    assert say(session, "chat", "one", "1") == ["one"]
    assert say(session, "chat", "two", "2") == ["one", "1", "two"]
    assert say(session, "chat", "three", "3") == ["one", "1", "two", "2", "three"]
    contents = find_context(session, "chat").contents
    assert contents is not None
    assert json.loads(contents.messages[-1]) == {"role": "assistant", "content": "3"}
    assert session.value_bytes == contents.size_bytes


async def test_messages_keep_their_bytes() -> None:
    session = session_of()
    odd = b'{"role": "user",  "content": "caf\\u00e9", "x": 1.0}'
    taken = use(session, "chat")
    first = b'{"messages":[' + odd + b'],"seed":  7}'
    assert composed(taken, first) is first
    taken.append("!")
    taken.commit()
    taken.leave()
    taken = use(session, "chat")
    assert odd in composed(taken, chat("two"))
    taken.leave()


async def test_text_accumulates() -> None:
    session = session_of()
    for prompt, answer, whole in [("a", "b", "a"), ("c", "d", "abc"), ("e", "f", "abcde")]:
        body = json.dumps({"prompt": prompt}).encode()
        taken = use(session, "t", body, TEXT)
        assert json.loads(composed(taken, body, TEXT))["prompt"] == whole
        taken.append(answer)
        taken.commit()
        taken.leave()


async def test_a_failed_call_leaves_it_as_it_was() -> None:
    session = session_of()
    taken = use(session, "chat")
    composed(taken, chat("lost"))
    taken.append("half")
    taken.leave()
    assert session.contexts == {}
    say(session, "chat", "one", "1")
    before = find_context(session, "chat").contents
    taken = use(session, "chat")
    composed(taken, chat("lost"))
    taken.commit()
    taken.undo()
    taken.leave()
    assert find_context(session, "chat").contents == before
    assert before is not None
    assert session.value_bytes == before.size_bytes


async def test_forks_part_ways() -> None:
    session = session_of()
    say(session, "main", "one", "1")
    branch = use(session, "a<main")
    await settled(branch)
    assert b"one" in composed(branch, chat("two"))
    branch.commit()
    branch.leave()
    assert say(session, "main", "three", "3") == ["one", "1", "three"]
    with pytest.raises(ConflictError) as caught:
        use(session, "a<main")
    assert caught.value.code == "context_exists"
    with pytest.raises(ContextNotFoundError):
        use(session, "b<nothing")
    assert set(session.contexts) == {"main", "a"}


async def settled(*uses: ContextUse) -> None:
    for _ in range(5):
        await asyncio.sleep(0)
    assert all(each.is_granted for each in uses)


async def test_one_at_a_time_in_order() -> None:
    session, called = session_of(), []
    first, second, third = (use(session, "chat") for _ in range(3))
    for name, each in (("second", second), ("third", third)):
        each.when_turn(lambda name=name: called.append(name))  # type: ignore[misc]
    assert (first.is_granted, second.is_granted, third.is_granted) == (True, False, False)
    second.leave()
    composed(first, chat("one"))
    first.commit()
    first.leave()
    first.leave()
    await settled(third)
    assert called == ["third"]
    assert b"one" in composed(third, chat("three"))
    third.leave()


async def test_a_fork_waits_for_calls_that_came_before_it() -> None:
    session = session_of()
    first = use(session, "main")
    fork = use(session, "a<main")
    later = use(session, "main")
    assert not fork.is_granted
    composed(first, chat("one"))
    first.commit()
    first.leave()
    # What the fork begins with is settled now: later calls need not wait for its end.
    await settled(fork, later)
    composed(later, chat("later"))
    later.commit()
    later.leave()
    whole = composed(fork, chat("two"))
    assert b"one" in whole
    assert b"later" not in whole
    fork.leave()
    assert set(session.contexts) == {"main"}


async def test_a_fork_of_what_failed() -> None:
    session = session_of()
    first = use(session, "main")
    fork = use(session, "a<main")
    first.leave()
    await settled(fork)
    with pytest.raises(ContextNotFoundError):
        composed(fork, chat("two"))
    fork.leave()
    assert session.contexts == {}


async def test_kinds_do_not_mix() -> None:
    session = session_of()
    say(session, "chat", "one", "1")
    for name in ("chat", "new<chat"):
        with pytest.raises(ConflictError) as caught:
            use(session, name, b'{"prompt": "x"}', TEXT)
        assert caught.value.code == "context_kind"


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (CHAT, chat("x", n=2), "n"),
        (CHAT, b"{}", "messages"),
        (CHAT, chat("x", tools=[{}]), "tools"),
        (CHAT, chat("x", continue_final_message=True), "continue_final_message"),
        (TEXT, b'{"prompt": ["a", "b"]}', "prompt"),
        (TEXT, b'{"prompt": "a", "echo": true}', "echo"),
    ],
)
async def test_what_a_context_cannot_take(kind: CallKind, body: bytes, param: str) -> None:
    session = session_of()
    with pytest.raises((InvalidRequestError, UnsupportedError)) as caught:
        use(session, "chat", body, kind)
    assert caught.value.param == param
    assert session.contexts == {}


async def test_bounds() -> None:
    session = session_of(max_contexts=2, max_context_bytes=500)
    say(session, "a", "one", "1")
    say(session, "b", "one", "1")
    with pytest.raises(SessionFullError):
        use(session, "c")
    taken = use(session, "a")
    with pytest.raises(ContextTooLargeError):
        composed(taken, chat("x" * 500))
    taken.leave()
    taken = use(session, "a")
    composed(taken, chat("x"))
    taken.append("y" * 500)
    with pytest.raises(ContextTooLargeError):
        taken.commit()
    taken.leave()
    assert say(session, "a", "two", "2") == ["one", "1", "two"]


async def test_freeing() -> None:
    session = session_of()
    say(session, "a", "one", "1")
    taken = use(session, "a")
    with pytest.raises(ConflictError) as caught:
        free_context(session, "a")
    assert caught.value.code == "context_in_use"
    taken.leave()
    free_context(session, "a")
    assert (session.contexts, session.value_bytes) == ({}, 0)
    with pytest.raises(ContextNotFoundError):
        free_context(session, "a")
    say(session, "b", "one", "1")
    free_all_contexts(session)
    assert (session.contexts, session.value_bytes) == ({}, 0)


class _Model(RuleBasedStateMachine):
    """After any calls, contexts hold what the successful ones said, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.session = session_of()
        self.open: list[tuple[str, ContextUse, bool]] = []
        self.truth: dict[str, list[str]] = {}
        self.number = 0

    def teardown(self) -> None:
        for _, taken, _ in self.open:
            taken.leave()
        self.settle()
        self.loop.close()

    def settle(self) -> None:
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.run_until_complete(asyncio.sleep(0))

    @rule(name=st.sampled_from("abc"), parent=st.sampled_from([None, None, "a", "b", "c"]))
    def begin(self, name: str, parent: str | None) -> None:
        if name == parent:
            return
        wanted = ContextName(name, parent)

        async def go() -> ContextUse:
            return enter(self.session, wanted, CallRequest(CHAT, chat("?")))

        try:
            taken = self.loop.run_until_complete(go())
        except GatewayError:
            return
        self.open.append((name, taken, parent is not None))
        self.settle()

    @rule(index=st.integers(0, 5), ends=st.sampled_from(["well", "badly", "early"]))
    def end(self, index: int, ends: str) -> None:
        if index >= len(self.open):
            return
        name, taken, is_fork = self.open.pop(index)
        if ends != "early" and taken.is_granted:
            self.number += 1
            try:
                shown = json.loads(composed(taken, chat(f"q{self.number}")))
            except GatewayError:
                taken.leave()
                self.settle()
                return
            texts = [message["content"] for message in shown["messages"]]
            if not is_fork:
                assert texts[:-1] == self.truth.get(name, [])
            if ends == "well":
                taken.append("answer")
                taken.commit()
                self.truth[name] = [*texts, "answer"]
        taken.leave()
        self.settle()

    @rule(name=st.sampled_from("abc"))
    def free(self, name: str) -> None:
        try:
            free_context(self.session, name)
        except GatewayError:
            return
        self.truth.pop(name, None)

    @invariant()
    def holds_what_was_said(self) -> None:
        assert self.session.value_bytes == sum(
            find_context(self.session, name).size_bytes for name in self.session.contexts
        )
        held = {name: texts_of(find_context(self.session, name).contents)
                for name in self.session.contexts}  # fmt: skip
        assert {name: texts for name, texts in held.items() if texts} == self.truth
        waiting = {name for name, _, _ in self.open}
        if not self.open:
            assert set(held) == set(self.truth)
        for name in waiting:
            turns = [taken for own, taken, _ in self.open if own == name and taken.is_granted]
            assert len(turns) <= 1


def texts_of(contents: Contents | None) -> list[str]:
    return [json.loads(raw)["content"] for raw in contents.messages] if contents else []


TestContexts = _Model.TestCase
TestContexts.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


async def test_a_fork_of_a_context_with_too_many_calls_leaves_nothing() -> None:
    session = session_of()
    say(session, "main", "one", "1")
    waiting = [use(session, "main") for _ in range(MAX_WAITING + 1)]
    with pytest.raises(OverloadedError):
        use(session, "new<main")
    assert list(session.contexts) == ["main"]
    for each in waiting:
        each.leave()


async def test_a_fork_of_a_context_with_too_many_calls_gives_its_own_turn_back() -> None:
    session = session_of()
    say(session, "main", "one", "1")
    waiting = [use(session, "main") for _ in range(MAX_WAITING + 1)]
    first = use(session, "new")
    with pytest.raises(OverloadedError):
        use(session, "new<main")
    first.leave()
    assert list(session.contexts) == ["main"]
    for each in waiting:
        each.leave()
