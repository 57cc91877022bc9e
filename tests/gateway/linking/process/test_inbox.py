"""The queue for the linking process: in order, in turns, and bounded."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from parrot_gateway.linking.process.inbox import MAX_WAIT_S, Inbox
from parrot_gateway.linking.process.wire import AnswerSeen, Query, RequestSeen, ToWorker, encode


class Pipe:
    """A pipe with an inbox of a few kB at its end."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        self.inbox = Inbox(self._read, max_bytes=4000)

    def send(self, *messages: ToWorker) -> None:
        os.write(self._write, b"".join(encode([each]) for each in messages))

    def send_bytes(self, data: bytes) -> None:
        os.write(self._write, data)

    def rest(self) -> list[str]:
        """Return the rest, after the other end has been closed."""
        os.close(self._write)
        self._write = -1
        found = []
        while (message := self.inbox.next()) is not None:
            found.append(name_of(message))
        return found

    def close(self) -> None:
        os.close(self._read)
        if self._write >= 0:
            os.close(self._write)


def name_of(message: ToWorker) -> str:
    assert isinstance(message, RequestSeen | AnswerSeen | Query)
    return message.name if isinstance(message, Query) else message.call


def request(call: str, tenant: str = "t", size: int = 10, age_s: float = 0.0) -> RequestSeen:
    now = time.time() - age_s
    return RequestSeen(tenant, call, f"req_{call}", "/v1/chat/completions", "", now, b"x" * size)


def answer(call: str, tenant: str = "t", size: int = 10) -> AnswerSeen:
    return AnswerSeen(tenant, call, 200, time.time(), b"x" * size)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.close()


def test_messages_of_a_tenant_stay_in_order_and_tenants_take_turns(pipe: Pipe) -> None:
    pipe.send(request("a1", "a"), answer("a1", "a"), request("a2", "a"), request("b1", "b"))
    pipe.send(Query(1, "b", "call", "b?"), request("c1", "c"))
    assert pipe.rest() == ["a1", "b1", "c1", "a1", "b?", "a2"]


def test_a_message_that_comes_in_pieces_is_one(pipe: Pipe) -> None:
    data = encode([request("a1")]) + encode([answer("a1")])
    pipe.send_bytes(data[:2])
    pipe.send_bytes(data[2:50])
    pipe.send_bytes(data[50:])
    assert pipe.rest() == ["a1", "a1"]


def test_a_tenant_that_floods_is_skipped_and_no_other(pipe: Pipe) -> None:
    pipe.send(*(request(f"a{number}", "a", 500) for number in range(20)))
    pipe.send(answer("a0", "a", 5000), Query(1, "a", "call", "a?"))
    pipe.send(*(request(f"b{number}", "b", 500) for number in range(2)))
    first = pipe.inbox.next()
    assert first is not None
    assert name_of(first) == "a0"
    waits = pipe.inbox.describe()
    assert waits["waiting_bytes"] < 2 * 4000
    skipped = pipe.inbox.skipped
    assert skipped > 10
    left = pipe.rest()
    assert {"a?", "b0", "b1"} <= {*left}
    # Of the answer only the text is left out: that the call has ended is said.
    assert left.count("a0") == 1
    assert len(left) == 24 - 1 - (skipped - 1)


def test_what_has_waited_too_long_is_skipped(pipe: Pipe) -> None:
    pipe.send(request("old", age_s=MAX_WAIT_S + 1), answer("old"), request("new"))
    assert pipe.rest() == ["old", "new"]
    assert pipe.inbox.skipped == 1


def test_a_tenant_whose_first_message_is_too_large_leaves_nothing(pipe: Pipe) -> None:
    pipe.send(request("large", "a", 5000), request("b1", "b"))
    assert pipe.rest() == ["b1"]
    assert pipe.inbox.skipped == 1


def test_what_waits_is_counted_and_the_oldest_tells_how_far_behind_it_is(pipe: Pipe) -> None:
    assert pipe.inbox.describe() == {"waiting": 0, "waiting_bytes": 0, "behind_s": 0, "skipped": 0}
    pipe.send(request("a1", "a"), request("b1", "b", 20, 3.0), request("c1", "c", 30, 2.0))
    pipe.send(answer("b1", "b", 40), Query(1, "d", "call", "d?"))
    first = pipe.inbox.next()
    assert first is not None
    assert name_of(first) == "a1"
    told = pipe.inbox.describe()
    assert told["behind_s"] >= 3.0
    assert (told["waiting"], told["waiting_bytes"]) == (4, 4 * 256 + 20 + 30 + 40)
    assert not pipe.inbox.is_empty
    assert pipe.rest() == ["b1", "c1", "d?", "b1"]
    assert pipe.inbox.is_empty
