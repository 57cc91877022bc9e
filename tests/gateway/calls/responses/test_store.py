"""The store of responses and conversations: bounds, time, sharing, tenants."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from parrot_gateway.calls.event_log import EventLog
from parrot_gateway.calls.fifo_lock import FifoLock, wait_granted
from parrot_gateway.calls.responses.items import MessageItem, Part, Turn, chain_of, history_of
from parrot_gateway.calls.responses.store import Conversation, ResponseStore, StoredResponse
from parrot_gateway.exceptions import DeadlineError, InvalidRequestError, OverloadedError
from parrot_gateway.settings.model import ResponseSettings


def item(text: str) -> MessageItem:
    return MessageItem(f"msg_{text}", "user", (Part(text),))


def response(name: str, parent: Turn | None = None, text: str = "x") -> StoredResponse:
    return StoredResponse(name, b"{}", Turn(parent, [item(text)]))


def texts(turn: Turn | None) -> list[str]:
    return [each.text for each in history_of(turn)]


def test_oldest_unused_goes_first() -> None:
    store = ResponseStore(ResponseSettings(max_stored=2))
    store.keep("t", response("a"), 0)
    store.keep("t", response("b"), 1)
    assert store.response("t", "a", 2) is not None
    store.keep("t", response("c"), 3)
    assert store.response("t", "b", 4) is None
    assert store.response("t", "a", 4) is not None


def test_time_is_counted_from_the_last_use() -> None:
    store = ResponseStore(ResponseSettings(ttl_s=10))
    store.keep("t", response("a"), 0)
    assert store.response("t", "a", 9) is not None
    assert store.response("t", "a", 19) is not None
    assert store.response("t", "a", 30) is None
    assert store.statistics() == (0, 0)


def test_tenants_do_not_see_each_other() -> None:
    store = ResponseStore(ResponseSettings(max_stored=3))
    store.keep("one", response("a"), 0)
    assert store.response("two", "a", 0) is None
    store.delete("two", "a")
    assert store.response("one", "a", 0) is not None
    for name in "bcde":
        store.keep("two", response(name), 1)
    # Who holds most makes room.
    assert store.response("one", "a", 2) is not None


def test_ids_of_one_kind_are_not_the_other() -> None:
    store = ResponseStore(ResponseSettings())
    store.keep("t", response("a"), 0)
    store.keep("t", Conversation("c", 0.0), 0)
    assert store.conversation("t", "a", 0) is None
    assert store.response("t", "c", 0) is None


def test_a_forgotten_response_stays_in_histories() -> None:
    store = ResponseStore(ResponseSettings())
    first = response("a", text="one")
    store.keep("t", first, 0)
    store.keep("t", response("b", first.turn, text="two"), 0)
    before = store.statistics().size_bytes
    store.delete("t", "a")
    kept = store.response("t", "b", 0)
    assert kept is not None
    assert texts(kept.turn) == ["one", "two"]
    assert store.statistics().size_bytes == before - 2
    store.delete("t", "b")
    assert store.statistics() == (0, 0)


def test_items_are_found_by_id_as_long_as_something_holds_them() -> None:
    store = ResponseStore(ResponseSettings())
    first = response("a", text="one")
    store.keep("t", first, 0)
    store.keep("t", response("b", first.turn, text="two"), 0)
    store.delete("t", "a")
    assert store.item("t", "msg_one") is first.turn.input[0]
    assert store.item("other", "msg_one") is None
    store.delete("t", "b")
    assert store.item("t", "msg_one") is None


def test_what_is_forgotten_while_it_is_made_is_cancelled() -> None:
    store, cancelled = ResponseStore(ResponseSettings()), []
    made = response("a")
    made.cancel = lambda: cancelled.append(made.id)
    store.keep("t", made, 0)
    store.delete("t", "a")
    assert cancelled == ["a"]


def test_bytes_are_bounded() -> None:
    store = ResponseStore(ResponseSettings(max_bytes=10_000))
    for number in range(100):
        store.keep("t", response(str(number), text="x" * 1000), number)
        assert store.statistics().size_bytes <= 10_000
    assert store.response("t", "99", 100) is not None
    assert store.response("t", "0", 100) is None


def test_a_conversation_has_its_share() -> None:
    store = ResponseStore(ResponseSettings(max_bytes=80_000))
    conversation = Conversation("c", 0.0)
    store.keep("t", conversation, 0)
    store.extend("t", conversation, [item("x" * 8000)])
    with pytest.raises(InvalidRequestError) as caught:
        store.extend("t", conversation, [item("y" * 8000)])
    assert caught.value.code == "conversation_too_large"
    assert [len(text) for text in texts(conversation.turn)] == [8000]


def test_long_chains_need_no_stack() -> None:
    store = ResponseStore(ResponseSettings(max_stored=1))
    turn: Turn | None = None
    for number in range(20_000):
        latest = response(str(number), turn)
        store.keep("t", latest, number)
        turn = latest.turn
    assert len(history_of(turn)) == 20_000
    store.delete("t", "19999")
    assert store.statistics() == (0, 0)


class _Model(RuleBasedStateMachine):
    """Sizes are always those of what can be reached."""

    def __init__(self) -> None:
        super().__init__()
        self.store = ResponseStore(ResponseSettings(max_stored=6, max_bytes=6000, ttl_s=50))
        self.now = 0.0
        self.responses: list[StoredResponse] = []
        self.owners: dict[str, str] = {}
        self.conversations: list[Conversation] = []
        self.number = 0

    @rule(parent=st.integers(0, 8), tenant=st.sampled_from("ab"), size=st.integers(0, 300))
    def respond(self, parent: int, tenant: str, size: int) -> None:
        found = None
        if parent < len(self.responses):
            found = self.store.response(tenant, self.responses[-1 - parent].id, self.now)
        self.number += 1
        made = response(f"r{self.number}", found.turn if found else None, "x" * size)
        self.responses.append(made)
        self.owners[made.id] = tenant
        self.store.keep(tenant, made, self.now)

    @rule(index=st.integers(0, 8), size=st.integers(0, 300), ends=st.booleans())
    def update(self, index: int, size: int, ends: bool) -> None:
        """One that is made in the background comes further, whoever keeps it or not."""
        if index < len(self.responses):
            made = self.responses[-1 - index]
            made.log = made.log or EventLog()
            made.log.append(b"e" * size)
            turn = Turn(made.turn.parent, made.turn.input, [item("z" * size)]) if ends else None
            self.store.update(self.owners[made.id], made, b"a" * size, turn)

    @rule(tenant=st.sampled_from("ab"))
    def converse(self, tenant: str) -> None:
        self.number += 1
        made = Conversation(f"{tenant}{self.number}", self.now)
        self.conversations.append(made)
        self.store.keep(tenant, made, self.now)

    @rule(index=st.integers(0, 5), keep=st.booleans())
    def extend(self, index: int, keep: bool) -> None:
        if index < len(self.conversations):
            conversation = self.conversations[-1 - index]
            tenant = conversation.id[0]
            try:
                turn = self.store.extend(tenant, conversation, [item("y")])
            except InvalidRequestError:
                return
            if keep:
                self.number += 1
                self.store.keep(tenant, StoredResponse(f"r{self.number}", b"{}", turn), self.now)

    @rule(index=st.integers(0, 5))
    def flatten(self, index: int) -> None:
        if index < len(self.conversations):
            conversation = self.conversations[-1 - index]
            self.store.replace(conversation.id[0], conversation, Turn(None, conversation.items))

    @rule(index=st.integers(0, 8), tenant=st.sampled_from("ab"))
    def delete(self, index: int, tenant: str) -> None:
        known = [entry.id for entry in (*self.responses, *self.conversations)]
        if index < len(known):
            self.store.delete(tenant, known[index])

    @rule(seconds=st.integers(1, 60))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.store.sweep(self.now)

    @invariant()
    def sizes_are_true(self) -> None:
        count = size = 0
        for held in self.store._tenants.values():
            reached: dict[int, Turn] = {}
            for entry in held.entries.values():
                size += entry.size_bytes
                reached |= {id(turn): turn for turn in chain_of(entry.turn)}
            count += len(held.entries)
            size += sum(turn.size_bytes for turn in reached.values())
            items = Counter(item.id for turn in reached.values() for item in turn.items)
            assert {name: found[1] for name, found in held.items.items()} == items
        assert self.store.statistics() == (count, size)
        assert count <= 6
        assert size <= 6000


TestSizes = _Model.TestCase
TestSizes.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


async def test_first_come_first_served() -> None:
    lock, order = FifoLock(), []

    async def one(name: str) -> None:
        request = lock.request()
        try:
            await wait_granted(request, 5)
            order.append(name)
            await asyncio.sleep(0)
        finally:
            lock.release(request)
            lock.release(request)

    await asyncio.gather(*(one(name) for name in "abcd"))
    assert order == list("abcd")
    assert lock.is_free


async def test_who_gives_up_lets_the_next_pass() -> None:
    lock = FifoLock()
    first, second, third = lock.request(), lock.request(), lock.request()
    assert (first.is_granted, second.is_granted) == (True, False)
    with pytest.raises(DeadlineError):
        await wait_granted(second, 0.001)
    lock.release(second)
    lock.release(first)
    await wait_granted(third, 5)
    lock.release(third)
    assert lock.is_free


async def test_a_line_is_bounded() -> None:
    lock = FifoLock(max_waiting=2)
    for _ in range(3):
        lock.request()
    with pytest.raises(OverloadedError):
        lock.request("the context 'c'")


@given(st.lists(st.text(max_size=5), min_size=1, max_size=4), st.booleans())
def test_items_tell_their_text(parts: list[str], is_refusal: bool) -> None:
    made = MessageItem("msg_1", "assistant", tuple(Part(text, is_refusal) for text in parts))
    shown = made.to_dict()
    key = "refusal" if is_refusal else "text"
    assert [part[key] for part in shown["content"]] == parts
    assert made.text == "\n".join(parts)
